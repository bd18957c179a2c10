"""Library: every profile and recipe, with its text and what the checker says of it; edit, copy, import, export.

Try: `tunedeck`, then `3`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from textual import events
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.content import Content

from engine.errors import TunedeckError
from engine.spec.files.find import SpecKind
from engine.spec.files.text import visible
from engine.spec.load import check_text
from tui.files import user_files
from tui.files.annotated import LABEL, annotated_lines, below_lines, notes_of
from tui.files.catalog import Entry, profile_entries, read_machine, recipe_entries
from tui.keys import bindings
from tui.screens.base import BaseScreen
from tui.screens.editor import Draft
from tui.widgets.input_prompt import Prompt
from tui.widgets.row_list import Rows
from tui.widgets.text_lines import Lines

TITLES: dict[SpecKind, str] = {"profile": "Profiles", "recipe": "Recipes"}

SUMMARY_LINES = 6
"""Of what is wrong, above the text."""


@dataclass(frozen=True)
class Item:
    """A row of the list: a file, or the heading over those of its kind."""

    kind: SpecKind
    entry: Entry | None = None


class LibraryScreen(BaseScreen):
    """The list of files, and the text of the one under the cursor."""

    where = "library"
    AUTO_FOCUS = "#files"
    BINDINGS = bindings("library")

    def __init__(self) -> None:
        super().__init__()
        self._items: list[Item] = []

    def body(self) -> ComposeResult:
        """The list, the text, and the prompt."""
        with Container(id="library"):
            with Vertical(id="file-pane", classes="pane -front"):
                yield Rows(id="files")
            with Vertical(id="text-pane", classes="pane"):
                yield Lines(classes="heading")
                yield Rows(id="text")
        yield Prompt()

    def on_mount(self) -> None:
        """Look at the machine once."""
        self._machine = read_machine()

    def on_screen_resume(self) -> None:
        """Shown: files may have come or changed."""
        super().on_screen_resume()
        self.call_after_refresh(self._list, "")

    def on_resize(self, event: events.Resize) -> None:
        """Everything is made for a width."""
        super().on_resize(event)
        if self._items:
            self.call_after_refresh(self._show_text)

    def _list(self, stem: str) -> None:
        """Read the folders again, and put the cursor on a file of this name, if one was given."""
        found: dict[SpecKind, list[Entry]] = {"profile": profile_entries(self._machine), "recipe": recipe_entries()}
        self._items = []
        for kind, entries in found.items():
            self._items += [Item(kind), *(Item(kind, entry) for entry in entries)]
        rows = self.query_one("#files", Rows)
        rows.show([self._row(item) for item in self._items])
        if stem or rows.cursor == 0:
            stems = [item.entry.path.stem if item.entry else "" for item in self._items]
            rows.move_to(stems.index(stem) if stem and stem in stems else 1)
        self._show_text()

    def _row(self, item: Item) -> Content:
        entry = item.entry
        if entry is None:
            return Content.styled(f"{TITLES[item.kind]}", "bold $info")
        mark = Content.styled(self.draw("✗ "), "$bad") if entry.broken else Content("  ")
        return Content.assemble(mark, visible(entry.path.stem).ljust(18)[:18], (f" {entry.origin}", "$muted"))

    def _show_text(self) -> None:
        item = self._items[self.query_one("#files", Rows).cursor]
        heading, rows, entry = self.query_one(".heading", Lines), self.query_one("#text", Rows), item.entry
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
        notes = notes_of(check_text(item.kind, text, entry.path.stem, LABEL))
        where = Content.styled(f"{entry.origin}: {visible(str(entry.path))}", "$muted")
        ascii_only = self.console.ascii_only
        lines = annotated_lines(text, notes, rows.size.width, ascii_only=ascii_only)
        rows.show([where, *below_lines(notes, 0, rows.size.width, SUMMARY_LINES, ascii_only=ascii_only), *lines])
        self.refresh_bars()

    @property
    def chosen(self) -> Item:
        """The row under the cursor."""
        return self._items[self.query_one("#files", Rows).cursor]

    def why_not(self, action: str) -> str | None:
        """A heading is no file."""
        if action in ("edit", "use", "new", "pass_on") and (not self._items or self.chosen.entry is None):
            return "choose a profile or a recipe"
        return None

    def on_rows_moved(self, event: Rows.Moved) -> None:
        """Another file."""
        if event.rows.id == "files":
            self.query_one("#text", Rows).move_to(0)
            self._show_text()

    def on_rows_chosen(self) -> None:
        """Enter on a file, or in its text."""
        self.action_press("edit")

    def do_other_pane(self) -> None:
        """From the list to the text and back."""
        on_list = self.query_one("#files", Rows).has_focus
        self.query_one("#file-pane").set_class(not on_list, "-front")
        self.query_one("#text-pane").set_class(on_list, "-front")
        self.set_focus(self.query_one("#text" if on_list else "#files", Rows))
        self.call_after_refresh(self._show_text)

    def _entry(self) -> tuple[SpecKind, Entry]:
        item = self.chosen
        assert item.entry is not None  # why_not has refused headings
        return item.kind, item.entry

    def do_edit(self) -> None:
        """Edit the file, or a copy of it where it is not the user's to change."""
        kind, entry = self._entry()
        shipped = entry.origin in ("shipped", "detected")
        target = user_files.own_folder(kind) / entry.path.name if shipped else entry.path
        self._open(kind, entry.path, target)

    def _open(self, kind: SpecKind, source: Path, target: Path) -> None:
        try:
            text = user_files.read_text(source)
        except TunedeckError as error:
            self.refuse(error)
            return
        if source.stem != target.stem:
            text = text.replace(f'name = "{source.stem}"', f'name = "{target.stem}"', 1)
        self.console.open_screen("editor", Draft(kind, text, target, exists=source == target))

    def do_use(self) -> None:
        """Launch with it."""
        kind, entry = self._entry()
        self.console.open_screen("launch", {kind: entry.text})

    def do_new(self) -> None:
        """A new file from this one."""
        kind, entry = self._entry()
        name = user_files.free_name(kind, entry.path.stem)
        self.query_one(Prompt).ask(f"name of the new {kind}", name, lambda text: self._new(kind, entry, text))

    def _new(self, kind: SpecKind, entry: Entry, name: str) -> None:
        try:
            target = user_files.own_path(kind, name)
        except TunedeckError as error:
            self.refuse(error)
            return
        self._open(kind, entry.path, target)

    def do_take_in(self) -> None:
        """Import a file."""
        self.query_one(Prompt).ask("file to import", "", self._take_in)

    def _take_in(self, text: str) -> None:
        try:
            kind, path = user_files.take_in(text)
        except TunedeckError as error:
            self.refuse(error)
            return
        self._list(path.stem)
        self.say(f"imported the {kind} {path.stem}: {visible(str(path))}")

    def do_pass_on(self) -> None:
        """Export the file."""
        _, entry = self._entry()
        self.query_one(Prompt).ask("export to", entry.path.name, lambda text: self._pass_on(entry, text))

    def _pass_on(self, entry: Entry, text: str) -> None:
        try:
            target, warnings = user_files.pass_on(entry.path, text)
        except TunedeckError as error:
            self.refuse(error)
            return
        said = [f"exported to {visible(str(target))}", *(f"{line}; import will refuse it" for line in warnings)]
        self.say("\n".join(said), "$caution" if warnings else "")
