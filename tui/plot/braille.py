"""Curves as lines of text, drawn with braille dots: a cell has two columns and four rows of dots.
Pure functions.

This module takes about one per cent of a core for a 120x36 screen; a plot library took 6 to 11. A cell has a single
colour: if curves share a cell, the colour of the last one. In ASCII, `*` draws the curve and `:` its band.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from textual.content import Content

from tui.plot.series import PlotColumn

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character's dots by column and row (Unicode chapter 21.1: U+2800 plus the sum of the dots)."""

BRAILLE = 0x2800
LABEL_WIDTH = 8
"""Cells for the numbers of the y axis."""

ROWS_PER_TICK = 3


@dataclass(frozen=True)
class PlotCurve:
    """A curve to draw, with one element of `columns` per column of dots (two per cell of the plot); None where it has
    no point."""

    columns: Sequence[PlotColumn | None]
    style: str
    band: str = ""
    """Style of the band from least to greatest value; no band is drawn where it is empty."""
    thick: bool = False
    """Whether the line is two dots high where it is flat, instead of one."""


@dataclass(frozen=True)
class YRange:
    """The range of the y axis, from `low` to `high`; `log` makes the axis logarithmic."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """The height at which a value is drawn: 0 at the bottom, 1 at the top. A value outside the range is drawn at
        the nearer end."""
        if self.log:
            value, low, high = (math.log(max(number, 1e-300)) for number in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return max(0.0, min(1.0, (value - low) / (high - low)))

    def dot(self, value: float, height: int) -> int:
        """The row of dots, from the top, in which a plot of `height` rows of cells draws a value; a cell has four."""
        return round((1 - self.share(value)) * (4 * height - 1))

    def row(self, value: float, height: int) -> int:
        """The row of cells, from the top, in which a plot of `height` rows draws a value: that of its dot."""
        return self.dot(value, height) >> 2


@dataclass(frozen=True)
class Cell:
    """One character of the plot, with its style."""

    letter: str = " "
    style: str = ""


def fit_y_range(curves: Sequence[PlotCurve], points: Sequence[float] = (), *, log: bool = False) -> YRange | None:
    """Return the range of the y axis that includes every mean of the curves and every value of `points`; None if there
    are neither. `log`: a logarithmic axis, on which only positive values count.

    Bands may extend beyond the range: otherwise one outlier among thousands of steps would flatten the curve.
    """
    values = [column.mean for curve in curves for column in curve.columns if column is not None]
    values += [point for point in points if math.isfinite(point)]
    if log:
        values = [value for value in values if value > 0]
    if not values:
        return None
    low, high = min(values), max(values)
    if log:
        return YRange(low / 1.1, high * 1.1, log=True)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return YRange(low - room, high + room)


def ticks(y_range: YRange, height: int) -> dict[int, str]:
    """Return labels of the y axis by row number of a plot of `height` rows: round numbers, at most one every
    few rows."""
    labels: dict[int, str] = {}
    for value in tick_values(y_range, max(2, height // ROWS_PER_TICK)):
        labels.setdefault(y_range.row(value, height), f"{value:.4g}")
    return labels


def tick_values(y_range: YRange, wanted: int) -> list[float]:
    """Round numbers for the labels of the y axis, about as many as `wanted`."""
    return _log_ticks(y_range, wanted) if y_range.log else _even_ticks(y_range, wanted)


def _even_ticks(y_range: YRange, wanted: int) -> list[float]:
    rough = (y_range.high - y_range.low) / wanted
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough)
    first = math.ceil(y_range.low / step)
    return [index * step for index in range(first, math.floor(y_range.high / step) + 1)]


def _log_ticks(y_range: YRange, wanted: int) -> list[float]:
    decades = range(math.floor(math.log10(y_range.low)), math.ceil(math.log10(y_range.high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [factor * 10.0**decade for decade in decades for factor in factors]
        inside = [value for value in values if y_range.low <= value <= y_range.high]
        if len(inside) <= wanted:
            return inside or [y_range.low, y_range.high]
    return inside[:: -(-len(inside) // wanted)]


def draw_curves(
    curves: Sequence[PlotCurve], width: int, height: int, y_range: YRange, *, ascii_only: bool
) -> list[list[Cell]]:
    """Draw the curves over each other, later ones on top, into a plot of `width` × `height` cells; returns `height`
    rows of `width` cells."""
    cells = [[Cell()] * width for _ in range(height)]
    for curve in curves:
        if curve.band:
            _draw_dots(cells, _band_dots(curve.columns, height, y_range), curve.band, ":" if ascii_only else "")
        dots = _line_dots(curve.columns, height, y_range)
        dots = [_thicker(span, 4 * height - 1) for span in dots] if curve.thick else dots
        _draw_dots(cells, dots, curve.style, "*" if ascii_only else "")
    return cells


def _thicker(span: tuple[int, int] | None, last: int) -> tuple[int, int] | None:
    """The dots of a line in one column, and one more: below them, or above where there is no row below."""
    if span is None:
        return None
    return (span[0], span[1] + 1) if span[1] < last else (max(0, span[0] - 1), span[1])


def _draw_dots(cells: list[list[Cell]], dots: Sequence[tuple[int, int] | None], style: str, letter: str) -> None:
    """Draw dots into the cells. `dots` has the first and last dot row of each dot column, None for a column without
    dots. If `letter` is not empty, it is drawn in place of the braille character."""
    bits: dict[tuple[int, int], int] = {}
    for x, span in enumerate(dots):
        if span is None:
            continue
        for y in range(span[0], span[1] + 1):
            place = (y >> 2, x >> 1)
            bits[place] = bits.get(place, 0) | DOTS[x & 1][y & 3]
    for (row, column), sum_of_dots in bits.items():
        if column < len(cells[0]):
            cells[row][column] = Cell(letter or chr(BRAILLE + sum_of_dots), style)


def _band_dots(columns: Sequence[PlotColumn | None], height: int, y_range: YRange) -> list[tuple[int, int] | None]:
    return [
        None if column is None else (y_range.dot(column.greatest, height), y_range.dot(column.least, height))
        for column in columns
    ]


def _line_dots(columns: Sequence[PlotColumn | None], height: int, y_range: YRange) -> list[tuple[int, int] | None]:
    """Return for each dot column the first and last dot row of a line through the means, None before the first and
    after the last point. Columns without a point in between are crossed by a straight line. `height` is in cells."""
    known = [(x, y_range.dot(c.mean, height)) for x, c in enumerate(columns) if c is not None]
    dots: list[tuple[int, int] | None] = [None] * len(columns)
    for x, y in known[:1]:
        dots[x] = (y, y)
    for (x0, y0), (x1, y1) in pairwise(known):
        before = y0
        for x in range(x0 + 1, x1 + 1):
            y = round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
            # The dots between the previous column's height and this one's are drawn too, so that the line has no gaps.
            reach = before + (y > before) - (y < before)
            dots[x] = (min(y, reach), max(y, reach))
            before = y
    return dots


def plot_lines(cells: Sequence[Sequence[Cell]], labels: Mapping[int, str]) -> list[Content]:
    """Convert rows of cells into lines of text with the labels of the y axis on their left; `labels` maps row numbers
    to texts."""
    return [_row(row, labels.get(index, "")) for index, row in enumerate(cells)]


def _row(cells: Sequence[Cell], label: str) -> Content:
    parts: list[tuple[str, str]] = [(f"{label:>{LABEL_WIDTH - 1}} ", "$muted")]
    for style, group in groupby(cells, key=lambda cell: cell.style):
        parts.append(("".join(cell.letter for cell in group), style))
    return Content.assemble(*parts)


def x_axis_line(labels: Sequence[str], width: int) -> Content:
    """A line with the labels of the x axis: the first at the left end, the last at the right end, the others evenly
    between."""
    text, written = [" "] * width, set[str]()
    # Both ends are written first: where there is no room, the labels between them are left out.
    for index in sorted(range(len(labels)), key=lambda index: 0 < index < len(labels) - 1):
        label = labels[index]
        if label in written:  # in a plot of one or two steps
            continue
        share = index / (len(labels) - 1) if len(labels) > 1 else 0.0
        at = max(0, min(width - len(label), round(share * width - share * len(label))))
        if all(letter == " " for letter in text[max(0, at - 1) : at + len(label) + 1]):
            text[at : at + len(label)] = label
            written.add(label)
    return Content.styled(" " * LABEL_WIDTH + "".join(text), "$muted")
