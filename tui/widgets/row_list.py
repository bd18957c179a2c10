"""A list to walk through: one line a row, a cursor, any number of rows. Only the rows in sight are ever drawn.

Arrows, j and k, page keys, home and end move; Enter chooses. The rows themselves are made by the screen.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.binding import Binding
from textual.content import Content
from textual.message import Message
from textual.style import Style

from tui.widgets.text_lines import BLANK, Lines


class Rows(Lines):
    """Rows with a cursor. `Moved` follows every move of the cursor, `Chosen` an Enter or a click on its row."""

    can_focus = True
    COMPONENT_CLASSES = {"rows--cursor"}  # noqa: RUF012  # Textual's own declaration
    BINDINGS = [  # noqa: RUF012  # Textual's own declaration
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup,ctrl+u", "page(-1)", show=False),
        Binding("pagedown,ctrl+d", "page(1)", show=False),
        Binding("home,g", "jump(0)", show=False),
        Binding("end,G", "jump(-1)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, rows: Rows, index: int) -> None:
            super().__init__()
            self.rows, self.index = rows, index

        @property
        def control(self) -> Rows:
            """The list it happened in."""
            return self.rows

    class Chosen(Moved):
        """A row was chosen."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.cursor = 0
        """Index of the row the cursor is on."""
        self.top = 0
        """Index of the first row in sight."""

    def show(self, lines: Sequence[Content]) -> None:
        """Give it new rows; the cursor stays on its index, or on the last row where there are fewer."""
        before, self._lines = self._lines, list(lines)
        self.cursor = min(self.cursor, max(0, len(self._lines) - 1))
        if self._scroll() or len(before) != len(self._lines):
            self.redraw_all()
            return
        for index in range(self.top, min(self.top + self.size.height, len(self._lines))):
            if not before[index].is_same(self._lines[index]):
                self.redraw(index - self.top)

    def move_to(self, index: int) -> None:
        """Put the cursor on a row."""
        target = max(0, min(index, len(self._lines) - 1))
        if target == self.cursor:
            return
        left, self.cursor = self.cursor, target
        if self._scroll():
            self.redraw_all()
        else:
            self.redraw(left - self.top)
            self.redraw(target - self.top)
        self.post_message(self.Moved(self, target))

    def line_at(self, y: int) -> Content:
        """The row on the widget's line `y`."""
        index = self.top + y
        line = self._lines[index] if index < len(self._lines) else BLANK
        # Of sixteen colours too few can be read on the cursor's: there its row is written in one.
        return Content(line.plain) if index == self.cursor and self.has_focus and self.app.native_ansi_color else line

    def line_style(self, y: int) -> Style:
        """The cursor's row stands out, by more than colour where there is none."""
        if self.top + y == self.cursor and self._lines:
            return self.get_visual_style("rows--cursor")
        return self.visual_style

    def action_move(self, rows: int) -> None:
        """Up or down by some rows."""
        self.move_to(self.cursor + rows)

    def action_page(self, pages: int) -> None:
        """Up or down by a page."""
        self.move_to(self.cursor + pages * max(1, self.size.height - 1))

    def action_jump(self, index: int) -> None:
        """To the first row, or with -1 to the last."""
        self.move_to(index if index >= 0 else len(self._lines) - 1)

    def action_choose(self) -> None:
        """Choose the row the cursor is on."""
        if self._lines:
            self.post_message(self.Chosen(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        """A click moves the cursor; one on the cursor's row chooses it."""
        index = self.top + event.y
        if index >= len(self._lines):
            return
        if index == self.cursor:
            self.action_choose()
        self.move_to(index)

    def on_mouse_scroll_down(self) -> None:
        """Three rows down."""
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        """Three rows up."""
        self.action_move(-3)

    def on_focus(self) -> None:
        """The cursor looks different with the focus."""
        self.redraw(self.cursor - self.top)

    def on_blur(self) -> None:
        """The cursor looks different without the focus."""
        self.redraw(self.cursor - self.top)

    def on_resize(self) -> None:
        """Keep the cursor in sight."""
        super().on_resize()
        self._scroll()

    def _scroll(self) -> bool:
        """Move the window so that the cursor is in it; whether it moved."""
        height = max(1, self.size.height)
        top = min(self.top, self.cursor, max(0, len(self._lines) - height))
        top = max(top, self.cursor - height + 1, 0)
        moved, self.top = top != self.top, top
        return moved
