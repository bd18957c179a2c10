"""Runs: every run of the folder with its state, newest first; filter, open.

Try: `tunedeck`, then `/` and `state:done`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from textual import events
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Input

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.journal.trash import TRASH, move_to_trash
from tui.keys import bindings
from tui.run.clone import recipe_of
from tui.run.listing import Entry, RunList
from tui.run.reuse import why_not_resume
from tui.run.table import COLUMNS, heading, matches, row
from tui.screens.base import BaseScreen
from tui.screens.confirm import Question
from tui.screens.table import screen_row
from tui.widgets.key_order import KeysInOrder
from tui.widgets.row_list import Rows
from tui.widgets.text_lines import Lines

LOOK_SECONDS = 1.0
"""Between two looks at the folder."""

SLICE_SECONDS = 0.05
"""How long one look may read: less than what a key press may wait."""

CATCH_UP_SECONDS = 0.02
"""Between two looks while there are runs that were never read."""


class Filter(KeysInOrder, Input):
    """The filter's field."""


class RunsScreen(BaseScreen):
    """The list of runs."""

    where = "runs"
    BINDINGS = bindings("runs")

    def __init__(self) -> None:
        super().__init__()
        self._filter = ""
        self.shown: list[Entry] = []
        """The runs that the filter lets through."""
        self._marked: dict[Path, RunDirectory] = {}
        """Runs to compare, in the order they were marked."""

    def body(self) -> ComposeResult:
        """A filter field (only while it is used), column titles, the rows, and a line for an empty list."""
        field = Filter(placeholder="words, or state:running model:qwen recipe:demo", id="filter", compact=True)
        field.display = False
        yield field
        yield Lines(classes="heading")
        yield Rows(id="runs")

    def on_mount(self) -> None:
        """Begin to look."""
        self.runs = RunList.of_folder(self.console.runs_dir)
        self._look()

    def _look(self) -> None:
        if self.is_current:
            self.runs.refresh(seconds=SLICE_SECONDS)
            self._fill()
        self.set_timer(CATCH_UP_SECONDS if self.runs.unread else LOOK_SECONDS, self._look)

    def _fill(self) -> None:
        chosen = self.chosen
        self.shown = [entry for entry in self.runs.entries if matches(entry, self._filter)]
        rows = self.query_one(Rows)
        width = self.size.width
        self.query_one(".heading", Lines).show([heading(width, COLUMNS)])
        there = {entry.directory.path for entry in self.runs.entries}
        self._marked = {path: run for path, run in self._marked.items() if path in there}
        rows.show([self._row(entry, width) for entry in self.shown] or list(self._empty()))
        places = [entry.directory.path for entry in self.shown]
        if chosen is not None and chosen.directory.path in places:
            rows.move_to(places.index(chosen.directory.path))
        self.refresh_bars()

    def _row(self, entry: Entry, width: int) -> Content:
        return row(entry, width, self.console.ascii_only, marked=entry.directory.path in self._marked)

    def _empty(self) -> Iterable[Content]:
        if self.runs.trouble:
            yield Content.styled(f"  {self.runs.trouble}", "$bad")
        elif self._filter:
            yield Content.styled(f"  no run matches {self._filter}; esc clears the filter", "$muted")
        else:
            yield Content.styled(f"  no runs in {clean(self.console.runs_dir)}", "$muted")
            yield Content.styled(f"  {screen_row('launch').key} opens Launch, where one is made", "$muted")

    @property
    def chosen(self) -> Entry | None:
        """The run under the cursor."""
        index = self.query_one(Rows).cursor
        return self.shown[index] if index < len(self.shown) else None

    def about(self) -> str:
        """How many there are."""
        total, shown = len(self.runs.entries), len(self.shown)
        if self._marked:
            return f"{len(self._marked)} marked"
        return f"{shown} of {total}" if self._filter else str(total)

    def why_not(self, action: str) -> str | None:
        """What the run under the cursor cannot be asked for."""
        entry = self.chosen
        if action in ("open", "resume", "clone", "delete", "mark") and entry is None:
            return "there is no run here"
        if action == "compare" and len(self._marked) < 2:
            return "mark two runs or more with space first"
        status = entry.summary.status if entry is not None and entry.summary is not None else ""
        if action == "resume" and entry is not None:
            return why_not_resume(entry.directory, status)
        if action == "delete" and status == "running":
            return "it runs: stop it first"
        return None

    def on_rows_chosen(self) -> None:
        """Enter on a row."""
        self.action_press("open")

    def on_rows_moved(self) -> None:
        """Other keys may be of use on another run."""
        self.refresh_bars()

    def do_open(self) -> None:
        """Watch the run under the cursor."""
        if self.chosen is not None:
            self.console.open_screen("run", self.chosen.directory)

    def do_resume(self) -> None:
        """Go on with the run under the cursor, and watch it."""
        if self.chosen is not None and self.console.start_engine(self.chosen.directory, resume=True):
            self.do_open()

    def do_clone(self) -> None:
        """Open Launch with what this run was made of."""
        if self.chosen is not None:
            self.console.open_screen("launch", recipe_of(self.chosen.directory))

    def do_mark(self) -> None:
        """Mark the run under the cursor, or take its mark away, and go on to the next."""
        if self.chosen is not None:
            directory = self.chosen.directory
            if self._marked.pop(directory.path, None) is None:
                self._marked[directory.path] = directory
            self.query_one(Rows).action_move(1)
            self._fill()

    def do_compare(self) -> None:
        """The marked runs side by side."""
        self.console.open_screen("compare", list(self._marked.values()))

    def do_delete(self) -> None:
        """Ask, then move the run into the trash."""
        if self.chosen is not None:
            directory = self.chosen.directory
            question = f"Delete {clean(directory.name)}? It goes into {TRASH}/ beside it, and can be taken back."
            self.app.push_screen(Question(question, "delete it"), lambda yes: self._delete(directory) if yes else None)

    def _delete(self, directory: RunDirectory) -> None:
        try:
            place = move_to_trash(directory)
        except TunedeckError as error:
            self.say(error.render().replace("\n", "; "), "bold $bad")
            return
        self.say(f"moved to {place}")
        self.runs.refresh(seconds=0.0)
        self._fill()

    def do_filter(self) -> None:
        """Type a filter."""
        field = self.query_one(Input)
        field.display = True
        self.set_focus(field)

    def on_key(self, event: events.Key) -> None:
        """Escape in the filter empties it and goes back to the rows; down keeps it."""
        field = self.query_one(Input)
        if (field.has_focus and event.key in ("escape", "down")) or (field.value and event.key == "escape"):
            event.stop()
            if event.key == "escape":
                field.value = ""
                field.display = False
            self.set_focus(self.query_one(Rows))

    def on_input_changed(self, event: Input.Changed) -> None:
        """The list follows the typing."""
        self._filter = event.value
        self._fill()

    def on_input_submitted(self) -> None:
        """Keep the filter and go back to the rows."""
        self.set_focus(self.query_one(Rows))
