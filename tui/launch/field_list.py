"""Fields as rows: walk through them, Enter edits the one under the cursor, Enter or Esc leaves it again.

One input field, laid over the row that is edited, serves them all: typing in it repaints lines and lays out nothing.
What the texts mean is the screen's affair: it is told of each change as it is typed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.reactive import Reactive
from textual.widgets import Input

from tui.launch.fields import Row
from tui.theme import draw
from tui.widgets.key_order import KeysInOrder
from tui.widgets.row_list import Rows
from tui.widgets.text_lines import Lines

LABEL_AT = 2
VALUE_AT = 17
"""Columns of a row: a mark, the label, the value."""

HINT_LINES = 2


class Editor(KeysInOrder, Input):
    """The input field over a row."""

    BINDINGS = [Binding("escape,up,down", "leave", show=False)]  # noqa: RUF012  # Textual's own declaration
    virtual_size = Reactive(Size(0, 0), layout=False)
    """The width of the text. Textual's own asks for a layout pass of the whole screen whenever it changes, which is at
    every letter, and took a third of what a letter costs here; where the field stands never depends on it."""

    def __init__(self, typed: Callable[[str], None]) -> None:
        super().__init__(compact=True, id="editor")
        self._typed = typed
        self.disable_messages(Input.Changed)

    def watch_value(self, value: str) -> None:
        """Straight on, while the key is still being handled: told by a message, the screen would paint the letter
        first and what follows from it in a second pass."""
        self._typed(value)

    def action_leave(self) -> None:
        """Back to the rows; what was typed stays."""
        self.post_message(self.Submitted(self, self.value))


class Fields(Vertical):
    """The rows, the field over them, and two lines on the row under the cursor."""

    DEFAULT_CSS = f"""
    Fields {{ height: 1fr; layers: rows field; }}
    Fields Rows {{ height: 1fr; layer: rows; }}
    Fields #hint {{ height: {HINT_LINES}; layer: rows; color: $muted; }}
    Fields Editor {{ layer: field; position: absolute; display: none; height: 1; background: $panel; }}
    """

    class Left(Message):
        """The row's editing is over."""

        def __init__(self, key: str, text: str) -> None:
            super().__init__()
            self.key, self.text = key, text

    class Moved(Message):
        """Another row is under the cursor."""

    def __init__(
        self, choices: Callable[[str], list[str]], begun: Callable[[], None], typed: Callable[[str, str], None],
        *, ascii_only: bool,
    ) -> None:  # fmt: skip
        """`choices` are the values of a key that has only some; `begun` is called before a row is changed, `typed` with
        its key and its text at every change."""
        super().__init__(id="fields")
        self._choices, self._begun, self._typed, self._ascii_only = choices, begun, typed, ascii_only
        self._rows: list[Row] = []
        self._drawn: dict[tuple[Row, str, int], Content] = {}
        self._edited = ""

    def compose(self) -> ComposeResult:
        """Rows, hint, and the field on top."""
        yield Rows(id="field-rows")
        yield Lines(id="hint")
        yield Editor(self._changed)

    @property
    def edited(self) -> str:
        """Key of the row that is being edited; empty when none is."""
        return self._edited

    @property
    def row(self) -> Row | None:
        """The row under the cursor."""
        index = self.query_one(Rows).cursor
        return self._rows[index] if index < len(self._rows) else None

    def put(self, rows: Sequence[Row], troubles: dict[str, str], *, width: int) -> None:
        """Show these rows, with what is wrong with each."""
        self._rows = list(rows)
        before = self._drawn
        drawn = [(row, troubles.get(row.key, ""), width) for row in rows]
        self._drawn = {known: before.get(known) or self._line(*known) for known in drawn}
        self.query_one(Rows).show([self._drawn[known] for known in drawn])

    def hint(self, text: str, style: str) -> None:
        """Say something about the row under the cursor."""
        lines = self.query_one("#hint", Lines)
        wrapped = Content.styled(text, style).wrap(max(10, lines.size.width))
        if len(wrapped) > HINT_LINES:
            more = Content.styled(draw(" …", ascii_only=self._ascii_only), style)
            wrapped[HINT_LINES - 1] = Content.assemble(wrapped[HINT_LINES - 1], more)
        lines.show(wrapped[:HINT_LINES])

    def _line(self, row: Row, trouble: str, width: int) -> Content:
        mark, style = ("✗", "bold $bad") if trouble else ("●", "$info") if row.changed else (" ", "")
        label = row.label[: VALUE_AT - LABEL_AT - 1].ljust(VALUE_AT - LABEL_AT)
        value = Content.styled(row.value or ("" if row.beside else draw("·", ascii_only=self._ascii_only)),
                               "$bad" if trouble else "bold" if row.changed else "")  # fmt: skip
        beside = f"  {row.beside}" if row.value and row.beside else row.beside
        shown = draw(mark, ascii_only=self._ascii_only)
        line = Content.assemble((f"{shown} ", style), label, value, (beside, "$muted"))
        room = width - line.cell_length - 2
        return Content.assemble(line, (f"  {trouble}", "$bad")) if trouble and room > 20 else line

    def focus_rows(self) -> None:
        """Give the rows the keys."""
        self.screen.set_focus(self.query_one(Rows))

    def edit(self) -> None:
        """Change the row under the cursor: the next of its values, or whatever is typed."""
        row = self.row
        if row is None:
            return
        self._begun()
        values = self._choices(row.key)
        if values:
            following = values[(values.index(row.value) + 1) % len(values)] if row.value in values else values[0]
            self._typed(row.key, following)
        else:
            self._open(row)

    def _open(self, row: Row) -> None:
        rows, field = self.query_one(Rows), self.query_one(Editor)
        field.value = row.value
        self._edited = row.key
        field.cursor_position = len(row.value)
        self._place(rows, field)
        field.display = True
        self.screen.set_focus(field)

    def _place(self, rows: Rows, field: Editor) -> None:
        """Lay the field over its row."""
        field.styles.offset = (VALUE_AT, rows.cursor - rows.top)
        field.styles.width = max(8, self.size.width - VALUE_AT)

    def _changed(self, text: str) -> None:
        """A letter was typed, or the field was filled to begin with."""
        if self._edited:
            self._typed(self._edited, text.strip())

    def on_rows_chosen(self, event: Rows.Chosen) -> None:
        """Enter on a row."""
        event.stop()
        self.edit()

    def on_rows_moved(self, event: Rows.Moved) -> None:
        """Another row."""
        event.stop()
        self.post_message(self.Moved())

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter, Esc, up or down: the row is left."""
        event.stop()
        key, self._edited = self._edited, ""
        self.query_one(Editor).display = False
        self.focus_rows()
        self.post_message(self.Left(key, event.value.strip()))

    def on_resize(self, _event: events.Resize) -> None:
        """The field follows its row."""
        if self._edited:
            self._place(self.query_one(Rows), self.query_one(Editor))
