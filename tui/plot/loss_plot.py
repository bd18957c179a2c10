"""The plot of one run: a metric over its steps, losses of evaluations, and marks of checkpoints and backoffs.

A cursor, moved by keys or a click, reads the points under it: the title then says steps and values. The screen that
contains the plot sets new data and decides how often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from textual.content import Content

from engine.journal.event_text import format_number
from tui.plot.braille import (
    LABEL_WIDTH,
    Cell,
    PlotCurve,
    YRange,
    draw_curves,
    fit_y_range,
    plot_lines,
    ticks,
    x_axis_line,
)
from tui.plot.cursor import XScale, draw_cursor, value_text, where_text
from tui.plot.cursor_plot import CursorPlot
from tui.plot.points_text import points_text
from tui.plot.series import BoundedSeries, PlotColumn, Reading, smoothed
from tui.plot.svg import PlotRange, SvgCurve, svg_plot

HALF_LIFE_SHARE = 0.03
"""Half-life of the smoothing, as a share of the plot's width."""

ZOOMS = {"all": 1.0, "last half": 0.5, "last tenth": 0.1}
"""The part of the run that is shown, from its end."""


@dataclass(frozen=True)
class PlotOptions:
    """Options of the plot: a logarithmic y axis, a smoothed or a thick line, and the part of the run to show."""

    log: bool = False
    auto_log: bool = True
    """Whether the y axis is also logarithmic where a loss spans more than a decade: until the user chooses."""
    smooth: bool = False
    thick: bool = False
    zoom: str = "all"

    def next_line(self) -> PlotOptions:
        """The options with the next kind of line: the points as they are, smoothed, thick."""
        return replace(self, smooth=not self.smooth and not self.thick, thick=self.smooth)

    @property
    def words(self) -> list[str]:
        """The options that are not as at first, in words."""
        ways = [self.zoom] if self.zoom != "all" else []
        return ways + ["log"] * self.log + ["smoothed"] * self.smooth + ["thick"] * self.thick


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
    may_be_log: bool = False
    """Whether the axis is logarithmic by itself where the values span more than a decade."""

    @property
    def end(self) -> float:
        """The last step shown. A step whose loss is not finite is not applied: its mark lies behind the curve."""
        return max([self.series.end, *(step for mark in self.marks for step in mark.steps[-1:])])


DECADE = 10.0


def spans_a_decade(columns: Sequence[PlotColumn | None]) -> bool:
    """Whether all values are above zero, and the greatest mean is more than ten times the least: on a linear axis most
    of the curve would be a flat line."""
    means = [column.mean for column in columns if column is not None]
    return bool(means) and min(means) > 0 and max(means) > DECADE * min(means)


class LossPlot(CursorPlot):
    """A widget with a title, the curve of a metric, a row of marks, and the steps of the x axis."""

    def __init__(self, glyphs: Callable[[str], str], ascii_only: bool, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="pane")
        self._glyphs, self._ascii_only = glyphs, ascii_only
        self._data: LossPlotData | None = None
        self.options = PlotOptions()
        self.active = False
        """Whether keys act on this pane, which the title shows."""
        self.is_log = False
        """Whether the axis is logarithmic, by choice or by itself."""

    def set_data(self, data: LossPlotData) -> None:
        """Replace the data and draw the plot again."""
        self._data = data
        self.paint()

    def set_options(self, options: PlotOptions) -> None:
        """Draw the same data with other options."""
        self.options = options
        self.paint()

    def axis_and_series(self, width: int) -> tuple[XScale, Sequence[BoundedSeries]] | None:
        """The steps that are shown, and the one series."""
        return None if self._data is None else (self._scale(self._data, width), [self._data.series])

    def copied(self) -> str:
        """The points that are shown, as text; empty without any."""
        if self._data is None or not self._data.series.points:
            return ""
        scale = self._scale(self._data, 2 * max(1, self.plot_width))
        return points_text("steps", [self._data.label], [self._data.series], scale)

    def picture(self, name: str) -> str:
        """The plot as SVG; `name` is that of the run, for the legend. Empty without points."""
        if self._data is None or not self._data.series.points:
            return ""
        scale, curve = self._scale(self._data, 1), SvgCurve(name, self._data.series)
        shown, options = PlotRange(scale.start, scale.end), self.options
        return svg_plot(self._data.label, "steps", [curve], shown, log=self.is_log, smooth=options.smooth)

    @property
    def label(self) -> str:
        """The metric that is plotted."""
        return self._data.label if self._data is not None else ""

    def _scale(self, data: LossPlotData, width: int) -> XScale:
        end = data.end
        return XScale(end - (end - data.series.start) * ZOOMS[self.options.zoom], end, width)

    def paint(self) -> None:
        """Draw title, curve, marks and steps; nothing where there is no room."""
        width, height = self.plot_width, self.content_size.height - 3
        if self._data is None or width < 4 or height < 2:
            self.show([])
            return
        self.show(self._plot(self._data, width, height))

    def _plot(self, data: LossPlotData, width: int, height: int) -> list[Content]:
        x_scale = self._scale(data, width)
        start, end = x_scale.start, x_scale.end
        columns = data.series.columns(2 * width, start, end)
        if self.options.smooth:
            columns = smoothed(columns, max(1.0, 2 * width * HALF_LIFE_SHARE))
        curve = PlotCurve(columns, "$info", band="$band", thick=self.options.thick)
        scores = [(step, value) for step, value in data.scores if start <= step <= end]
        self.is_log = self.options.log or (self.options.auto_log and data.may_be_log and spans_a_decade(columns))
        y_range = fit_y_range([curve], [value for _, value in scores], log=self.is_log)
        if y_range is None:
            note = Content.styled(" " * LABEL_WIDTH + self._empty_note(data), "$muted")
            return [self._title(data), Content(""), note]
        cells = draw_curves([curve], width, height, y_range, ascii_only=self._ascii_only)
        self._draw_scores(cells, scores, x_scale, y_range)
        (reading,) = self.cursor.readings(x_scale, [data.series])
        if reading is not None and self.cursor.x is not None:
            draw_cursor(cells, x_scale.column(self.cursor.x), self._glyphs("│"))
        marks = plot_lines([self._mark_row(data, x_scale)], {})
        labels = [f"{step:,.0f}" for step in (start, (start + end) / 2, end)]
        title = self._title(data) if reading is None else self._read_off(data, reading, scores)
        return [title, *plot_lines(cells, ticks(y_range, height)), *marks, x_axis_line(labels, width)]

    def _draw_scores(
        self, cells: list[list[Cell]], scores: Sequence[tuple[int, float]], x_scale: XScale, y_range: YRange
    ) -> None:
        for step, value in scores:
            cells[y_range.row(value, len(cells))][x_scale.column(step)] = Cell(self._glyphs("◆"), "bold $mark")

    def _heading(self, data: LossPlotData) -> Content:
        heading = Content.styled(f" {data.label} ", "bold reverse" if self.active else "bold")
        return Content.assemble("   ", heading)

    def _read_off(self, data: LossPlotData, reading: Reading, scores: Sequence[tuple[int, float]]) -> Content:
        """The title while the cursor is on: the steps under it, the metric there, and the evaluations there."""
        here = [value for step, value in scores if reading.first <= step <= reading.last]
        scored = f", evaluation {format_number(here[-1])}" if here else ""
        where = where_text("steps", reading)
        return Content.assemble(self._heading(data), f" {where}: ", (value_text(reading), "bold"), scored)

    def _title(self, data: LossPlotData) -> Content:
        ways = replace(self.options, log=self.is_log).words
        title = Content.assemble(self._heading(data), (", ".join(ways) + "  " if ways else " ", "$muted"))
        shown = [("◆", "bold $mark", "evaluation")] if data.scores else []
        shown += [(mark.glyph, mark.style, mark.name) for mark in data.marks if mark.steps]
        for glyph, style, name in shown:
            entry = Content.assemble((self._glyphs(glyph), style), (f" {name}  ", "$muted"))
            if title.cell_length + entry.cell_length > self.content_size.width + 2:
                break
            title = Content.assemble(title, entry)
        return title

    def _mark_row(self, data: LossPlotData, x_scale: XScale) -> list[Cell]:
        row = [Cell()] * x_scale.width
        for mark in data.marks:
            for step in mark.steps:
                if x_scale.start <= step:
                    row[x_scale.column(step)] = Cell(self._glyphs(mark.glyph), mark.style)
        return row

    def _empty_note(self, data: LossPlotData) -> str:
        if data.series.points:
            return f"no {data.label} above zero to show on a log axis"
        return data.note
