"""A pane of items that are appended, such as events or log lines; it follows the newest until the user scrolls up.

`form` turns an item into lines of text. The items are stored, so that the lines can be made again when the
width changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from textual.content import Content

from tui.widgets.text_lines import TextLines

T = TypeVar("T")

MAX_ITEMS = 1000
"""Number of newest items that are stored; older ones are dropped."""


class Scrollback(TextLines, Generic[T]):
    """A widget with a heading and, below it, the lines of the newest items."""

    def __init__(self, name: str, form: Callable[[T, int], list[Content]], *, empty: str, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self._name, self._form, self._empty = name, form, Content.styled(f" {empty}", "$muted")
        self._items: deque[T] = deque(maxlen=MAX_ITEMS)
        self._formed: list[Content] = []
        self._lines = [self._empty]
        self._back = 0
        self.headed = True
        """Whether the name is shown as the first line."""

    def add(self, items: Iterable[T]) -> None:
        """Append items."""
        new = list(items)
        self._items.extend(new)
        lines = [line for item in new for line in self._form(item, self.content_size.width)]
        # While scrolled back, the same lines stay visible.
        self._back += len(lines) if self._back else 0
        self._formed = [*self._formed, *lines][-4 * MAX_ITEMS :]
        self._paint()

    def replace(self, items: Iterable[T]) -> None:
        """Replace all items."""
        self._items.clear()
        self._items.extend(items)
        self._reform()

    def scroll_lines(self, lines: int) -> None:
        """Scroll up by this many lines, or down if the number is negative."""
        self._back = max(0, min(self._back + lines, len(self._formed) - self._room))
        self._paint()

    def on_resize(self) -> None:
        """Make the lines for the new width."""
        super().on_resize()
        self._reform()

    def on_mouse_scroll_up(self) -> None:
        """Scroll up with the mouse wheel."""
        self.scroll_lines(3)

    def on_mouse_scroll_down(self) -> None:
        """Scroll down with the mouse wheel."""
        self.scroll_lines(-3)

    @property
    def page(self) -> int:
        """The number of lines in one page."""
        return max(1, self._room - 1)

    @property
    def _room(self) -> int:
        return max(1, self.content_size.height - self.headed)

    def _reform(self) -> None:
        self._formed = [line for item in self._items for line in self._form(item, self.content_size.width)]
        self._back = max(0, min(self._back, len(self._formed) - self._room))
        self._paint()

    def _paint(self) -> None:
        end = len(self._formed) - self._back
        shown = self._formed[max(0, end - self._room) : end] or [self._empty]
        if self._back:
            shown[-1] = Content.styled(f" {self._back + 1} more below; end goes to the newest", "$caution")
        self.show([Content.styled(f" {self._name}", "bold"), *shown] if self.headed else shown)
