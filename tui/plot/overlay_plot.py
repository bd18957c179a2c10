"""A metric of several runs in one plot, with a cursor that reads every curve.

Each curve has a colour, and at its end a letter for screens without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from textual.content import Content

from engine.journal.event_text import format_number
from tui.plot.braille import (
    Cell,
    PlotCurve,
    YRange,
    draw_curves,
    fit_y_range,
    plot_lines,
    ticks,
    x_axis_line,
)
from tui.plot.cursor import PlotCursor, XScale, draw_cursor, format_x, where_text
from tui.plot.cursor_plot import CursorPlot
from tui.plot.loss_plot import HALF_LIFE_SHARE, ZOOMS, PlotOptions, spans_a_decade
from tui.plot.points_text import points_text
from tui.plot.series import BoundedSeries, PlotColumn, smoothed
from tui.plot.svg import PlotRange, SvgCurve, svg_plot

STYLES = ("$info", "$caution", "$good", "$mark", "$bad", "$series-4")
"""Colours of the curves in order; the seventh has the first colour again, with another letter."""


def letter_of(number: int) -> str:
    """The letter of the curve with this number: A, B, C ..."""
    return chr(ord("A") + number % 26)


def style_of(number: int) -> str:
    """The style, which sets the colour, of the curve with this number."""
    return STYLES[number % len(STYLES)]


@dataclass(frozen=True)
class OverlayData:
    """The data that an `OverlayPlot` draws: one series for each run, in the order of their letters, and the x axis."""

    series: Sequence[BoundedSeries]
    axis: str
    end_label: str
    """The label at the right end of the x axis."""
    options: PlotOptions = field(default_factory=PlotOptions)
    label: str = "loss"
    """The metric, in words."""
    may_be_log: bool = False
    """Whether the axis is logarithmic by itself where the values of all runs span more than a decade."""


class OverlayPlot(CursorPlot):
    """A widget that draws the loss curves of several runs in one pair of axes."""

    def __init__(self, ascii_only: bool, *, id: str) -> None:
        super().__init__(id=id, classes="pane -front")
        self._ascii_only = ascii_only
        self._data: OverlayData | None = None
        self.is_log = False
        """Whether the axis is logarithmic, by choice or by itself."""

    def set_data(self, data: OverlayData) -> None:
        """Replace the data and draw the plot again."""
        self._data = data
        self.is_log = data.options.log or (data.options.auto_log and data.may_be_log and self._spans_a_decade(data))
        self.paint()

    def _spans_a_decade(self, data: OverlayData) -> bool:
        scale = _scale(data, max(1, self.plot_width))
        return spans_a_decade([column for series in data.series for column in _columns(series, scale, smooth=False)])

    def axis_and_series(self, width: int) -> tuple[XScale, Sequence[BoundedSeries]] | None:
        """The part of the x axis that is shown, and the series of all runs."""
        return None if self._data is None else (_scale(self._data, width), self._data.series)

    def read_off(self) -> Content | None:
        """The values under the cursor, with the letter of each run; None while there is no cursor."""
        if self._data is None or self.plot_width <= 0:
            return None
        found = self.cursor.readings(_scale(self._data, self.plot_width), self._data.series)
        known = [(number, reading) for number, reading in enumerate(found) if reading is not None]
        if not known:
            return None
        parts: list[tuple[str, str]] = [(f" {where_text(self._data.axis, known[0][1])}: ", "")]
        for number, reading in known:
            parts += [(f" {letter_of(number)} ", f"bold {style_of(number)}"), (f"{format_number(reading.mean)} ", "")]
        return Content.assemble(*parts)

    def copied(self, names: Sequence[str]) -> str:
        """The points that are shown, as text, with these names of the runs; empty without any."""
        if self._data is None or not any(series.points for series in self._data.series):
            return ""
        return points_text(self._data.axis, names, self._data.series, _scale(self._data, 2 * max(1, self.plot_width)))

    def picture(self, names: Sequence[str]) -> str:
        """The plot as SVG, with these names of the runs in its legend; empty without points."""
        data = self._data
        if data is None or not any(series.points for series in data.series):
            return ""
        curves = [SvgCurve(name, series) for name, series in zip(names, data.series, strict=True)]
        scale, options = _scale(data, 1), data.options
        shown = PlotRange(scale.start, scale.end)
        return svg_plot(data.label, data.axis, curves, shown, log=self.is_log, smooth=options.smooth)

    def paint(self) -> None:
        """Draw the curves and the x axis; nothing where there is no room."""
        width, height = self.plot_width, self.content_size.height - 1
        if self._data is None or width < 4 or height < 2:
            self.show([])
            return
        options = replace(self._data.options, log=self.is_log)
        drawn = replace(self._data, options=options)
        self.show(_lines(drawn, width, height, self._ascii_only, self.cursor))


def _scale(data: OverlayData, width: int) -> XScale:
    end = max((series.end for series in data.series), default=0.0)
    start = min((series.start for series in data.series if series.points), default=0.0)
    return XScale(end - (end - start) * ZOOMS[data.options.zoom], end, width)


def _lines(data: OverlayData, width: int, height: int, ascii_only: bool, cursor: PlotCursor) -> list[Content]:
    scale, options = _scale(data, width), data.options
    curves = [
        PlotCurve(_columns(series, scale, options.smooth), style_of(number), thick=options.thick)
        for number, series in enumerate(data.series)
    ]
    y_range = fit_y_range(curves, log=options.log)
    if y_range is None:
        recorded = any(series.points for series in data.series)
        why = f"no {data.label} above zero to show on a log axis" if recorded else f"no {data.label} to show yet"
        return [Content(""), Content.styled(f"  {why}", "$muted")]
    cells = draw_curves(curves, width, height, y_range, ascii_only=ascii_only)
    for number, curve in enumerate(curves):
        _write_letter(cells, curve, y_range, height, number)
    if cursor.x is not None and any(cursor.readings(scale, data.series)):
        draw_cursor(cells, scale.column(cursor.x), "|" if ascii_only else "│")
    first = format_x(data.axis, scale.start) if scale.start > 1 else "0"
    labels = [first, f"{data.end_label} {data.axis if data.axis != 'time' else ''}".rstrip()]
    return [*plot_lines(cells, ticks(y_range, height)), x_axis_line(labels, width)]


def _columns(series: BoundedSeries, scale: XScale, smooth: bool) -> list[PlotColumn | None]:
    columns = series.columns(2 * scale.width, scale.start, scale.end)
    return smoothed(columns, max(1.0, 2 * scale.width * HALF_LIFE_SHARE)) if smooth else columns


def _write_letter(cells: list[list[Cell]], curve: PlotCurve, y_range: YRange, height: int, number: int) -> None:
    """Write the letter of the curve with this number into `cells`, at the curve's end; if letters of other curves are
    there, to the left of those."""
    known = [(x, column) for x, column in enumerate(curve.columns) if column is not None]
    if not known:
        return
    x, column = known[-1]
    row = y_range.row(column.mean, height)
    place = x >> 1
    while place > 0 and cells[row][place].letter.isalpha():
        place -= 1
    cells[row][place] = Cell(letter_of(number), f"bold {style_of(number)}")
