"""What the plots of Run and Compare share: a cursor that keys and clicks move, and drawing again for a new size.

Try: left and right on the Run screen
"""

from __future__ import annotations

from collections.abc import Sequence

from textual import events

from tui.plot.braille import LABEL_WIDTH
from tui.plot.cursor import PlotCursor, XScale
from tui.plot.series import BoundedSeries
from tui.widgets.text_lines import TextLines


class CursorPlot(TextLines):
    """A widget that draws curves, with a cursor on their x axis."""

    def __init__(self, *, id: str | None, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self.cursor = PlotCursor()

    def axis_and_series(self, width: int) -> tuple[XScale, Sequence[BoundedSeries]] | None:
        """The x axis in `width` cells, and the series that the cursor reads; None while there are no data."""
        raise NotImplementedError

    def paint(self) -> None:
        """Draw the plot from its data."""
        raise NotImplementedError

    def move_cursor(self, by: int) -> None:
        """Move the cursor by this many cells, to the next point of any curve in that direction."""
        if self.plot_width > 0 and (found := self.axis_and_series(self.plot_width)) is not None:
            self.cursor.move(by, *found)
            self.paint()

    def clear_cursor(self) -> None:
        """Remove the cursor."""
        self.cursor.clear()
        self.paint()

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the clicked place, or on the point before it."""
        found = self.axis_and_series(max(1, self.plot_width))
        if found is not None and event.x >= LABEL_WIDTH:
            scale = found[0]
            self.cursor.x = scale.bounds(min(scale.width - 1, event.x - LABEL_WIDTH))[0]
            self.move_cursor(0)

    def on_resize(self) -> None:
        """Draw again for the new size."""
        super().on_resize()
        self.paint()

    @property
    def plot_width(self) -> int:
        """Cells between the y axis and the right end."""
        return self.content_size.width - LABEL_WIDTH
