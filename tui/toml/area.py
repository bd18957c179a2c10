"""The text area of the editor: TOML with colours, the checker's problems at the ends of their lines, and completion.

Try: `tunedeck`, `3`, Enter on a recipe.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.actions import SkipAction
from textual.binding import Binding
from textual.message import Message
from textual.strip import Strip
from textual.widgets import TextArea
from textual.widgets.text_area import Edit, EditResult

from engine.config.schema.base import Table
from tui.files.annotated import LineProblem
from tui.theme import glyphs
from tui.toml.completion import Candidate, complete
from tui.toml.completion_list import CompletionList
from tui.toml.syntax import ScannedLine, scan
from tui.widgets.key_order import OrderedKeys

MIN_MESSAGE_CELLS = 16
"""A problem is written at the end of its line if this many cells are free there; its mark is shown in any case."""


class TomlArea(OrderedKeys, TextArea):
    """A text area for TOML of the table type `model`. On Esc it closes its list of completions; if none is open, it
    posts `EscapePressed`: the screen then closes, or warns first if there are unsaved changes."""

    COMPONENT_CLASSES = {  # noqa: RUF012  # Textual's own declaration
        "toml--comment", "toml--table", "toml--key", "toml--string", "toml--number", "toml--problem",
    }  # fmt: skip
    BINDINGS = [  # noqa: RUF012  # Textual's own declaration
        Binding("escape", "leave", show=False),
        Binding("tab,ctrl+at,ctrl+space", "complete", show=False),
        Binding("enter", "take_if_moved", show=False),
        Binding("up", "line_or_row(-1)", show=False),
        Binding("down", "line_or_row(1)", show=False),
    ]

    class EscapePressed(Message):
        """Message: Esc was pressed while no list of completions was open."""

    def __init__(self, text: str, model: type[Table], completions: CompletionList) -> None:
        super().__init__(
            text, soft_wrap=False, show_line_numbers=True, tab_behavior="focus", compact=True,
            highlight_cursor_line=True,
        )  # fmt: skip
        self._model, self._completions = model, completions
        self._scanned_lines: list[str] = []
        self._scanned: list[ScannedLine] = []
        self._messages: dict[int, str] = {}
        self._offered_at = (-1, -1)

    def show_problems(self, problems: Sequence[LineProblem]) -> None:
        """Show these problems at the ends of their lines from now on."""
        self._messages = {line: "; ".join(each.text for each in problems if each.line == line) for line, _ in problems}
        self.refresh()

    def get_line(self, line_index: int) -> Text:
        """Return a line of the text with its colours to Textual."""
        line = super().get_line(line_index)
        for span in self._spans(line_index).spans:
            line.stylize(self.get_component_rich_style(f"toml--{span.kind}", partial=True), span.start, span.end)
        return line

    def _spans(self, line_index: int) -> ScannedLine:
        """The spans of a line. The text is scanned again if it has changed since."""
        lines = [self.document.get_line(index) for index in range(self.document.line_count)]
        if lines != self._scanned_lines:
            self._scanned_lines, self._scanned = lines, scan(lines)
        return self._scanned[line_index]

    def render_line(self, y: int) -> Strip:
        """Return a line to Textual: with the mark of a problem beside its number, and the problem at its end."""
        strip, row = super().render_line(y), self.scroll_offset.y + y
        message = self._messages.get(row + 1)
        if message is None or row >= self.document.line_count:
            return strip
        style = self.get_component_rich_style("toml--problem", partial=True)
        mark, gutter = glyphs("✗ ", ascii_only=self._ascii_only), self.gutter_width
        text_cells = self.get_column_width(row, len(self.document.get_line(row))) - self.scroll_offset.x
        end = max(gutter, gutter + text_cells) + 2
        free = self.size.width - end
        number = gutter - len(mark)
        line = Strip.join([strip.crop(0, number), _written(mark, strip, number, style), strip.crop(gutter, end)])
        if free < MIN_MESSAGE_CELLS:
            return Strip.join([line, strip.crop(end, self.size.width)])
        cut, text = glyphs("…", ascii_only=self._ascii_only), mark + message
        text = set_cell_size(text, free) if cell_len(text) <= free else set_cell_size(text, free - 1) + cut
        return Strip.join([line, _written(text, strip, end, style)])

    def get_component_rich_style(self, *names: str, partial: bool = False, default: Style | None = None) -> Style:
        """Return a style of the text area to Textual. That of the cursor's line is its background alone: Textual would
        else draw its text in one colour."""
        style = super().get_component_rich_style(*names, partial=partial, default=default)
        return Style(bgcolor=style.bgcolor) if names == ("text-area--cursor-line",) else style

    @property
    def _ascii_only(self) -> bool:
        return bool(getattr(self.app, "ascii_only", False))

    def edit(self, edit: Edit) -> EditResult:
        """Change the text; a typed letter opens the list of completions, or keeps it up to date."""
        result = super().edit(edit)
        typed = len(edit.text) == 1 and edit.text.isprintable()
        if typed or (not edit.text and self._completions.completion):
            self._offer(asked=False)
        else:
            self._completions.close()
        return result

    def on_text_area_selection_changed(self) -> None:
        """Close the list of completions when the cursor leaves the word that is being completed."""
        if self._completions.completion and self.cursor_location != self._offered_at:
            self._completions.close()

    def _offer(self, *, asked: bool) -> None:
        """Open the list of completions for the word at the cursor, or close it if there are none. Unasked, nothing is
        offered before the first letter of a key, nor a word that is complete."""
        row, column = self.cursor_location
        lines = [self.document.get_line(index) for index in range(self.document.line_count)]
        found = complete(self._model, lines, row, column)
        if found is None or (not asked and not _is_welcome(found.typed, lines[row][:column], found.candidates)):
            self._completions.close()
            return
        self._offered_at = (row, column)
        self._completions.open(found, self.cursor_screen_offset)
        self.post_message(TextArea.SelectionChanged(self.selection, self))  # the screen explains the candidate

    def action_complete(self) -> None:
        """Take the chosen completion; if the list is closed, open it, and take a single candidate at once."""
        if self._completions.completion is None:
            self._offer(asked=True)
            if self._completions.completion is None or len(self._completions.completion.candidates) > 1:
                return
        self.take()

    def take(self) -> None:
        """Write the chosen completion, and offer values if a key was completed."""
        completion, chosen = self._completions.completion, self._completions.chosen
        if completion is None or chosen is None:
            return
        row, _ = self.cursor_location
        self._completions.close()
        self.replace(chosen.text, (row, completion.start), (row, completion.end), maintain_selection_offset=False)
        self.move_cursor((row, completion.start + len(chosen.text)))
        if chosen.text.endswith("= "):
            self._offer(asked=True)

    def action_take_if_moved(self) -> None:
        """Take the chosen completion on Enter if the user has moved in the list; otherwise Enter begins a line."""
        if self._completions.completion is None or not self._completions.moved:
            self._completions.close()
            raise SkipAction
        self.take()

    def action_line_or_row(self, lines: int) -> None:
        """Move in the list of completions if it is open, else in the text."""
        if self._completions.completion:
            self._completions.action_move(lines)
        elif lines < 0:
            self.action_cursor_up()
        else:
            self.action_cursor_down()

    def action_leave(self) -> None:
        """Close the list of completions; if it is closed, post `EscapePressed` to the screen."""
        if self._completions.completion:
            self._completions.close()
        else:
            self.post_message(self.EscapePressed())


def _written(text: str, strip: Strip, cell: int, style: Style) -> Strip:
    """`text` in a style, on the background that `strip` has at `cell`."""
    below = next(iter(strip.crop(cell, cell + 1)), Segment(""))
    return Strip([Segment(text, (below.style or Style()) + style)])


def _is_welcome(typed: str, before: str, candidates: Sequence[Candidate]) -> bool:
    """Whether a list opens by itself while `typed` is being written after `before`: for the value of a key at once,
    otherwise from the first letter on; not for a word that is complete."""
    complete_already = any(each.text.strip() == typed or each.name == typed for each in candidates)
    return not complete_already and bool(typed or before.rstrip().endswith("="))
