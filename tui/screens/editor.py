"""Edit a profile or recipe as TOML, with the checker's messages beside the lines they are about, as one types.

Nothing is written before it is asked for; a draft with problems may be saved, and says so.

Try: `tunedeck`, `3`, Enter on a recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.message import Message
from textual.widgets import TextArea

from engine.errors import TunedeckError
from engine.spec.files.find import SpecKind
from engine.spec.files.text import visible
from engine.spec.load import check_text
from tui import keys
from tui.files import user_files
from tui.files.annotated import LABEL, below_lines, beside_lines, notes_of
from tui.keys import Key, bindings
from tui.screens.base import BaseScreen
from tui.widgets.key_order import KeysInOrder
from tui.widgets.text_lines import Lines

HELP = Key(keys.EVERYWHERE, "f1", "help", "help", "")


@dataclass(frozen=True)
class Draft:
    """What is edited: a text that is to become the file `target`."""

    kind: SpecKind
    text: str
    target: Path
    exists: bool
    """Whether the text is that of `target` itself; otherwise saving makes a new file."""


class TomlArea(KeysInOrder, TextArea):
    """The text. Esc leaves it, which the screen may want to talk about."""

    BINDINGS = [Binding("escape", "leave", show=False)]  # noqa: RUF012  # Textual's own declaration

    class Left(Message):
        """Esc was pressed."""

    def action_leave(self) -> None:
        """Tell the screen."""
        self.post_message(self.Left())


class EditorScreen(BaseScreen):
    """The text and its notes."""

    where = "editor"
    AUTO_FOCUS = "TomlArea"
    BINDINGS = bindings("editor")

    def receive(self, argument: object) -> None:
        """The draft."""
        assert isinstance(argument, Draft)
        self._draft = argument
        self._saved = argument.text if argument.exists else None
        self._notes = notes_of(self._problems(argument.text))
        self._warned = False

    def _problems(self, text: str) -> list[str]:
        return check_text(self._draft.kind, text, self._draft.target.stem, LABEL)

    def body(self) -> ComposeResult:
        """Side by side where there is room, else one above the other."""
        with Container(id="draft"):
            yield TomlArea(
                self._draft.text, soft_wrap=False, show_line_numbers=True, tab_behavior="focus", compact=True,
                highlight_cursor_line=True,
            )  # fmt: skip
            yield Lines(id="notes")

    @property
    def area(self) -> TomlArea:
        """The text."""
        return self.query_one(TomlArea)

    def on_mount(self) -> None:
        """The notes scroll with the text."""
        self.watch(self.area, "scroll_y", self._show_notes, init=False)

    def about(self) -> str:
        """Which file, and how it stands."""
        count = len(self._notes)
        state = f"{count} problem{'s' * (count > 1)}" if count else "no problems"
        unsaved = " (not saved)" if self._dirty else ""
        return visible(f"{self._draft.kind} {self._draft.target.stem}{unsaved}: {state}")

    @property
    def _dirty(self) -> bool:
        return self.area.text != (self._saved if self._saved is not None else self._draft.text)

    def on_text_area_changed(self) -> None:
        """Check what is there now."""
        self._notes, self._warned = notes_of(self._problems(self.area.text)), False
        self._show_notes()
        self.refresh_bars()

    def on_text_area_selection_changed(self) -> None:
        """Where there is no room beside the text, the notes begin with the cursor's line."""
        self._show_notes()

    def on_resize(self, event: events.Resize) -> None:
        """Beside or below."""
        super().on_resize(event)
        self.call_after_refresh(self._show_notes)

    def _show_notes(self) -> None:
        box, ascii_only = self.query_one("#notes", Lines), self.console.ascii_only
        width, height = box.size
        if self.has_class("-roomy"):
            box.show(beside_lines(self._notes, round(self.area.scroll_y), width, height, ascii_only=ascii_only))
        else:
            cursor = self.area.cursor_location[0]
            box.show(below_lines(self._notes, cursor, width, height, ascii_only=ascii_only))

    def key_rows(self) -> list[Key]:
        """Letters are text here: of the keys that hold everywhere, those remain that are none."""
        return [*keys.of(self.where), Key(keys.EVERYWHERE, "escape", "back", "back", ""), HELP]

    def why_not(self, action: str) -> str | None:
        """Nothing wrong, nowhere to go."""
        return "nothing is wrong with it" if action == "next_problem" and not self._notes else None

    def do_next_problem(self) -> None:
        """The cursor to the next line with a note, from the top again after the last."""
        here = self.area.cursor_location[0] + 1
        lines = [note.line for note in self._notes]
        self.area.move_cursor((next((line for line in lines if line > here), lines[0]) - 1, 0))

    def do_save(self) -> None:
        """Write the file."""
        text = self.area.text
        text = text if text.endswith("\n") else text + "\n"
        try:
            user_files.write_text(self._draft.target, text, before=self._saved)
        except TunedeckError as error:
            self.refuse(error)
            return
        if text != self.area.text:
            self.area.text = text
        self._saved = text
        count = len(self._notes)
        problems = f", with {count} problem{'s' * (count > 1)}: it cannot be used like this" if count else ""
        self.refresh_bars()
        self.say(f"saved {visible(str(self._draft.target))}{problems}", "$caution" if count else "")

    def on_toml_area_left(self) -> None:
        """Esc: back, unless something would be lost."""
        if self._dirty and not self._warned:
            self._warned = True
            self.say("this is not saved: f2 saves it, esc once more leaves without", "$caution")
        else:
            self.console.do_back()
