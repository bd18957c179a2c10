"""A pane of items that are appended, such as events or log lines; it follows the newest until the user scrolls up.

`form` turns an item into lines of text. The items are stored, so that the lines can be made again when the
width or the filter changes. A filter lets through the items that contain all of its words, and a kind those for which a
function is true.
"""

from __future__ import annotations

import re
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

    def __init__(
        self, name: str, form: Callable[[T, int], list[Content]], words: Callable[[T], str], *, empty: str, id: str
    ) -> None:
        """`name` is shown in the heading. `form` turns an item and the width into lines, `words` returns the text of an
        item in which a filter looks for its words, and `empty` is shown while there are no items."""
        super().__init__(id=id, classes="pane")
        self._name, self._form, self._words, self._empty = name, form, words, Content.styled(f" {empty}", "$muted")
        self._filter: list[str] = []
        self.kind = ""
        """The kind of the items that are shown; empty for all."""
        self._is_of_kind: Callable[[T], bool] | None = None
        self._unfinished: list[Content] = []
        self._items: deque[T] = deque(maxlen=MAX_ITEMS)
        self._formed: list[Content] = []
        self._lines = [self._empty]
        self._back = 0
        self.headed = True
        """Whether the name is shown as the first line."""
        self.active = False
        """Whether keys act on this pane, which the name shows."""

    def add(self, items: Iterable[T]) -> None:
        """Append items as the newest. The view follows them, unless the user has scrolled up: then the same lines stay
        visible."""
        new = list(items)
        self._items.extend(new)
        lines = self._lines_of(new)
        # While scrolled back, the same lines stay visible.
        self._back += len(lines) if self._back else 0
        self._formed = [*self._formed, *lines][-4 * MAX_ITEMS :]
        self._paint()

    def show_unfinished(self, item: T | None) -> None:
        """Show an item that will still change below the newest one, or none."""
        self._unfinished = self._lines_of([item]) if item is not None else []
        self._paint()

    def replace(self, items: Iterable[T]) -> None:
        """Replace all items, and go to the newest."""
        self._items.clear()
        self._unfinished, self._back = [], 0
        self._items.extend(items)
        self._reform()

    def redraw_heading(self) -> None:
        """Draw the lines again after `headed` or `active` was set."""
        self._paint()

    def set_filter(self, text: str) -> None:
        """Show only the items that contain every word of `text`, in any case of letters; with "" all items."""
        self._filter = text.lower().split()
        self._back = 0
        self._reform()

    def set_kind(self, kind: str, is_of_kind: Callable[[T], bool] | None) -> None:
        """Show only the items for which `is_of_kind` is true, with the name `kind` in the heading; with "" and None all
        items."""
        self.kind, self._is_of_kind = kind, is_of_kind
        self._back = 0
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
        """Scroll up by three lines."""
        self.scroll_lines(3)

    def on_mouse_scroll_down(self) -> None:
        """Scroll down by three lines."""
        self.scroll_lines(-3)

    @property
    def page(self) -> int:
        """The number of lines by which the page keys scroll."""
        return max(1, self._room - 1)

    @property
    def _room(self) -> int:
        return max(1, self.content_size.height - self.headed)

    def _reform(self) -> None:
        self._formed = self._lines_of(self._items)
        self._back = max(0, min(self._back, len(self._formed) - self._room))
        self._paint()

    def _matches(self, item: T) -> bool:
        if self._is_of_kind is not None and not self._is_of_kind(item):
            return False
        text = self._words(item).lower() if self._filter else ""
        return all(word in text for word in self._filter)

    def _lines_of(self, items: Iterable[T]) -> list[Content]:
        """The lines of the items that the filter lets through, with its words marked."""
        lines = [line for item in items if self._matches(item) for line in self._form(item, self.content_size.width)]
        if not self._filter:
            return lines
        found = re.compile("|".join(map(re.escape, self._filter)), re.IGNORECASE)
        return [line.highlight_regex(found, style="bold $mark") for line in lines]

    def _heading(self) -> Content:
        name = Content.styled(f" {self._name} ", "bold reverse" if self.active else "bold")
        if not self._filter and not self.kind:
            return name
        words = f"/{' '.join(self._filter)} " if self._filter else ""
        return Content.assemble(name, (f" {self.kind}{' ' * bool(self.kind)}{words} {self.shown_of}", "$caution"))

    @property
    def shown_of(self) -> str:
        """How many of the items are shown, such as "3 of 14"."""
        return f"{sum(map(self._matches, self._items))} of {len(self._items)}"

    def _paint(self) -> None:
        end = len(self._formed) - self._back
        begun = [] if self._back else self._unfinished
        shown = [*self._formed[max(0, end - self._room) : end], *begun][-self._room :] or [self._empty]
        if self._back:
            shown[-1] = Content.styled(f" {self._back + 1} more below; end goes to the newest", "$caution")
        self.show([self._heading(), *shown] if self.headed else shown)
