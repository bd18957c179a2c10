"""Several curves in one frame, each with a colour, and a letter at its end that tells them apart without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from tui.plot.braille import LABEL_WIDTH, Cell, Frame, Trace, frame_of, raster, rows_of, ticks, x_axis
from tui.plot.series import Column, Series, smoothed
from tui.widgets.text_lines import Lines

STYLES = ("$info", "$caution", "$good", "$mark", "$bad", "$series-4")
"""Of the first curve, the second, ...; the seventh begins again, with another letter."""

HALF_LIFE_SHARE = 0.03


def letter_of(number: int) -> str:
    """The letter of a curve: A, B, C ..."""
    return chr(ord("A") + number % 26)


def style_of(number: int) -> str:
    """The colour of a curve."""
    return STYLES[number % len(STYLES)]


@dataclass(frozen=True)
class Overlay:
    """What is drawn: one series per run, in the order of their letters, and the name of the axis."""

    series: Sequence[Series]
    axis: str
    end_label: str
    """How the right end of the axis is written."""
    log: bool = False
    smooth: bool = False


class OverlayPlot(Lines):
    """The curves, and the axis under them."""

    def __init__(self, ascii_only: bool, *, id: str) -> None:
        super().__init__(id=id, classes="pane -front")
        self._ascii_only = ascii_only
        self._overlay: Overlay | None = None

    def put(self, overlay: Overlay) -> None:
        """Draw this."""
        self._overlay = overlay
        self._paint()

    def on_resize(self) -> None:
        """Draw it for the new size."""
        super().on_resize()
        self._paint()

    def _paint(self) -> None:
        width, height = self.content_size.width - LABEL_WIDTH, self.content_size.height - 1
        if self._overlay is None or width < 4 or height < 2:
            self.show([])
            return
        self.show(_lines(self._overlay, width, height, self._ascii_only))


def _lines(overlay: Overlay, width: int, height: int, ascii_only: bool) -> list[Content]:
    end = max((series.end for series in overlay.series), default=0.0)
    start = min((series.start for series in overlay.series if series.points), default=0.0)
    traces = [
        Trace(_columns(series, width, start, end, overlay.smooth), style_of(number))
        for number, series in enumerate(overlay.series)
    ]
    frame = frame_of(traces, log=overlay.log)
    if frame is None:
        why = "no loss above zero to show on a log axis" if overlay.log else "no step to show yet"
        return [Content(""), Content.styled(f"  {why}", "$muted")]
    cells = raster(traces, width, height, frame, ascii_only=ascii_only)
    for number, trace in enumerate(traces):
        _letter(cells, trace, frame, height, number)
    labels = ["0", f"{overlay.end_label} {overlay.axis if overlay.axis != 'time' else ''}".rstrip()]
    return [*rows_of(cells, ticks(frame, height)), x_axis(labels, width)]


def _columns(series: Series, width: int, start: float, end: float, smooth: bool) -> list[Column | None]:
    columns = series.columns(2 * width, start, end)
    return smoothed(columns, max(1.0, 2 * width * HALF_LIFE_SHARE)) if smooth else columns


def _letter(cells: list[list[Cell]], trace: Trace, frame: Frame, height: int, number: int) -> None:
    """Put the curve's letter where it ends; where another's stands already, one to the left of it."""
    known = [(x, column) for x, column in enumerate(trace.columns) if column is not None]
    if not known:
        return
    x, column = known[-1]
    row = min(height - 1, round((1 - frame.share(column.mean)) * (height - 1)))
    place = x >> 1
    while place > 0 and cells[row][place].letter.isalpha():
        place -= 1
    cells[row][place] = Cell(letter_of(number), f"bold {style_of(number)}")
