"""Lines that come at the end and are scrolled back through: it follows the end until someone scrolls up.

It keeps what it was given and forms lines from it anew when the width changes; `form` says how one item looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from textual.content import Content

from tui.widgets.text_lines import Lines

T = TypeVar("T")

KEPT = 1000
"""Items that are kept."""


class Scrollback(Lines, Generic[T]):
    """A heading, and the newest lines under it."""

    def __init__(self, name: str, form: Callable[[T, int], list[Content]], *, empty: str, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self._name, self._form, self._empty = name, form, Content.styled(f" {empty}", "$muted")
        self._items: deque[T] = deque(maxlen=KEPT)
        self._formed: list[Content] = []
        self._lines = [self._empty]
        self._back = 0
        self.headed = True
        """Whether its first line is its name."""

    def add(self, items: Iterable[T]) -> None:
        """More at the end."""
        new = list(items)
        self._items.extend(new)
        lines = [line for item in new for line in self._form(item, self.content_size.width)]
        # Scrolled back, the same lines stay in sight.
        self._back += len(lines) if self._back else 0
        self._formed = [*self._formed, *lines][-4 * KEPT :]
        self._paint()

    def replace(self, items: Iterable[T]) -> None:
        """Something else altogether."""
        self._items.clear()
        self._items.extend(items)
        self._reform()

    def scroll_lines(self, lines: int) -> None:
        """Back through the lines, or forth with a negative number."""
        self._back = max(0, min(self._back + lines, len(self._formed) - self._room))
        self._paint()

    def on_resize(self) -> None:
        """Lines wrap elsewhere."""
        super().on_resize()
        self._reform()

    def on_mouse_scroll_up(self) -> None:
        """The wheel, back."""
        self.scroll_lines(3)

    def on_mouse_scroll_down(self) -> None:
        """The wheel, forth."""
        self.scroll_lines(-3)

    @property
    def page(self) -> int:
        """Lines of one page."""
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
            shown[-1] = Content.styled(f" {self._back + 1} more below; end follows them", "$caution")
        self.show([Content.styled(f" {self._name}", "bold"), *shown] if self.headed else shown)
