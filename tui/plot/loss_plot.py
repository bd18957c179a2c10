"""The plot of one run: a metric over its steps, losses of evaluations, and marks of checkpoints and backoffs.

The screen that contains the plot sets new data and decides how often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual.content import Content

from tui.plot.braille import LABEL_WIDTH, Cell, PlotCurve, draw_curves, fit_y_range, plot_lines, ticks, x_axis_line
from tui.plot.series import BoundedSeries, smoothed
from tui.widgets.text_lines import TextLines

HALF_LIFE_SHARE = 0.03
"""Half-life of the smoothing, as a share of the plot's width."""

ZOOMS = {"all": 1.0, "last half": 0.5, "last tenth": 0.1}
"""The part of the run that is shown, from its end."""


@dataclass(frozen=True)
class PlotOptions:
    """Options of the plot: a logarithmic y axis, smoothing, and the part of the run to show."""

    log: bool = False
    smooth: bool = False
    zoom: str = "all"


@dataclass(frozen=True)
class StepMarks:
    """The steps at which events of one kind (such as checkpoints) happened. They are drawn as marks in a row under the
    curve."""

    name: str
    glyph: str
    style: str
    steps: Sequence[int]


@dataclass(frozen=True)
class LossPlotData:
    """The data that a `LossPlot` draws."""

    series: BoundedSeries
    """The metric of each step."""
    scores: Sequence[tuple[int, float]]
    """Steps of evaluations with their losses."""
    marks: Sequence[StepMarks]
    """Of two marks in one place, the one later in this list is shown."""
    note: str = ""
    """Shown while there is no curve."""
    label: str = "loss"
    """The metric, for the title."""


class LossPlot(TextLines):
    """A widget with a title, the curve of a metric, a row of marks, and the steps of the x axis."""

    def __init__(self, glyphs: Callable[[str], str], ascii_only: bool, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="pane")
        self._glyphs, self._ascii_only = glyphs, ascii_only
        self._data: LossPlotData | None = None
        self.options = PlotOptions()
        self.active = False
        """Whether keys act on this pane, which the title shows."""

    def set_data(self, data: LossPlotData) -> None:
        """Replace the data and draw the plot again."""
        self._data = data
        self._paint()

    def set_options(self, options: PlotOptions) -> None:
        """Draw the same data with other options."""
        self.options = options
        self._paint()

    def on_resize(self) -> None:
        """Draw again for the new size."""
        super().on_resize()
        self._paint()

    def _paint(self) -> None:
        width, height = self.content_size.width - LABEL_WIDTH, self.content_size.height - 3
        if self._data is None or width < 4 or height < 2:
            self.show([])
            return
        self.show(self._plot(self._data, width, height))

    def _plot(self, data: LossPlotData, width: int, height: int) -> list[Content]:
        end = data.series.end
        start = end - (end - data.series.start) * ZOOMS[self.options.zoom]
        columns = data.series.columns(2 * width, start, end)
        if self.options.smooth:
            columns = smoothed(columns, max(1.0, 2 * width * HALF_LIFE_SHARE))
        curve = PlotCurve(columns, "$info", band="$band")
        scores = [(step, value) for step, value in data.scores if start <= step <= end]
        y_range = fit_y_range([curve], [value for _, value in scores], log=self.options.log)
        if y_range is None:
            note = Content.styled(" " * LABEL_WIDTH + self._empty_note(data), "$muted")
            return [self._title(data), Content(""), note]
        cells = draw_curves([curve], width, height, y_range, ascii_only=self._ascii_only)
        x_scale = _XScale(start, end, width)
        for step, value in scores:
            row = round((1 - y_range.share(value)) * (height - 1))
            cells[row][x_scale.column(step)] = Cell(self._glyphs("◆"), "bold $mark")
        marks = plot_lines([self._mark_row(data, x_scale)], {})
        labels = [f"{step:,.0f}" for step in (start, (start + end) / 2, end)]
        return [self._title(data), *plot_lines(cells, ticks(y_range, height)), *marks, x_axis_line(labels, width)]

    def _title(self, data: LossPlotData) -> Content:
        ways = [self.options.zoom] if self.options.zoom != "all" else []
        ways += ["log"] * self.options.log + ["smoothed"] * self.options.smooth
        heading = Content.styled(f" {data.label} ", "bold reverse" if self.active else "bold")
        title = Content.assemble("   ", heading, (", ".join(ways) + "  " if ways else " ", "$muted"))
        shown = [("◆", "bold $mark", "evaluation")] if data.scores else []
        shown += [(mark.glyph, mark.style, mark.name) for mark in data.marks if mark.steps]
        for glyph, style, name in shown:
            entry = Content.assemble((self._glyphs(glyph), style), (f" {name}  ", "$muted"))
            if title.cell_length + entry.cell_length > self.content_size.width + 2:
                break
            title = Content.assemble(title, entry)
        return title

    def _mark_row(self, data: LossPlotData, x_scale: _XScale) -> list[Cell]:
        row = [Cell()] * x_scale.width
        for mark in data.marks:
            for step in mark.steps:
                if x_scale.start <= step <= x_scale.end:
                    row[x_scale.column(step)] = Cell(self._glyphs(mark.glyph), mark.style)
        return row

    def _empty_note(self, data: LossPlotData) -> str:
        if data.series.points:
            return f"no {data.label} above zero to show on a log axis"
        return data.note


@dataclass(frozen=True)
class _XScale:
    """The x axis: maps a range of steps to the cells of the plot."""

    start: float
    end: float
    width: int

    def column(self, step: float) -> int:
        """Return the column of cells, from 0, in which a step is drawn. A step outside the range is drawn at the nearer
        end."""
        share = (step - self.start) / ((self.end - self.start) or 1.0)
        return max(0, min(self.width - 1, int(share * self.width)))
