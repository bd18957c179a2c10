"""A column of the Chat screen: a heading, and below it lines that follow the newest until the user scrolls up."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from tui.widgets.text_lines import TextLines


class ChatColumn(TextLines):
    """Shows one model's side of a chat."""

    def __init__(self) -> None:
        super().__init__(classes="column")
        self._heading, self._all = Content(""), list[Content]()
        self._back = 0
        """Lines below the last visible one."""

    @property
    def room(self) -> int:
        """Lines below the heading."""
        return max(1, self.content_size.height - 1)

    def set_lines(self, heading: Content, lines: Sequence[Content]) -> None:
        """Replace heading and lines. While scrolled up, the same lines stay visible."""
        added = len(lines) - len(self._all)
        self._heading, self._all = heading, list(lines)
        self._back = max(0, self._back + added) if self._back else 0
        self.scroll_lines(0)

    def scroll_lines(self, lines: int) -> None:
        """Scroll up by this many lines, or down if the number is negative."""
        self._back = max(0, min(self._back + lines, len(self._all) - self.room))
        end = len(self._all) - self._back
        shown = self._all[max(0, end - self.room) : end]
        if self._back and shown:
            shown[-1] = Content.styled(f"{self._back + 1} more below; G goes to the newest", "$caution")
        self.show([self._heading, *shown])

    def follow(self) -> None:
        """Go to the newest line, and follow it."""
        self._back = 0
        self.scroll_lines(0)

    def on_resize(self) -> None:
        """Show as many lines as the new height has room for."""
        super().on_resize()
        self.scroll_lines(0)
