"""The loss of several runs in one plot. Each curve has a colour, and at its end a letter for screens without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

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
from tui.plot.loss_plot import HALF_LIFE_SHARE
from tui.plot.series import BoundedSeries, PlotColumn, smoothed
from tui.widgets.text_lines import TextLines

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
    log: bool = False
    smooth: bool = False


class OverlayPlot(TextLines):
    """A widget that draws the loss curves of several runs in one pair of axes."""

    def __init__(self, ascii_only: bool, *, id: str) -> None:
        super().__init__(id=id, classes="pane -front")
        self._ascii_only = ascii_only
        self._data: OverlayData | None = None

    def set_data(self, data: OverlayData) -> None:
        """Replace the data and draw the plot again."""
        self._data = data
        self._paint()

    def on_resize(self) -> None:
        """Draw again for the new size."""
        super().on_resize()
        self._paint()

    def _paint(self) -> None:
        width, height = self.content_size.width - LABEL_WIDTH, self.content_size.height - 1
        if self._data is None or width < 4 or height < 2:
            self.show([])
            return
        self.show(_lines(self._data, width, height, self._ascii_only))


def _lines(data: OverlayData, width: int, height: int, ascii_only: bool) -> list[Content]:
    end = max((series.end for series in data.series), default=0.0)
    start = min((series.start for series in data.series if series.points), default=0.0)
    curves = [
        PlotCurve(_columns(series, width, start, end, data.smooth), style_of(number))
        for number, series in enumerate(data.series)
    ]
    y_range = fit_y_range(curves, log=data.log)
    if y_range is None:
        why = "no loss above zero to show on a log axis" if data.log else "no step to show yet"
        return [Content(""), Content.styled(f"  {why}", "$muted")]
    cells = draw_curves(curves, width, height, y_range, ascii_only=ascii_only)
    for number, curve in enumerate(curves):
        _write_letter(cells, curve, y_range, height, number)
    labels = ["0", f"{data.end_label} {data.axis if data.axis != 'time' else ''}".rstrip()]
    return [*plot_lines(cells, ticks(y_range, height)), x_axis_line(labels, width)]


def _columns(series: BoundedSeries, width: int, start: float, end: float, smooth: bool) -> list[PlotColumn | None]:
    columns = series.columns(2 * width, start, end)
    return smoothed(columns, max(1.0, 2 * width * HALF_LIFE_SHARE)) if smooth else columns


def _write_letter(cells: list[list[Cell]], curve: PlotCurve, y_range: YRange, height: int, number: int) -> None:
    """Write the letter of the curve with this number into `cells`, at the curve's end; if letters of other curves are
    there, to the left of those."""
    known = [(x, column) for x, column in enumerate(curve.columns) if column is not None]
    if not known:
        return
    x, column = known[-1]
    row = min(height - 1, round((1 - y_range.share(column.mean)) * (height - 1)))
    place = x >> 1
    while place > 0 and cells[row][place].letter.isalpha():
        place -= 1
    cells[row][place] = Cell(letter_of(number), f"bold {style_of(number)}")
