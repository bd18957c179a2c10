"""The loss of one run: mean and range of the steps, scores of evaluations, and marks where something happened.

Draws what it is given, when it is given it: the screen decides how often that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual.content import Content

from tui.plot.braille import LABEL_WIDTH, Cell, Trace, frame_of, raster, rows_of, ticks, x_axis
from tui.plot.series import Series, smoothed
from tui.widgets.text_lines import Lines

HALF_LIFE_SHARE = 0.03
"""Smoothing forgets half in this share of the width."""

ZOOMS = {"all": 1.0, "last half": 0.5, "last tenth": 0.1}
"""Which part of the run is shown."""


@dataclass(frozen=True)
class Look:
    """How the curve is shown."""

    log: bool = False
    smooth: bool = False
    zoom: str = "all"


@dataclass(frozen=True)
class Mark:
    """Something that happened at some steps: a row of these under the curve."""

    name: str
    glyph: str
    style: str
    steps: Sequence[int]


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn."""

    loss: Series
    scores: Sequence[tuple[int, float]]
    """Steps of evaluations with their loss."""
    marks: Sequence[Mark]
    """The later of two marks in one place hides the earlier."""
    note: str = ""
    """What to say where there is no curve yet."""


class LossPlot(Lines):
    """A title, the curve, a row of marks, the steps."""

    def __init__(self, draw: Callable[[str], str], ascii_only: bool, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="pane")
        self._glyphs, self._ascii_only = draw, ascii_only
        self._picture: Picture | None = None
        self.look = Look()

    def put(self, picture: Picture) -> None:
        """Draw this."""
        self._picture = picture
        self._paint()

    def look_at(self, look: Look) -> None:
        """Draw the same in another way."""
        self.look = look
        self._paint()

    def on_resize(self) -> None:
        """Draw it for the new size."""
        super().on_resize()
        self._paint()

    def _paint(self) -> None:
        width, height = self.content_size.width - LABEL_WIDTH, self.content_size.height - 3
        if self._picture is None or width < 4 or height < 2:
            self.show([])
            return
        self.show(self._lines_for(self._picture, width, height))

    def _lines_for(self, picture: Picture, width: int, height: int) -> list[Content]:
        end = picture.loss.end
        start = end - (end - picture.loss.start) * ZOOMS[self.look.zoom]
        columns = picture.loss.columns(2 * width, start, end)
        if self.look.smooth:
            columns = smoothed(columns, max(1.0, 2 * width * HALF_LIFE_SHARE))
        trace = Trace(columns, "$info", band="$band")
        scores = [(step, value) for step, value in picture.scores if start <= step <= end]
        frame = frame_of([trace], [value for _, value in scores], log=self.look.log)
        if frame is None:
            return [self._title(picture), Content(""), Content.styled(" " * LABEL_WIDTH + self._why(picture), "$muted")]
        cells = raster([trace], width, height, frame, ascii_only=self._ascii_only)
        spread = _Spread(start, end, width)
        for step, value in scores:
            row = round((1 - frame.share(value)) * (height - 1))
            cells[row][spread.column(step)] = Cell(self._glyphs("◆"), "bold $mark")
        marks = rows_of([self._mark_row(picture, spread)], {})
        labels = [f"{step:,.0f}" for step in (start, (start + end) / 2, end)]
        return [self._title(picture), *rows_of(cells, ticks(frame, height)), *marks, x_axis(labels, width)]

    def _title(self, picture: Picture) -> Content:
        ways = [self.look.zoom] if self.look.zoom != "all" else []
        ways += ["log"] * self.look.log + ["smoothed"] * self.look.smooth
        title = Content.assemble(("    loss ", "bold"), (", ".join(ways) + "  " if ways else " ", "$muted"))
        shown = [("◆", "bold $mark", "evaluation")] if picture.scores else []
        shown += [(mark.glyph, mark.style, mark.name) for mark in picture.marks if mark.steps]
        for glyph, style, name in shown:
            entry = Content.assemble((self._glyphs(glyph), style), (f" {name}  ", "$muted"))
            if title.cell_length + entry.cell_length > self.content_size.width + 2:
                break
            title = Content.assemble(title, entry)
        return title

    def _mark_row(self, picture: Picture, spread: _Spread) -> list[Cell]:
        row = [Cell()] * spread.width
        for mark in picture.marks:
            for step in mark.steps:
                if spread.start <= step <= spread.end:
                    row[spread.column(step)] = Cell(self._glyphs(mark.glyph), mark.style)
        return row

    def _why(self, picture: Picture) -> str:
        if picture.loss.points:
            return "no loss above zero to show on a log axis"
        return picture.note


@dataclass(frozen=True)
class _Spread:
    """Steps over the width of the plot."""

    start: float
    end: float
    width: int

    def column(self, step: float) -> int:
        """The cell column a step falls into."""
        share = (step - self.start) / ((self.end - self.start) or 1.0)
        return max(0, min(self.width - 1, int(share * self.width)))
