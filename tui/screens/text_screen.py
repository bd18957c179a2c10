"""A screen that is only read: lines made for the width, walked through with the arrows."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.content import Content

from tui.screens.base import BaseScreen
from tui.widgets.row_list import Rows


class ReadingScreen(BaseScreen):
    """Shows `lines`; call `refill` when they have changed."""

    def body(self) -> ComposeResult:
        """The lines."""
        yield Rows()

    def lines(self, width: int) -> Sequence[Content]:
        """What is shown at this width."""
        raise NotImplementedError

    def refill(self) -> None:
        """Make the lines anew."""
        self.query_one(Rows).show(self.lines(self.size.width))

    def on_resize(self, event: events.Resize) -> None:
        """Lines wrap elsewhere."""
        super().on_resize(event)
        self.refill()
