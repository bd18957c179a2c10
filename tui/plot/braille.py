"""Curves as lines of text: braille dots, two columns and four rows of them in a cell. Pure functions of values.

Measured beforehand: the plot library redraws a 120x36 screen at 6 to 11 per cent of a core, this at about one. A cell
holds one colour, so where curves share one the later trace has it. In ASCII, `*` is the curve and `:` its band.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from textual.content import Content

from tui.plot.series import Column

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille cell by column and row (Unicode chapter 21.1: U+2800 and the sum of the dots)."""

BRAILLE = 0x2800
LABEL_WIDTH = 8
"""Cells for the numbers of the y axis."""

ROWS_PER_TICK = 3


@dataclass(frozen=True)
class Trace:
    """One curve, a column per dot: two for each cell of the plot's width."""

    columns: Sequence[Column | None]
    style: str
    band: str = ""
    """Style of the range around the mean; empty draws none."""


@dataclass(frozen=True)
class Frame:
    """What the y axis spans."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the bottom, 1 at the top; beyond both ends it is cut."""
        if self.log:
            value, low, high = (math.log(max(number, 1e-300)) for number in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return max(0.0, min(1.0, (value - low) / (high - low)))


@dataclass(frozen=True)
class Cell:
    """One character of the plot."""

    letter: str = " "
    style: str = ""


def frame_of(traces: Sequence[Trace], points: Sequence[float] = (), *, log: bool = False) -> Frame | None:
    """The frame that shows every mean and every point; None when there is nothing to show.

    Bands may reach out of it: one bad step among thousands would press the curve flat.
    """
    values = [column.mean for trace in traces for column in trace.columns if column is not None]
    values += [point for point in points if math.isfinite(point)]
    if log:
        values = [value for value in values if value > 0]
    if not values:
        return None
    low, high = min(values), max(values)
    if log:
        return Frame(low / 1.1, high * 1.1, log=True)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return Frame(low - room, high + room)


def ticks(frame: Frame, height: int) -> dict[int, str]:
    """Labels of the y axis, by row; round numbers, at most one for every few rows."""
    wanted = max(2, height // ROWS_PER_TICK)
    labels: dict[int, str] = {}
    for value in _log_ticks(frame, wanted) if frame.log else _even_ticks(frame, wanted):
        row = round((1 - frame.share(value)) * (height - 1))
        labels.setdefault(row, f"{value:.4g}")
    return labels


def _even_ticks(frame: Frame, wanted: int) -> list[float]:
    rough = (frame.high - frame.low) / wanted
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough)
    first = math.ceil(frame.low / step)
    return [index * step for index in range(first, math.floor(frame.high / step) + 1)]


def _log_ticks(frame: Frame, wanted: int) -> list[float]:
    decades = range(math.floor(math.log10(frame.low)), math.ceil(math.log10(frame.high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [factor * 10.0**decade for decade in decades for factor in factors]
        inside = [value for value in values if frame.low <= value <= frame.high]
        if len(inside) <= wanted:
            return inside or [frame.low, frame.high]
    return inside[:: -(-len(inside) // wanted)]


def raster(traces: Sequence[Trace], width: int, height: int, frame: Frame, *, ascii_only: bool) -> list[list[Cell]]:
    """The traces drawn over each other, first one lowest; rows of cells."""
    cells = [[Cell()] * width for _ in range(height)]
    for trace in traces:
        if trace.band:
            _lay(cells, _band_dots(trace.columns, height, frame), trace.band, ":" if ascii_only else "")
        _lay(cells, _line_dots(trace.columns, height, frame), trace.style, "*" if ascii_only else "")
    return cells


def _lay(cells: list[list[Cell]], dots: Sequence[tuple[int, int] | None], style: str, letter: str) -> None:
    """Put dots, given as one stretch of dot rows per dot column, into the cells."""
    bits: dict[tuple[int, int], int] = {}
    for x, stretch in enumerate(dots):
        if stretch is None:
            continue
        for y in range(stretch[0], stretch[1] + 1):
            place = (y >> 2, x >> 1)
            bits[place] = bits.get(place, 0) | DOTS[x & 1][y & 3]
    for (row, column), sum_of_dots in bits.items():
        if column < len(cells[0]):
            cells[row][column] = Cell(letter or chr(BRAILLE + sum_of_dots), style)


def _band_dots(columns: Sequence[Column | None], height: int, frame: Frame) -> list[tuple[int, int] | None]:
    last = 4 * height - 1
    return [
        None
        if column is None
        else (round((1 - frame.share(column.greatest)) * last), round((1 - frame.share(column.least)) * last))
        for column in columns
    ]


def _line_dots(columns: Sequence[Column | None], height: int, frame: Frame) -> list[tuple[int, int] | None]:
    """The mean as a connected line: across columns without a point it is drawn straight."""
    last = 4 * height - 1
    known = [(x, round((1 - frame.share(c.mean)) * last)) for x, c in enumerate(columns) if c is not None]
    dots: list[tuple[int, int] | None] = [None] * len(columns)
    for x, y in known[:1]:
        dots[x] = (y, y)
    for (x0, y0), (x1, y1) in pairwise(known):
        before = y0
        for x in range(x0 + 1, x1 + 1):
            y = round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
            # What lies between this column's height and the one before is filled, so that the line has no holes.
            reach = before + (y > before) - (y < before)
            dots[x] = (min(y, reach), max(y, reach))
            before = y
    return dots


def rows_of(cells: Sequence[Sequence[Cell]], labels: Mapping[int, str]) -> list[Content]:
    """The cells as lines with the y axis on their left."""
    return [_row(row, labels.get(index, "")) for index, row in enumerate(cells)]


def _row(cells: Sequence[Cell], label: str) -> Content:
    parts: list[tuple[str, str]] = [(f"{label:>{LABEL_WIDTH - 1}} ", "$muted")]
    for style, group in groupby(cells, key=lambda cell: cell.style):
        parts.append(("".join(cell.letter for cell in group), style))
    return Content.assemble(*parts)


def x_axis(labels: Sequence[str], width: int) -> Content:
    """Labels spread over the width: the first at its left end, the last at its right end."""
    text, written = [" "] * width, set[str]()
    # The ends first: where there is no room, what lies between them goes.
    for index in sorted(range(len(labels)), key=lambda index: 0 < index < len(labels) - 1):
        label = labels[index]
        if label in written:  # of a step or two
            continue
        share = index / (len(labels) - 1) if len(labels) > 1 else 0.0
        at = max(0, min(width - len(label), round(share * width - share * len(label))))
        if all(letter == " " for letter in text[max(0, at - 1) : at + len(label) + 1]):
            text[at : at + len(label)] = label
            written.add(label)
    return Content.styled(" " * LABEL_WIDTH + "".join(text), "$muted")
