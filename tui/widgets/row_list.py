"""A list with a cursor: one line a row, any number of rows. Only visible rows are drawn; arrows with a number say how
many there are above and below.

Arrows, j and k, page keys, home and end move the cursor; Enter selects. The screen makes the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.message import Message
from textual.style import Style

from tui.theme import glyphs
from tui.widgets.text_lines import BLANK, TextLines


class RowsOnDemand(Sequence[Content]):
    """Rows of which each is made when it is first asked for: of a long list, only those that are seen."""

    def __init__(self, count: int, make: Callable[[int], Content]) -> None:
        """`make` makes the row with a number, from 0 to `count` - 1."""
        self._count, self._make = count, make
        self._made: dict[int, Content] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Content: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Content]: ...

    def __getitem__(self, index: int | slice) -> Content | Sequence[Content]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        if index not in self._made:
            self._made[index] = self._make(index)
        return self._made[index]


def _at(lines: Sequence[Content], index: int) -> Content:
    return lines[index] if index < len(lines) else BLANK


class RowList(TextLines):
    """A widget that shows rows, one of them under a cursor. It posts `Highlighted` when the cursor moves, and
    `Selected` on Enter or a double click."""

    can_focus = True
    COMPONENT_CLASSES = {"row-list--cursor"}  # noqa: RUF012  # Textual's own declaration
    BINDINGS = [  # noqa: RUF012  # Textual's own declaration
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup,ctrl+u", "page(-1)", show=False),
        Binding("pagedown,ctrl+d", "page(1)", show=False),
        Binding("home,g", "jump(0)", show=False),
        Binding("end,G", "jump(-1)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Highlighted(Message):
        """Message: the cursor moved to another row."""

        def __init__(self, rows: RowList, index: int) -> None:
            super().__init__()
            self.rows, self.index = rows, index

        @property
        def control(self) -> RowList:
            """The list that posted the message."""
            return self.rows

    class Selected(Highlighted):
        """Message: a row was selected with Enter or a double click."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.cursor = 0
        """Index of the row the cursor is on."""
        self.top = 0
        """Index of the first visible row."""
        self._height = 0
        """The list's height before its size changed; 0 while it is hidden."""

    def show(self, lines: Sequence[Content]) -> None:
        """Show new rows. The cursor stays at the same index, or moves to the last row if there are fewer rows now."""
        before, self._lines = self._lines, lines if isinstance(lines, RowsOnDemand) else list(lines)
        left, self.cursor = self.cursor, min(self.cursor, max(0, len(self._lines) - 1))
        if self._scroll():
            self.redraw_all()
            return
        height = self.size.height
        for y in range(height):
            if not _at(before, self.top + y).is_same(_at(self._lines, self.top + y)):
                self.redraw_changes(y)
        if left != self.cursor:
            self.redraw(left - self.top)
            self.redraw(self.cursor - self.top)
        if len(before) != len(self._lines):  # the number of rows above and below
            self.redraw(0)
            self.redraw(height - 1)

    def move_to(self, index: int) -> None:
        """Move the cursor to the row `index`, or to the nearest row if there is none; posts `Highlighted` if the cursor
        moved."""
        target = max(0, min(index, len(self._lines) - 1))
        if target == self.cursor:
            return
        left, self.cursor = self.cursor, target
        if self._scroll():
            self.redraw_all()
        else:
            self.redraw(left - self.top)
            self.redraw(target - self.top)
        self.post_message(self.Highlighted(self, target))

    def line_at(self, y: int) -> Content:
        """The row on the widget's line `y`."""
        index = self.top + y
        line = _at(self._lines, index)
        # With sixteen colours, few are readable on the cursor's background: its row is written in one colour.
        if index == self.cursor and self.has_focus and self.app.native_ansi_color:
            line = Content(line.plain)
        return self._with_hint(line, self._hint(y))

    def _hint(self, y: int) -> str:
        """How many rows there are above the first visible one, or below the last; empty for all other lines."""
        below = len(self._lines) - self.top - self.size.height
        arrow, count = ("↑", self.top) if y == 0 else ("↓", below if y == self.size.height - 1 else 0)
        return f" {glyphs(arrow, ascii_only=getattr(self.app, 'ascii_only', False))} {count}" if count > 0 else ""

    def _with_hint(self, line: Content, hint: str) -> Content:
        """A row with `hint` at its right end, over what would stand there."""
        room = self.content_size.width - len(hint)
        if not hint or room < 8:
            return line
        shown = Content.assemble(line.truncate(room - 1), self._cut) if line.cell_length > room else line
        return Content.assemble(shown, " " * (room - shown.cell_length), (hint, "$info"))

    def line_style(self, y: int) -> Style:
        """The cursor's style for the row under the cursor, the widget's style for all others."""
        if self.top + y == self.cursor and self._lines:
            style = self.get_visual_style("row-list--cursor")  # which leaves "reverse" out
            reverse = self.get_component_styles("row-list--cursor").text_style.reverse
            return style + Style(reverse=True) if reverse else style
        return self.visual_style

    def action_move(self, rows: int) -> None:
        """Move the cursor by this many rows."""
        self.move_to(self.cursor + rows)

    def action_page(self, pages: int) -> None:
        """Move the cursor by this many pages."""
        self.move_to(self.cursor + pages * max(1, self.size.height - 1))

    def action_jump(self, index: int) -> None:
        """Move the cursor to the row `index`; -1 is the last row."""
        self.move_to(index if index >= 0 else len(self._lines) - 1)

    def action_choose(self) -> None:
        """Select the row under the cursor."""
        if self._lines:
            self.post_message(self.Selected(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked row; a double click selects the row."""
        index = self.top + event.y
        if index >= len(self._lines):
            return
        self.move_to(index)
        if event.chain > 1:
            self.action_choose()

    def on_mouse_scroll_down(self) -> None:
        """Move the cursor three rows down."""
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        """Move the cursor three rows up."""
        self.action_move(-3)

    def on_focus(self) -> None:
        """Draw the cursor's row as focused."""
        self.redraw(self.cursor - self.top)

    def on_blur(self) -> None:
        """Draw the cursor's row as not focused."""
        self.redraw(self.cursor - self.top)

    def on_resize(self) -> None:
        """Scroll so that the cursor is visible in the new size; a list that was hidden begins with its first row, if
        the cursor allows that."""
        super().on_resize()
        before = self.top
        if self._height <= 1:
            self.top = 0
        self._height = self.size.height
        self._scroll()
        if self.top != before:  # Textual has painted the new size before this, with the rows from the old one on
            self.redraw_all()

    def _scroll(self) -> bool:
        """Scroll so that the cursor is visible; returns whether the first visible row changed."""
        height = max(1, self.size.height)
        top = min(self.top, self.cursor, max(0, len(self._lines) - height))
        top = max(top, self.cursor - height + 1, 0)
        moved, self.top = top != self.top, top
        return moved
