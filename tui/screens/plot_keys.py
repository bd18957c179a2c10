"""The actions of the keys that act on a plot, shared by the screens that have one: its line, its axis and its cursor.

Try: left and right on the Run screen
"""

from __future__ import annotations

from dataclasses import replace

from tui.plot.cursor_plot import CursorPlot
from tui.plot.loss_plot import ZOOMS, PlotOptions

FAR = 10
"""Cells by which the cursor moves with the shift key."""


class PlotKeys:
    """A mixin for screens: the actions of the keys on their plot."""

    @property
    def plot(self) -> CursorPlot:
        """The plot on which the keys act."""
        raise NotImplementedError

    @property
    def plot_options(self) -> PlotOptions:
        """How the plot is drawn."""
        raise NotImplementedError

    @property
    def plot_is_log(self) -> bool:
        """Whether the y axis is logarithmic now, by choice or by itself."""
        return self.plot_options.log

    def set_plot_options(self, options: PlotOptions) -> None:
        """Draw the plot with other options."""
        raise NotImplementedError

    def cursor_moved(self) -> None:
        """Called after the cursor was moved; a screen that shows its values beside the plot shows them again."""

    def do_log_axis(self) -> None:
        """Switch the y axis between logarithmic and linear."""
        self.set_plot_options(replace(self.plot_options, log=not self.plot_is_log, auto_log=False))

    def do_smooth(self) -> None:
        """Draw the curve smoothed, then thick, then as it is."""
        self.set_plot_options(self.plot_options.next_line())

    def do_zoom_in(self) -> None:
        """Plot a shorter part at the end of the run: first its last half, then its last tenth."""
        self._zoom(1)

    def do_zoom_out(self) -> None:
        """Plot a longer part of the run again, up to all of it."""
        self._zoom(-1)

    def _zoom(self, by: int) -> None:
        names = list(ZOOMS)
        place = max(0, min(len(names) - 1, names.index(self.plot_options.zoom) + by))
        self.set_plot_options(replace(self.plot_options, zoom=names[place]))

    def do_cursor_left(self) -> None:
        """Move the plot's cursor to the point before; the first time, to the newest."""
        self._move(-1)

    def do_cursor_right(self) -> None:
        """Move the plot's cursor to the next point."""
        self._move(1)

    def do_cursor_far_left(self) -> None:
        """Move the plot's cursor FAR cells to the left."""
        self._move(-FAR)

    def do_cursor_far_right(self) -> None:
        """Move the plot's cursor FAR cells to the right."""
        self._move(FAR)

    def _move(self, by: int) -> None:
        self.plot.move_cursor(by)
        self.cursor_moved()
