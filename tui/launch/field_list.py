"""A list of fields: the cursor moves over them, Enter edits the one under it, or asks for the list of files to choose
one from. Enter keeps what was typed, Esc discards it.

A single input field is placed over the row that is edited, so typing repaints lines and needs no layout pass. The list
does not interpret the texts; it reports every change to the screen as it is typed.
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

from tui.launch.fields import PROFILE, RECIPE, FieldRow
from tui.theme import glyphs
from tui.widgets.key_order import OrderedKeys
from tui.widgets.row_list import RowList
from tui.widgets.text_lines import TextLines

LABEL_AT = 2
VALUE_AT = 17
"""Columns of a row at which the label and the value begin; a mark stands in column 0."""

HINT_LINES = (1, 2)
"""Lines of the hint, where there is little room and where there is more."""


class FieldInput(OrderedKeys, Input):
    """The input field that is placed over the row being edited."""

    BINDINGS = [Binding("up,down", "leave", show=False), Binding("escape", "discard", show=False)]  # noqa: RUF012  # Textual's own declaration
    virtual_size = Reactive(Size(0, 0), layout=False)
    """The size of the text. In Textual's Input every change of this size, hence every letter, causes a layout pass of
    the whole screen, a third of the time of a letter. The layout does not depend on the size, so no pass is
    requested."""

    def __init__(self, typed: Callable[[str], None]) -> None:
        super().__init__(compact=True, id="field-input")
        self._typed = typed
        self.before = ""
        """The value when the editing began."""
        self.disable_messages(Input.Changed)

    def watch_value(self, value: str) -> None:
        """Report the new text directly while the key is handled. If it were reported with a message, the screen would
        be repainted twice: first with the letter, then with everything that changes because of it."""
        self._typed(value)

    def action_leave(self) -> None:
        """End the editing; the typed text remains the value of the field."""
        self.post_message(self.Submitted(self, self.value))

    def action_discard(self) -> None:
        """End the editing; the field has the value that it had before."""
        self.value = self.before
        self.action_leave()


class FieldList(Vertical):
    """A list of fields with an input field over the row being edited, and a hint of two lines about the row under the
    cursor."""

    DEFAULT_CSS = f"""
    FieldList {{ height: 1fr; layers: rows field; }}
    FieldList RowList {{ height: 1fr; layer: rows; }}
    FieldList #hint {{ height: {HINT_LINES[0]}; layer: rows; color: $muted; }}
    .-roomy FieldList #hint, .-one-pane FieldList #hint {{ height: {HINT_LINES[1]}; }}
    FieldList FieldInput {{ layer: field; position: absolute; display: none; height: 1; background: $panel; }}
    """

    class EditEnded(Message):
        """Message: the user has finished editing the row `key`; `text` is its new text."""

        def __init__(self, key: str, text: str) -> None:
            super().__init__()
            self.key, self.text = key, text

    class Highlighted(Message):
        """Message: the cursor moved to another row."""

    class PickAsked(Message):
        """Message: the user wants to choose another file for the row `kind`, PROFILE or RECIPE."""

        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

    def __init__(
        self, allowed_values: Callable[[str], list[str]], before_edit: Callable[[], None],
        on_typed: Callable[[str, str], None], *, ascii_only: bool,
    ) -> None:  # fmt: skip
        """`allowed_values` gets a row's key and returns the values through which Enter cycles, an empty list for a
        field whose value is typed. `before_edit` is called before a row is changed, `on_typed` with the row's key and
        text at every change."""
        super().__init__(id="fields")
        self._allowed_values, self._before_edit, self._on_typed = allowed_values, before_edit, on_typed
        self._ascii_only = ascii_only
        self._rows: list[FieldRow] = []
        self._drawn: dict[tuple[FieldRow, str, int], Content] = {}
        """Lines made so far, by row, problem and width: most stay the same from one letter to the next."""
        self._edited = ""
        """Key of the row that is being edited; empty when none is."""

    def compose(self) -> ComposeResult:
        """Yield the rows, the hint and the input field."""
        yield RowList(id="field-rows")
        yield TextLines(id="hint")
        yield FieldInput(self._changed)

    @property
    def row(self) -> FieldRow | None:
        """The row under the cursor; None if the list is empty."""
        index = self.query_one(RowList).cursor
        return self._rows[index] if index < len(self._rows) else None

    @property
    def is_edited(self) -> bool:
        """Whether letters are typed into a field."""
        return bool(self._edited)

    def set_rows(self, rows: Sequence[FieldRow], problems: dict[str, str], *, width: int) -> None:
        """Show these rows in lines of `width` cells; `problems` maps the key of a row to its problem."""
        self._rows = list(rows)
        before = self._drawn
        drawn = [(row, problems.get(row.key, ""), width) for row in rows]
        self._drawn = {known: before.get(known) or self._line(*known) for known in drawn}
        self.query_one(RowList).show([self._drawn[known] for known in drawn])

    def show_hint(self, text: str, style: str) -> None:
        """Show a text about the row under the cursor below the list, in the Textual style `style`. A text that is
        longer than the lines for it is cut."""
        lines = self.query_one("#hint", TextLines)
        wrapped = Content.styled(text, style).wrap(max(10, lines.size.width - 2))
        room = max(1, lines.size.height)
        if len(wrapped) > room:
            more = Content.styled(glyphs(" …", ascii_only=self._ascii_only), style)
            wrapped[room - 1] = Content.assemble(wrapped[room - 1].rstrip(), more)
        lines.show(wrapped[:room])

    def _line(self, row: FieldRow, problem: str, width: int) -> Content:
        mark, style = ("✗", "bold $bad") if problem else ("●", "$info") if row.changed else (" ", "")
        lead = (f"{glyphs(mark, ascii_only=self._ascii_only)} ", style)
        emphasis = "$bad" if problem else "bold" if row.changed else ""
        if row.is_stage:
            return Content.assemble(lead, (row.label, emphasis), (f" {row.note}", row.style))
        label = self._label(row.label, width)
        value = row.value or ("" if row.note else "not set")
        note = f"  {row.note}" if row.value and row.note else row.note
        line = Content.assemble(lead, label, (value, emphasis if row.value else "$muted"), (note, row.style))
        room = width - line.cell_length - 2
        return Content.assemble(line, (f"  {problem}", "$bad")) if problem and room > 20 else line

    def _label(self, label: str, width: int) -> str:
        """A label in its column. A longer one stands whole beside its value, or cut where it would take half the
        line."""
        room = max(VALUE_AT - LABEL_AT - 1, min(len(label), width // 2))
        cut = label if len(label) <= room else label[: room - 1] + glyphs("…", ascii_only=self._ascii_only)
        return cut.ljust(room + 1)

    def move_to(self, key: str) -> None:
        """Move the cursor to the row of a key, if the key has a row."""
        keys = [row.key for row in self._rows]
        if key in keys:
            self.query_one(RowList).move_to(keys.index(key))

    def focus_rows(self) -> None:
        """Give the focus to the list of rows, so that keys move its cursor."""
        self.screen.set_focus(self.query_one(RowList))

    def edit(self) -> None:
        """Edit the row under the cursor: set the next of its allowed values, or open the input field if there are
        none."""
        row = self.row
        if row is None:
            return
        if row.key in (PROFILE, RECIPE):
            self.post_message(self.PickAsked(row.key))
            return
        self._before_edit()
        values = self._allowed_values(row.key)
        if values:
            following = values[(values.index(row.value) + 1) % len(values)] if row.value in values else values[0]
            self._on_typed(row.key, following)
        else:
            self._open(row)

    def _open(self, row: FieldRow) -> None:
        rows, field = self.query_one(RowList), self.query_one(FieldInput)
        field.value = field.before = row.value
        self._edited = row.key
        field.cursor_position = len(row.value)
        self._place(rows, field)
        field.display = True
        self.screen.set_focus(field)
        self.post_message(self.Highlighted())

    def _place(self, rows: RowList, field: FieldInput) -> None:
        """Place the input field over the row under the cursor."""
        label = self.row.label if self.row is not None else ""
        value_at = LABEL_AT + len(self._label(label, self.size.width))
        field.styles.offset = (value_at, rows.cursor - rows.top)
        field.styles.width = max(8, self.size.width - value_at)

    def _changed(self, text: str) -> None:
        """Report a change of the text. The change that fills the field before the editing begins is not reported."""
        if self._edited:
            self._on_typed(self._edited, text.strip())

    def on_row_list_selected(self, event: RowList.Selected) -> None:
        """Edit the row on which Enter was pressed."""
        event.stop()
        self.edit()

    def on_row_list_highlighted(self, event: RowList.Highlighted) -> None:
        """Post `Highlighted` when the cursor moves."""
        event.stop()
        self.post_message(self.Highlighted())

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """End the editing."""
        event.stop()
        key, self._edited = self._edited, ""
        self.query_one(FieldInput).display = False
        self.focus_rows()
        self.post_message(self.EditEnded(key, event.value.strip()))

    def on_resize(self, _event: events.Resize) -> None:
        """Place the input field over its row again after a resize."""
        if self._edited:
            self._place(self.query_one(RowList), self.query_one(FieldInput))
