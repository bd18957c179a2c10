"""Several metrics of a run at once: a grid of small plots, each with its latest value.

Try: `M` on the Run screen
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual.content import Content

from engine.journal.event_text import format_number
from tui.plot.braille import LABEL_WIDTH, PlotCurve, draw_curves, fit_y_range, plot_lines, ticks, x_axis_line
from tui.plot.loss_plot import HALF_LIFE_SHARE, ZOOMS, PlotOptions
from tui.plot.series import BoundedSeries, smoothed
from tui.widgets.text_lines import TextLines

LEAST_WIDTH, LEAST_HEIGHT = 38, 7
"""Cells of a small plot at least, with its title and its axes."""


@dataclass(frozen=True)
class GridPlot:
    """A small plot: the metric's label and its values."""

    label: str
    series: BoundedSeries


class MetricGrid(TextLines):
    """A widget with a small plot of each metric, side by side and below each other as there is room."""

    def __init__(self, glyphs: Callable[[str], str], ascii_only: bool, *, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self._glyphs, self._ascii_only = glyphs, ascii_only
        self._plots: Sequence[GridPlot] = ()
        self.options = PlotOptions()
        self.active = False
        """Whether keys act on this pane, which the titles show."""

    def set_plots(self, plots: Sequence[GridPlot], options: PlotOptions) -> None:
        """Replace the plots and draw them; those without a value are left out."""
        self._plots, self.options = [plot for plot in plots if plot.series.points], options
        self._paint()

    def on_resize(self) -> None:
        """Draw again for the new size."""
        super().on_resize()
        self._paint()

    def _paint(self) -> None:
        width, height = self.content_size.width, self.content_size.height
        if not self._plots or width < LABEL_WIDTH + 4 or height < 4:
            self.show([Content.styled("  nothing recorded yet", "$muted")] if not self._plots else [])
            return
        across = max(1, min(len(self._plots), width // LEAST_WIDTH))
        down = max(1, min(-(-len(self._plots) // across), height // LEAST_HEIGHT))
        shown = self._plots[: across * down]
        lines: list[Content] = []
        for row in range(down):
            plots = shown[row * across : (row + 1) * across]
            blocks = [self._block(plot, width // across, height // down) for plot in plots]
            lines += [Content("").join(parts) for parts in zip(*blocks, strict=True)]
        left_out = len(self._plots) - len(shown)
        if left_out:
            note = Content.styled(f"  and {left_out} more: z shows them", "$muted")
            lines = [*lines, note] if len(lines) < height else [*lines[:-1], note]
        self.show(lines)

    def _block(self, plot: GridPlot, width: int, height: int) -> list[Content]:
        """The lines of one small plot: `height` lines of `width` cells."""
        series, options, across = plot.series, self.options, width - LABEL_WIDTH - 2
        start = series.end - (series.end - series.start) * ZOOMS[options.zoom]
        columns = series.columns(2 * across, start, series.end)
        columns = smoothed(columns, max(1.0, 2 * across * HALF_LIFE_SHARE)) if options.smooth else columns
        curve = PlotCurve(columns, "$info", band="$band", thick=options.thick)
        y_range = fit_y_range([curve], log=options.log)
        if y_range is None:
            body = [Content.styled("  nothing above zero for a log axis", "$muted"), *[Content("")] * (height - 2)]
        else:
            rows = height - 2
            drawn = draw_curves([curve], across, rows, y_range, ascii_only=self._ascii_only)
            ends = [f"{step:,.0f}" for step in (start, series.end)]
            body = [*plot_lines(drawn, ticks(y_range, rows)), x_axis_line(ends, across)]
        return [line.truncate(width).pad_right(max(0, width - line.cell_length)) for line in [self._title(plot), *body]]

    def _title(self, plot: GridPlot) -> Content:
        latest = plot.series.nearest(plot.series.end)
        value = format_number(latest.mean) if latest is not None else ""
        style = "bold reverse" if self.active else "bold"
        return Content.assemble("   ", (f" {self._glyphs(plot.label)} ", style), f" {value}")
