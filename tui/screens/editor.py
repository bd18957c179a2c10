"""Editor: a profile or recipe as TOML, with completion from the schema and the checker's problems beside their lines.

The file is written only by F2. A text with problems can be saved; a message says so.

Try: `tunedeck`, `3`, Enter on a recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from textual import events
from textual.app import ComposeResult
from textual.containers import Container
from textual.content import Content

from engine.config.files.find import SpecKind
from engine.config.files.text import visible
from engine.config.load import SPEC_TABLES, check_text
from engine.errors import TunedeckError
from tui import keys
from tui.files import user_files
from tui.files.annotated import LABEL, line_problems, problems_below
from tui.keys import Key, bindings
from tui.screens.base import BaseScreen
from tui.toml.area import TomlArea
from tui.toml.completion import key_help
from tui.toml.completion_list import CompletionList
from tui.widgets.text_lines import TextLines

HELP = Key(keys.EVERYWHERE, "f1", "help", "help", "")


@dataclass(frozen=True)
class Draft:
    """A text to edit, and `target`, the path of the file in which it will be saved."""

    kind: SpecKind
    text: str
    target: Path
    exists: bool
    """Whether `target` exists with this text; otherwise saving creates a new file."""


class EditorScreen(BaseScreen):
    """The screen on which a profile or recipe is edited as TOML. Below the text stand the problems of the cursor's
    line, or what its key means."""

    screen_name = "editor"
    AUTO_FOCUS = "TomlArea"
    BINDINGS = bindings("editor")

    def set_argument(self, argument: object) -> None:
        """Take the `Draft` to edit."""
        assert isinstance(argument, Draft)
        self._draft = argument
        self._saved = argument.text if argument.exists else None
        self._problems = line_problems(self._check(argument.text))
        self._warned = False

    def _check(self, text: str) -> list[str]:
        return check_text(self._draft.kind, text, self._draft.target.stem, LABEL)

    def compose_body(self) -> ComposeResult:
        """Yield the text area, the notes below it, and the list of completions, which floats above both."""
        completions = CompletionList()
        with Container(id="draft"):
            yield TomlArea(self._draft.text, SPEC_TABLES[self._draft.kind], completions)
            yield TextLines(id="notes")
        yield completions

    @property
    def area(self) -> TomlArea:
        """The text area in which the draft is edited."""
        return self.query_one(TomlArea)

    def on_mount(self) -> None:
        """Show the problems of the text as it is opened."""
        self.area.show_problems(self._problems)

    def title_detail(self) -> str:
        """The file's name, whether the text is saved, and the number of problems."""
        count = len(self._problems)
        state = f"{count} problem{'s' * (count > 1)}" if count else "no problems"
        unsaved = " (not saved)" if self._dirty else ""
        return visible(f"{self._draft.kind} {self._draft.target.stem}{unsaved}: {state}")

    @property
    def _dirty(self) -> bool:
        return self.area.text != (self._saved if self._saved is not None else self._draft.text)

    def on_text_area_changed(self) -> None:
        """Check the text after every change, and show the problems found."""
        self._problems, self._warned = line_problems(self._check(self.area.text)), False
        self.area.show_problems(self._problems)
        self._show_notes()
        self.refresh_title_and_footer()

    def on_text_area_selection_changed(self) -> None:
        """Explain the line under the cursor."""
        self._show_notes()

    def on_row_list_highlighted(self) -> None:
        """Explain the completion under the cursor of the list."""
        self._show_notes()

    def on_row_list_selected(self) -> None:
        """Take a completion that was clicked."""
        self.area.take()

    def on_resize(self, event: events.Resize) -> None:
        """Wrap the notes at the new width."""
        super().on_resize(event)
        self.query_one(CompletionList).close()
        self.call_after_refresh(self._show_notes)

    def _show_notes(self) -> None:
        box, cursor = self.query_one("#notes", TextLines), self.area.cursor_location[0]
        width, height = box.size
        chosen = self.query_one(CompletionList).chosen
        about = (chosen.allowed, chosen.help) if chosen and chosen.help else self._help_of_line(cursor)
        if about is not None and not (chosen is None and self._has_problem(cursor)):
            text = Content.assemble((about[0], "$info"), f"  {about[1]}")
            box.show(text.wrap(max(16, width))[:height])
        else:
            box.show(problems_below(self._problems, cursor, width, height, ascii_only=self.console.ascii_only))

    def _has_problem(self, row: int) -> bool:
        return any(problem.line == row + 1 for problem in self._problems)

    def _help_of_line(self, row: int) -> tuple[str, str] | None:
        """What the key of a line allows and means; None if the line begins with no key of the schema."""
        lines = self.area.text.splitlines()
        return key_help(SPEC_TABLES[self._draft.kind], lines, row) if row < len(lines) else None

    def key_rows(self) -> list[Key]:
        """The keys of this screen that are not letters: letters are typed into the text."""
        return [*keys.of_screen(self.screen_name), Key(keys.EVERYWHERE, "escape", "back", "back", ""), HELP]

    def disabled_reason(self, action: str) -> str | None:
        """Return why a key has no effect now, or None: the key for the next problem needs a text with problems."""
        return "there are no problems" if action == "next_problem" and not self._problems else None

    def do_complete(self) -> None:
        """Complete the word at the cursor, or list what it can become."""
        self.area.action_complete()

    def do_next_problem(self) -> None:
        """Move the cursor to the next line with a problem; after the last such line, to the first one."""
        here = self.area.cursor_location[0] + 1
        lines = [note.line for note in self._problems]
        self.area.move_cursor((next((line for line in lines if line > here), lines[0]) - 1, 0), center=True)

    def do_save(self) -> None:
        """Save the text to the file, with a newline at its end."""
        text = self.area.text
        text = text if text.endswith("\n") else text + "\n"
        try:
            user_files.write_text(self._draft.target, text, before=self._saved)
        except TunedeckError as error:
            self.show_error(error)
            return
        if text != self.area.text:
            self.area.text = text
        self._saved = text
        count = len(self._problems)
        problems = f", with {count} problem{'s' * (count > 1)}: it cannot be used as it is" if count else ""
        self.refresh_title_and_footer()
        self.show_message(f"saved {visible(str(self._draft.target))}{problems}", "$caution" if count else "")

    def on_toml_area_escape_pressed(self) -> None:
        """Close the editor on Esc; if there are unsaved changes, only on the second Esc."""
        if self._dirty and not self._warned:
            self._warned = True
            self.show_message("not saved; f2 saves, esc again leaves without saving", "$caution")
        else:
            self.console.do_back()
