"""Stores a curve of any length in bounded memory, and returns it as columns of a plot. No files, no screen.

`BoundedSeries` stores buckets of consecutive points: the first and last x, and the sum, least and greatest y of each.
When there are `limit` buckets, neighbouring buckets are merged in pairs, so memory does not grow and all full buckets
have the same number of points. A million steps are in at least 2,048 buckets, more than a terminal can show. No point
is left out, so no spike is lost.

Try: `BoundedSeries().extend(range(1, 11), [3.0] * 10)`
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import add
from typing import NamedTuple

LIMIT = 4096
"""Number of buckets at which neighbours are merged, an even number: eight per dot of a plot 256 columns wide."""


class PlotColumn(NamedTuple):
    """The points of one column of a plot: their mean, their least and their greatest value."""

    mean: float
    least: float
    greatest: float


class Reading(NamedTuple):
    """The points of a part of a series: the first and the last x, and mean, least and greatest y."""

    first: float
    last: float
    mean: float
    least: float
    greatest: float


class BoundedSeries:
    """A series of points (x, y) ordered by x, in bounded memory. Points whose y is not finite are dropped."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._per_bucket = 1
        self._first, self._last = array("d"), array("d")
        self._sum, self._least, self._greatest = array("d"), array("d"), array("d")
        self._count = array("q")

    def __len__(self) -> int:
        """Number of buckets in which the points are stored."""
        return len(self._first)

    def equals(self, other: BoundedSeries) -> bool:
        """Whether both hold the same points in the same buckets."""
        return (self._first, self._sum, self._count) == (other._first, other._sum, other._count)

    @property
    def points(self) -> int:
        """Number of points in the series: all that were added and not removed."""
        return sum(self._count)

    @property
    def start(self) -> float:
        """The x of the first point; 0 if there are no points."""
        return self._first[0] if self._first else 0.0

    @property
    def end(self) -> float:
        """The x of the last point; 0 if there are no points."""
        return self._last[-1] if self._last else 0.0

    def extend(self, xs: Sequence[float], ys: Sequence[float | None]) -> None:
        """Add points. No x may be less than `end`."""
        points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and math.isfinite(y)]
        at = 0
        while at < len(points):
            if not self._count or self._count[-1] >= self._per_bucket:
                self._open(points[at][0])
            taken = points[at : at + self._per_bucket - self._count[-1]]
            self._fill(taken)
            at += len(taken)

    def cut_after(self, x: float) -> None:
        """Remove every bucket that extends beyond `x`. A bucket that contains `x` is removed with its points before
        `x`, too: these are at most one dot of a plot."""
        self.keep(bisect_right(self._last, x))

    def keep(self, kept: int) -> None:
        """Remove all but the first `kept` buckets."""
        for column in (self._first, self._last, self._sum, self._least, self._greatest, self._count):
            del column[kept:]

    def columns(self, count: int, start: float | None = None, end: float | None = None) -> list[PlotColumn | None]:
        """Divide the range from `start` to `end` into `count` columns of equal width; a column without a point is None.

        A bucket belongs to every column that it overlaps, so a long bucket leaves no gap.
        """
        low = self.start if start is None else start
        high = self.end if end is None else end
        if not self._first or count < 1 or high < low:
            return [None] * max(0, count)
        width = (high - low) / count or 1.0
        groups: list[list[int]] = [[] for _ in range(count)]
        for index in range(bisect_left(self._last, low), bisect_right(self._first, high)):
            left = max(0, min(count - 1, int((self._first[index] - low) / width)))
            right = max(0, min(count - 1, int((self._last[index] - low) / width)))
            for column in range(left, right + 1):
                groups[column].append(index)
        return [self._merged(group) for group in groups]

    def reading(self, low: float, high: float) -> Reading | None:
        """The points from `low` to `high`, both included: of every bucket that overlaps that range. None
        without one."""
        group = list(range(bisect_left(self._last, low), bisect_right(self._first, high)))
        merged = self._merged(group)
        return Reading(self._first[group[0]], self._last[group[-1]], *merged) if merged is not None else None

    def nearest(self, x: float) -> Reading | None:
        """The points of the bucket that is nearest to `x`; None if the series has no points."""
        if not self._first:
            return None
        after = min(bisect_left(self._last, x), len(self._first) - 1)
        near = min({after, max(0, after - 1)}, key=lambda index: max(self._first[index] - x, x - self._last[index]))
        return self.reading(self._first[near], self._last[near])

    def _merged(self, group: list[int]) -> PlotColumn | None:
        if not group:
            return None
        total = sum(self._sum[index] for index in group)
        points = sum(self._count[index] for index in group)
        return PlotColumn(
            total / points, min(self._least[index] for index in group), max(self._greatest[index] for index in group)
        )

    def _open(self, x: float) -> None:
        """Make room in the last bucket: merge neighbours, or append a new bucket that begins at `x`."""
        if len(self._first) >= self._limit:
            self._halve()
            if self._count[-1] < self._per_bucket:
                return
        self._first.append(x)
        self._last.append(x)
        self._sum.append(0.0)
        self._least.append(math.inf)
        self._greatest.append(-math.inf)
        self._count.append(0)

    def _fill(self, points: Sequence[tuple[float, float]]) -> None:
        """Add points (x, y), in order of x, to the last bucket."""
        values = [y for _, y in points]
        self._last[-1] = points[-1][0]
        self._sum[-1] += sum(values)
        self._least[-1] = min(self._least[-1], *values)
        self._greatest[-1] = max(self._greatest[-1], *values)
        self._count[-1] += len(values)

    def _halve(self) -> None:
        """Merge the buckets in pairs of neighbours, which halves their number."""
        self._per_bucket *= 2
        first, last, total = self._first, self._last, self._sum
        least, greatest, count = self._least, self._greatest, self._count
        # The limit is even, so no bucket is left without a neighbour.
        self._first, self._last = first[0::2], last[1::2]
        self._sum = array("d", map(add, total[0::2], total[1::2]))
        self._least = array("d", map(min, least[0::2], least[1::2]))
        self._greatest = array("d", map(max, greatest[0::2], greatest[1::2]))
        self._count = array("q", map(add, count[0::2], count[1::2]))


def smoothed(columns: Sequence[PlotColumn | None], half_life: float) -> list[PlotColumn | None]:
    """Replace the means of the columns by an exponential moving average; `half_life` is a number of columns.

    The weights are normalised, so that early columns are not pulled towards zero (Kingma and Ba 2015, section 3).
    """
    keep = 0.5 ** (1.0 / half_life)
    total = weight = 0.0
    result: list[PlotColumn | None] = []
    for column in columns:
        if column is None:
            total, weight = total * keep, weight * keep
            result.append(None)
            continue
        total, weight = total * keep + column.mean * (1 - keep), weight * keep + (1 - keep)
        result.append(column._replace(mean=total / weight))
    return result
