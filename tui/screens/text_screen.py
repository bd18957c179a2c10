"""The base class of screens that only show text: lines made for the width, scrolled by a cursor."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.content import Content

from tui.screens.base import BaseScreen
from tui.widgets.row_list import RowList


class TextScreen(BaseScreen):
    """Base class of a screen that shows the lines of `text_lines`. Call `refill` when the lines have changed."""

    def compose_body(self) -> ComposeResult:
        """Yield the list that shows the lines."""
        yield RowList()

    def text_lines(self, width: int) -> Sequence[Content]:
        """Return the lines to show, made for `width` cells. Subclasses define this."""
        raise NotImplementedError

    def refill(self) -> None:
        """Call `text_lines` again and show the result."""
        self.query_one(RowList).show(self.text_lines(self.size.width))

    def on_resize(self, event: events.Resize) -> None:
        """Make the lines for the new width."""
        super().on_resize(event)
        self.refill()
