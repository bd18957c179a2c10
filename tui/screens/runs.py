"""Runs: every run of the runs folder with its state, newest first; filter, open, mark and delete them.

A staged run and a sweep are one row each, which opens to their stages and runs (`tui.run.tree`).

Try: `tunedeck`, then `/` and `state:done`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Input

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.journal.index import TRASH, move_to_trash, newest_in_trash, restore_from_trash
from tui.keys import bindings
from tui.run.listing import RunList
from tui.run.reuse import launch_settings, resume_refusal
from tui.run.table import CHOOSABLE, COLUMNS, chosen_columns, detail_lines, matcher, table_heading
from tui.run.tree import SWEEP, RunTree, TreeRow, tree_row
from tui.screens.confirm import ConfirmScreen
from tui.screens.model_keys import MODEL_ACTIONS, ModelKeys
from tui.screens.run_keys import RUN_ACTIONS, RunKeys
from tui.screens.table import screen_row
from tui.widgets.filter_field import FilterField
from tui.widgets.input_prompt import InputPrompt
from tui.widgets.row_list import RowList, RowsOnDemand
from tui.widgets.text_lines import TextLines

POLL_SECONDS = 1.0
"""Interval at which the folder is read."""

READ_SECONDS = 0.05
"""Most seconds for which one poll reads: less than the time that a key press may wait."""

CATCH_UP_SECONDS = 0.02
"""The interval while there are runs that were not read yet."""


class RunsScreen(ModelKeys, RunKeys):
    """The screen that lists all runs of the runs folder."""

    screen_name = "runs"
    BINDINGS = bindings("runs")

    def __init__(self) -> None:
        super().__init__()
        self._filter = ""
        self._columns = COLUMNS
        self.shown: list[TreeRow] = []
        """The rows: all runs, or those that match the filter."""
        self._marked: dict[Path, RunDirectory] = {}
        """Runs to compare, in the order in which they were marked."""

    def compose_body(self) -> ComposeResult:
        """Yield the filter field (hidden until it is used), the column titles, the rows and the prompt for columns."""
        yield FilterField("words, or state:running model:qwen recipe:demo")
        yield TextLines(classes="heading")
        yield RowList(id="runs")
        yield TextLines(id="details")
        yield InputPrompt()

    def on_mount(self) -> None:
        """Create the list of runs and the tree of rows, for the console's runs folder."""
        self.runs = RunList.of_folder(self.console.runs_dir)
        self._tree = RunTree(self.runs)

    def poll(self) -> float:
        """Read the runs folder for READ_SECONDS and show what was read; returns the seconds until the next reading."""
        self._tree.refresh(seconds=READ_SECONDS)
        self._fill()
        self.tell_scorings()
        return CATCH_UP_SECONDS if self._tree.unread else POLL_SECONDS

    def _fill(self) -> None:
        chosen = self.chosen
        self.shown = self._tree.rows(matcher(self._filter) if self._filter else None)
        rows = self.query_one(RowList)
        width = self.size.width
        self.query_one(".heading", TextLines).show([self._heading(width)])
        there = self.runs.has
        self._marked = {path: run for path, run in self._marked.items() if there(path) or there(path.parent.parent)}
        shown = self.shown  # not to be changed: rows are drawn of it later
        drawn = RowsOnDemand(len(shown), lambda index: self._row(shown[index], width))
        rows.show(drawn if shown else list(self._empty()))
        if chosen is not None:
            self._move_to(chosen.key)
        self._show_details()
        self.refresh_title_and_footer()

    def _heading(self, width: int) -> Content:
        arrow = self.glyphs(" ↓" if self._tree.largest_first else " ↑")
        return table_heading(width, self._columns, sorted_by=self._tree.sorted_by, arrow=arrow)

    def _show_details(self) -> None:
        """Show the full name of the run under the cursor, and what has no column: settings, tags and note, its end."""
        row, details = self.chosen, self.query_one("#details", TextLines)
        lines = detail_lines(row.entry, self.size.width) if row is not None and row.entry else []
        height = max(2, len(lines))
        if details.styles.height is None or details.styles.height.value != height:
            details.styles.height = height
        details.show(lines)

    def _move_to(self, key: str) -> None:
        """Move the cursor to the row with this key, if it is shown."""
        cursor = self.query_one(RowList).cursor
        if cursor < len(self.shown) and self.shown[cursor].key == key:
            return
        keys = [row.key for row in self.shown]
        if key in keys:
            self.query_one(RowList).move_to(keys.index(key))

    def _row(self, row: TreeRow, width: int) -> Content:
        marked = row.directory is not None and row.directory.path in self._marked
        return tree_row(row, width, self.console.ascii_only, columns=self._columns, marked=marked)

    def _empty(self) -> Iterable[Content]:
        if self.runs.read_error:
            yield Content.styled(f"  {self.runs.read_error}", "$bad")
        elif self._filter:
            yield Content.styled(f"  no run matches {self._filter}; esc clears the filter", "$muted")
        else:
            yield Content.styled(f"  no runs in {clean(self.console.runs_dir)}", "$muted")
            yield Content.styled(f"  {screen_row('launch').key} opens Launch, to create and start one", "$muted")

    @property
    def acted_on(self) -> RunDirectory | None:
        """The run under the cursor."""
        return self.chosen.directory if self.chosen is not None else None

    def labels_changed(self) -> None:
        """Read the labels again."""
        self._tree.refresh(seconds=READ_SECONDS)
        self._fill()

    @property
    def chosen(self) -> TreeRow | None:
        """The row under the cursor; None if there are no rows."""
        index = self.query_one(RowList).cursor
        return self.shown[index] if index < len(self.shown) else None

    @property
    def chosen_runs(self) -> list[RunDirectory]:
        """The marked runs, else the one under the cursor."""
        if self._marked:
            return list(self._marked.values())
        row = self.chosen
        return [row.directory] if row is not None and row.directory is not None else []

    def title_detail(self) -> str:
        """The number of marked runs; if none are marked, the number of all runs, and with a filter also how many match
        it."""
        total, shown = len(self.runs.entries), len(self.shown)
        if self._marked:
            return f"{len(self._marked)} marked"
        count = f"{shown} of {total}" if self._filter else str(total)
        column = self._tree.sorted_by
        return f"{count}, by {column.title}" if column is not None else count

    def disabled_reason(self, action: str) -> str | None:
        """Why a key has no effect on the run under the cursor; None if the key has an effect."""
        row = self.chosen
        if row is None and action in ("open", "resume", "delete", "mark", "unfold", "fold", *RUN_ACTIONS):
            return "no run under the cursor"
        if action in MODEL_ACTIONS:
            return self.no_model_reason()
        if action == "compare":
            ready = len(self._marked) >= 2 or (row is not None and row.is_sweep)
            return None if ready else "mark two or more runs with space first"
        return self._reason_on(row, action) if row is not None else None

    def _reason_on(self, row: TreeRow, action: str) -> str | None:
        """Why a key has no effect on this row; None if the key has an effect."""
        if action == "unfold":
            return {None: "nothing to expand", True: "it is already open", False: None}[row.is_open]
        if action == "fold":
            return None if row.is_open or row.parent else "nothing to collapse"
        if row.is_sweep:
            one = "a sweep has several runs; l expands it, c compares them"
            return one if action in ("resume", "clone", "delete", "mark", *RUN_ACTIONS) else None
        if row.entry is None:
            return f"stage {row.name} has not started"
        if action == "delete" and row.parent and not row.parent.startswith(SWEEP):
            return "a stage is deleted with its run"
        status = row.summary.status if row.summary is not None else ""
        if action in RUN_ACTIONS:
            return self.run_action_refusal(action, status)
        if action == "resume":
            return resume_refusal(row.entry.directory, status)
        if action == "delete" and status == "running":
            return "the run is running; stop it first"
        return None

    def on_row_list_selected(self) -> None:
        """Open the run when Enter is pressed."""
        self.action_press("open")

    def on_row_list_highlighted(self) -> None:
        """Show the details of the run under the cursor, and the keys in the footer, which depend on it."""
        self._show_details()
        self.refresh_title_and_footer()

    def do_open(self) -> None:
        """Open the Run screen with the run or stage under the cursor; of a sweep, show or hide the rows of its runs."""
        row = self.chosen
        if row is not None and row.is_sweep:
            self._set_open(row.key, is_open=not row.is_open)
        elif row is not None and row.directory is not None:
            self.console.open_screen("run", row.directory)

    def do_unfold(self) -> None:
        """Show the stages of a staged run, or the runs of a sweep."""
        if self.chosen is not None:
            self._set_open(self.chosen.key, is_open=True)

    def do_fold(self) -> None:
        """Hide the rows below the row under the cursor if they are shown; otherwise hide the rows of its parent."""
        row = self.chosen
        if row is not None:
            self._set_open(row.key if row.is_open else row.parent, is_open=False)

    def _set_open(self, key: str, *, is_open: bool) -> None:
        self._tree.set_open(key, is_open=is_open)
        self._tree.refresh(seconds=READ_SECONDS)
        self._move_to(key)
        self._fill()

    def do_resume(self) -> None:
        """Start an engine that resumes the run under the cursor, and open its Run screen if the engine was started."""
        directory = self.chosen.directory if self.chosen is not None else None
        if directory is not None and self.console.start_engine(directory, resume=True):
            self.do_open()

    def do_clone(self) -> None:
        """Open Launch with the settings of this run, or as it is where there is none."""
        directory = self.chosen.directory if self.chosen is not None else None
        self.console.open_screen("launch", launch_settings(directory) if directory is not None else None)

    def do_mark(self) -> None:
        """Mark or unmark the run under the cursor, and move the cursor to the next run."""
        directory = self.chosen.directory if self.chosen is not None else None
        if directory is not None:
            if self._marked.pop(directory.path, None) is None:
                self._marked[directory.path] = directory
            self.query_one(RowList).action_move(1)
            self._fill()

    def do_compare(self) -> None:
        """Open Compare with the marked runs; if none are marked, with the runs of the sweep under the cursor."""
        members = self.chosen.members if self.chosen is not None else ()
        marked = list(self._marked.values()) or [entry.directory for entry in members]
        self.console.open_screen("compare", marked)

    def do_delete(self) -> None:
        """Ask for confirmation, then move the run under the cursor into the trash folder."""
        directory = self.chosen.directory if self.chosen is not None else None
        if directory is not None:
            question = f"Delete {clean(directory.name)}? It is moved to {TRASH}/ in the runs folder, and u restores it."
            confirm = ConfirmScreen(question, "delete it")
            self.app.push_screen(confirm, lambda yes: self._delete(directory) if yes else None)

    def _delete(self, directory: RunDirectory) -> None:
        try:
            place = move_to_trash(directory)
        except TunedeckError as error:
            self.show_message(error.render().replace("\n", "; "), "bold $bad")
            return
        self.show_message(f"moved to {place}; u restores it")
        self.runs.refresh(seconds=0.0)
        self._fill()

    def do_undo(self) -> None:
        """Move the run that was deleted last out of the trash."""
        place = newest_in_trash(self.console.runs_dir)
        if place is None:
            self.show_message("the trash is empty", "$caution")
            return
        try:
            restored = restore_from_trash(place)
        except TunedeckError as error:
            self.show_error(error)
            return
        self.show_message(f"moved back: {clean(restored.name)}")
        self.runs.refresh(seconds=READ_SECONDS)
        self._fill()
        self._move_to(str(restored))

    def do_sort(self) -> None:
        """Sort by the next column that is shown; after the last one, newest first again."""
        width = self.size.width
        columns = [None, *(each for each in self._columns if each.value is not None and width >= each.from_width)]
        at = columns.index(self._tree.sorted_by) if self._tree.sorted_by in columns else 0
        self._tree.sorted_by, self._tree.largest_first = columns[(at + 1) % len(columns)], False
        self._fill()

    def do_reverse(self) -> None:
        """Turn the order of the rows round."""
        self._tree.largest_first = not self._tree.largest_first
        self._fill()

    def do_columns(self) -> None:
        """Ask which columns to show, in which order."""
        width = self.size.width
        shown = " ".join(column.title for column in self._columns[1:] if width >= column.from_width)
        self.query_one(InputPrompt).ask("columns", shown, self._choose_columns, enter="show", allow_empty=True)
        self.show_message(f"available: {' '.join(column.title for column in CHOOSABLE)}; empty: the default columns")

    def _choose_columns(self, text: str) -> None:
        titles = text.replace(",", " ").split()
        allowed = [column.title for column in CHOOSABLE]
        unknown = next((title for title in titles if title not in allowed), None)
        if unknown is not None:
            self.show_message(f"there is no column {unknown}; available: {', '.join(allowed)}", "$caution")
            return
        self._columns, self._tree.sorted_by = chosen_columns(list(dict.fromkeys(titles))), None
        self._fill()

    def do_filter(self) -> None:
        """Show the filter field and give it the focus."""
        self.query_one(FilterField).open()

    def step_back(self) -> bool:
        """Clear the filter; returns False if there is none."""
        field = self.query_one(FilterField)
        if field.value:
            field.clear_filter()
            return True
        return super().step_back()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the filter at every letter typed."""
        self._filter = event.value
        self._fill()

    def on_filter_field_left(self) -> None:
        """Go back to the rows; the filter continues to apply."""
        self.set_focus(self.query_one(RowList))
