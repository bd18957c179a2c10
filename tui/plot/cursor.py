"""The x axis of a plot in cells, and a cursor on it that reads the points under it. No files, no screen.

Try: `python -m pytest tests/tui/plot/test_cursor.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.journal.event_text import format_duration, format_number
from tui.plot.braille import Cell
from tui.plot.series import BoundedSeries, Reading


@dataclass(frozen=True)
class XScale:
    """The x axis: maps a range of x, such as steps, to the cells of the plot."""

    start: float
    end: float
    width: int

    def column(self, x: float) -> int:
        """Return the column of cells, from 0, in which `x` is drawn. An `x` outside the range is drawn at the nearer
        end."""
        share = (x - self.start) / ((self.end - self.start) or 1.0)
        return max(0, min(self.width - 1, int(share * self.width)))

    def bounds(self, column: int) -> tuple[float, float]:
        """The least and the greatest x that are drawn in a column of cells."""
        cell = (self.end - self.start) / self.width
        low, high = self.start + column * cell, self.start + (column + 1) * cell
        inside = 1e-6 * cell  # a point on the border of two cells is in the right one alone
        return low, high - inside if column < self.width - 1 else self.end


class PlotCursor:
    """A place on the x axis; off at first. It stays at its x while the curve grows."""

    def __init__(self) -> None:
        self.x: float | None = None

    def clear(self) -> None:
        """Switch the cursor off."""
        self.x = None

    def move(self, by: int, scale: XScale, series: Sequence[BoundedSeries]) -> None:
        """Move by this many cells, and on in that direction to a cell in which one of the series has a point; where no
        such cell is left, to the last one before. A cursor that is off begins at the newest point."""
        at, step = (scale.column(self.x), 1 if by > 0 else -1) if self.x is not None else (scale.width, -1)
        target = at + by if self.x is not None else at - 1
        ahead = range(max(0, min(scale.width - 1, target)), scale.width if step > 0 else -1, step)
        back = range(max(0, min(scale.width - 1, target)), at, -step)
        for cell in (*ahead, *back):
            found = [reading for each in series if (reading := each.reading(*scale.bounds(cell))) is not None]
            if found:
                exact, bounds = found[0].first, scale.bounds(cell)
                self.x = exact if scale.column(exact) == cell else sum(bounds) / 2
                return

    def readings(self, scale: XScale, series: Sequence[BoundedSeries]) -> list[Reading | None]:
        """The points of each series in the cursor's cell; for a single series, the nearest if there are none there.
        All None while the cursor is off, or outside the range that is shown."""
        if self.x is None or not scale.start <= self.x <= scale.end:
            return [None] * len(series)
        found = [each.reading(*scale.bounds(scale.column(self.x))) for each in series]
        return found if len(series) > 1 or found != [None] else [series[0].nearest(self.x)]


def format_x(axis: str, value: float) -> str:
    """A value of the x axis as text; `axis` is "steps", "tokens" or "time"."""
    return format_duration(value) if axis == "time" else f"{value:,.0f}"


def where_text(axis: str, reading: Reading) -> str:
    """The part of the x axis that a reading covers, such as "step 30" or "steps 1,230 to 1,240"."""
    first, last = format_x(axis, reading.first), format_x(axis, reading.last)
    if first == last:
        return {"steps": f"step {first}", "tokens": f"{first} tokens"}.get(axis, first)
    return {"steps": f"steps {first} to {last}", "tokens": f"{first} to {last} tokens"}.get(axis, f"{first} to {last}")


def value_text(reading: Reading) -> str:
    """The value of a reading; where it covers several, their mean, and in brackets the least and the greatest."""
    if reading.least == reading.greatest:
        return format_number(reading.mean)
    return f"{format_number(reading.mean)} ({format_number(reading.least)} to {format_number(reading.greatest)})"


def draw_cursor(cells: list[list[Cell]], column: int, glyph: str) -> None:
    """Draw the cursor as a line of `glyph` down the empty cells of a column; what is drawn there is reversed."""
    for row in cells:
        cell = row[column]
        row[column] = Cell(glyph, "$muted") if cell.letter == " " else Cell(cell.letter, f"{cell.style} reverse")
