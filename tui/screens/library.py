"""Library: every profile and recipe with its text and its problems; edit, copy, import and export them.

Try: `tunedeck`, then `3`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import tomli
from textual import events
from textual.app import ComposeResult, SuspendNotSupported
from textual.containers import Container, Vertical
from textual.content import Content

from engine.config.files.find import SpecKind, own_folder
from engine.config.files.text import visible
from engine.config.load import check_text
from engine.errors import TunedeckError
from tui.chat.choices import ChatTargets
from tui.files import user_files
from tui.files.annotated import LABEL, annotated_text, line_problems, problems_below
from tui.files.catalog import FileEntry, profile_entries, read_machine, recipe_entries, write_detected_profile
from tui.keys import bindings
from tui.screens.base import BaseScreen
from tui.screens.editor import Draft
from tui.widgets.input_prompt import InputPrompt
from tui.widgets.row_list import RowList
from tui.widgets.text_lines import TextLines

TITLES: dict[SpecKind, str] = {"profile": "Profiles", "recipe": "Recipes"}

NAME_WIDTH = 22
"""Cells of a file's name in the list: the longest of a shipped file."""

MAX_PROBLEM_LINES = 6
"""Lines of problems above the text."""


@dataclass(frozen=True)
class Item:
    """A row of the list: a file; or, if `entry` is None, the heading above the profiles or the recipes."""

    kind: SpecKind
    entry: FileEntry | None = None


class LibraryScreen(BaseScreen):
    """The screen with a list of all profiles and recipes, and the text of the file under the cursor."""

    screen_name = "library"
    AUTO_FOCUS = "#files"
    BINDINGS = bindings("library")

    def __init__(self) -> None:
        super().__init__()
        self._items: list[Item] = []

    def compose_body(self) -> ComposeResult:
        """Yield the list, the text and the prompt for names and paths."""
        with Container(id="library"):
            with Vertical(id="file-pane", classes="pane -front"):
                yield RowList(id="files")
            with Vertical(id="text-pane", classes="pane"):
                yield TextLines(classes="heading")
                yield RowList(id="text")
        yield InputPrompt()

    def on_mount(self) -> None:
        """Detect this machine's devices."""
        self._machine = read_machine()
        write_detected_profile(self._machine)  # where that is impossible, reading the file says so

    def on_screen_resume(self) -> None:
        """Read the folders again, since files may have changed."""
        super().on_screen_resume()
        self.call_after_refresh(self._list, "")

    def on_resize(self, event: events.Resize) -> None:
        """Format the text for the new width."""
        super().on_resize(event)
        if self._items:
            self.call_after_refresh(self._show_text)

    def repaint_panes(self) -> None:
        """Format the text for the width that it has now."""
        self._show_text()

    def _list(self, stem: str) -> None:
        """Read the folders of profiles and recipes again, and move the cursor to the file named `stem`; with an empty
        `stem` the cursor stays in its row."""
        found: dict[SpecKind, list[FileEntry]] = {"profile": profile_entries(self._machine), "recipe": recipe_entries()}
        self._items = []
        for kind, entries in found.items():
            self._items += [Item(kind), *(Item(kind, entry) for entry in entries)]
        rows = self.query_one("#files", RowList)
        rows.show([self._row(item) for item in self._items])
        if stem or rows.cursor == 0:
            stems = [item.entry.path.stem if item.entry else "" for item in self._items]
            rows.move_to(stems.index(stem) if stem and stem in stems else 1)
        self._show_text()

    def _row(self, item: Item) -> Content:
        entry = item.entry
        if entry is None:
            return Content.styled(f"{TITLES[item.kind]}", "bold $info")
        mark = Content.styled(self.glyphs("✗ "), "$bad") if entry.broken else Content("  ")
        name = Content(visible(entry.path.stem))
        cut = name.truncate(NAME_WIDTH, ellipsis=True) if name.cell_length > NAME_WIDTH else name
        return Content.assemble(mark, cut.pad_right(NAME_WIDTH - cut.cell_length), (f" {entry.origin}", "$muted"))

    def _show_text(self) -> None:
        item = self._items[self.query_one("#files", RowList).cursor]
        heading, rows, entry = self.query_one(".heading", TextLines), self.query_one("#text", RowList), item.entry
        if entry is None:
            heading.show([])
            rows.show([Content.styled(f"  {TITLES[item.kind]}: choose one below", "$muted")])
            return
        heading.show([Content.assemble((visible(entry.path.stem), "bold"), f"  {visible(entry.title)}")])
        try:
            text = user_files.read_text(entry.path)
        except TunedeckError as error:
            rows.show([Content.styled(visible(line), "$bad") for line in error.render().splitlines()])
            return
        problems = line_problems(check_text(item.kind, text, entry.path.stem, LABEL))
        origin = Content.styled(f"{entry.origin}: {visible(str(entry.path))}", "$muted")
        width, ascii_only = rows.size.width, self.console.ascii_only
        summary = problems_below(problems, 0, width, MAX_PROBLEM_LINES, ascii_only=ascii_only)
        rows.show([origin, *summary, *annotated_text(text, problems, width, ascii_only=ascii_only)])
        self.refresh_title_and_footer()

    @property
    def chosen(self) -> Item:
        """The row under the cursor: a file, or a heading."""
        return self._items[self.query_one("#files", RowList).cursor]

    def disabled_reason(self, action: str) -> str | None:
        """Why a key has no effect: keys that need a file are disabled while the cursor is on a heading."""
        if action in ("edit", "use", "new", "export_file", "external_editor", "copy_path") and (
            not self._items or self.chosen.entry is None
        ):
            return "choose a profile or a recipe"
        if action == "chat" and not (self._items and self.chosen.entry is not None and self.chosen.kind == "recipe"):
            return "choose a recipe to chat with its model"
        return None

    def on_row_list_highlighted(self, event: RowList.Highlighted) -> None:
        """Show the file under the cursor."""
        if event.rows.id == "files":
            self.query_one("#text", RowList).move_to(0)
            self._show_text()

    def on_row_list_selected(self) -> None:
        """Edit the file when Enter is pressed in the list or in the text."""
        self.action_press("edit")

    def do_other_pane(self) -> None:
        """Move the focus from the list to the text, or back."""
        on_list = self.query_one("#files", RowList).has_focus
        self.query_one("#file-pane").set_class(not on_list, "-front")
        self.query_one("#text-pane").set_class(on_list, "-front")
        self.set_focus(self.query_one("#text" if on_list else "#files", RowList))
        self.call_after_refresh(self._show_text)

    def _entry(self) -> tuple[SpecKind, FileEntry]:
        item = self.chosen
        assert item.entry is not None  # disabled_reason has refused headings
        return item.kind, item.entry

    def do_edit(self) -> None:
        """Edit the file; for a shipped or detected file, edit a copy in the user's folder."""
        kind, entry = self._entry()
        shipped = entry.origin in ("shipped", "detected")
        target = own_folder(kind) / entry.path.name if shipped else entry.path
        self._open(kind, entry.path, target)

    def do_external_editor(self) -> None:
        """Edit the file in the program that $VISUAL or $EDITOR names, which has the terminal meanwhile; a shipped file
        is first copied into the user's folder."""
        kind, entry = self._entry()
        words = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
        if not words:
            self.show_message("neither $VISUAL nor $EDITOR names a program; enter edits here", "$caution")
            return
        try:
            path = self._own_copy(kind, entry)
            with self.app.suspend():
                code = subprocess.run([*words, str(path)], check=False).returncode
        except TunedeckError as error:
            self.show_error(error)
        except (OSError, SuspendNotSupported) as error:
            self.show_message(f"{words[0]} cannot be started: {error}", "$bad")
        else:
            self._list(path.stem)
            self.show_message(f"{words[0]} ended with exit code {code}" if code else f"edited {visible(str(path))}")

    @staticmethod
    def _own_copy(kind: SpecKind, entry: FileEntry) -> Path:
        """The path of a file that may be changed: of a shipped or detected one a copy in the user's folder, made now if
        there is none."""
        if entry.origin not in ("shipped", "detected"):
            return entry.path
        target = own_folder(kind) / entry.path.name
        if not target.exists():
            user_files.write_text(target, user_files.read_text(entry.path), before=None)
        return target

    def do_copy_path(self) -> None:
        """Copy the path of the file to the terminal's clipboard."""
        _, entry = self._entry()
        self.app.copy_to_clipboard(str(entry.path))
        self.show_message(f"copied {visible(str(entry.path))}")

    def _open(self, kind: SpecKind, source: Path, target: Path) -> None:
        try:
            text = user_files.read_text(source)
        except TunedeckError as error:
            self.show_error(error)
            return
        if source.stem != target.stem:
            text = text.replace(f'name = "{source.stem}"', f'name = "{target.stem}"', 1)
        self.console.open_screen("editor", Draft(kind, text, target, exists=source == target))

    def do_chat(self) -> None:
        """Open the Chat screen with the model of this recipe."""
        _, entry = self._entry()
        try:
            recipe = tomli.loads(user_files.read_text(entry.path))
            model = recipe["model"]["id"]
        except (TunedeckError, ValueError, KeyError, TypeError) as error:
            self.show_message(f"its model cannot be read: {error}", "bold $bad")
            return
        self.console.open_screen("chat", ChatTargets((str(model),), recipe=str(entry.path.absolute())))

    def do_use(self) -> None:
        """Open Launch with this file chosen."""
        kind, entry = self._entry()
        self.console.open_screen("launch", {kind: entry.argument})

    def do_new(self) -> None:
        """Ask for a name, and edit a copy of this file under that name."""
        kind, entry = self._entry()
        name = user_files.unused_name(kind, entry.path.stem)
        self.query_one(InputPrompt).ask(
            f"name of the new {kind}", name, lambda text: self._new(kind, entry, text), enter="write"
        )

    def _new(self, kind: SpecKind, entry: FileEntry, name: str) -> None:
        try:
            target = user_files.new_file_path(kind, name)
        except TunedeckError as error:
            self.show_error(error)
            return
        self._open(kind, entry.path, target)

    def do_import_file(self) -> None:
        """Ask for the path of a file, check the file, and copy it to the user's profiles or recipes."""
        self.query_one(InputPrompt).ask("file to import", "", self._import, enter="import")

    def _import(self, text: str) -> None:
        try:
            kind, path = user_files.import_user_file(text)
        except TunedeckError as error:
            self.show_error(error)
            return
        self._list(path.stem)
        self.show_message(f"imported the {kind} {path.stem}: {visible(str(path))}")

    def do_export_file(self) -> None:
        """Ask for a file or folder, and write a copy of this file there."""
        _, entry = self._entry()
        self.query_one(InputPrompt).ask(
            "export to", entry.path.name, lambda text: self._export(entry, text), enter="write"
        )

    def _export(self, entry: FileEntry, text: str) -> None:
        try:
            target, warnings = user_files.export_user_file(entry.path, text)
        except TunedeckError as error:
            self.show_error(error)
            return
        lines = [f"exported to {visible(str(target))}", *(f"{line}; it cannot be imported" for line in warnings)]
        self.show_message("\n".join(lines), "$caution" if warnings else "")
