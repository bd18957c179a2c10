"""An input field in which the words of a filter are typed; hidden while there is no filter.

A filter applies at every letter. Enter and Down leave the field, Esc also clears it. The screen decides what has the
focus then.
"""

from __future__ import annotations

from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.reactive import Reactive
from textual.widgets import Input

from tui.widgets.key_order import OrderedKeys


class FilterField(OrderedKeys, Input):
    """A field for a filter: posts `Input.Changed` at every letter, and `Left` when the user leaves it."""

    virtual_size = Reactive(Size(0, 0), layout=False)
    """As in Launch's fields: a letter changes this size, on which the layout does not depend."""

    class Left(Message):
        """Message: the user has left the field, so the screen should give the focus back to the rows that are
        filtered."""

    def __init__(self, placeholder: str) -> None:
        super().__init__(placeholder=placeholder, id="filter", compact=True)
        self.display = False

    def open(self) -> None:
        """Show the field and give it the focus."""
        self.display = True
        self.screen.set_focus(self)

    def clear_filter(self) -> None:
        """Remove the filter, hide the field, and leave it."""
        self.value = ""
        self.display = False
        self.post_message(self.Left())

    async def on_key(self, event: events.Key) -> None:
        """Clear the filter on Esc, and leave the field on Esc, Enter and Down."""
        if event.key == "escape":
            event.stop()
            event.prevent_default()
            self.clear_filter()
        elif event.key in ("down", "enter"):
            event.stop()
            event.prevent_default()
            self.display = bool(self.value)
            self.post_message(self.Left())
        else:
            await super().on_key(event)
