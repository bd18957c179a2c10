"""Runs: every run of the folder with its state, newest first; filter, open.

Try: `tunedeck`, then `/` and `state:done`.
"""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Input

from tui.keys import bindings
from tui.run_list import Entry, RunList
from tui.run_rows import COLUMNS, heading, matches, row
from tui.screens.base import BaseScreen
from tui.widgets.lines import Lines
from tui.widgets.rows import Rows

LOOK_SECONDS = 1.0
"""Between two looks at the folder."""

SLICE_SECONDS = 0.05
"""How long one look may read: less than what a key press may wait."""

CATCH_UP_SECONDS = 0.08
"""Between two looks while there are runs that were never read."""


class RunsScreen(BaseScreen):
    """The list of runs."""

    where = "runs"
    BINDINGS = bindings("runs")

    def __init__(self) -> None:
        super().__init__()
        self._filter = ""
        self._shown: list[Entry] = []

    def body(self) -> ComposeResult:
        """A filter field (only while it is used), column titles, the rows, and a line for an empty list."""
        field = Input(placeholder="words, or state:running model:qwen recipe:demo", id="filter", compact=True)
        field.display = False
        yield field
        yield Lines(classes="heading")
        yield Rows(id="runs")

    def on_mount(self) -> None:
        """Begin to look."""
        self._runs = RunList.of_folder(self.console.runs_dir)
        self._look()

    def _look(self) -> None:
        if self.is_current:
            self._runs.refresh(seconds=SLICE_SECONDS)
            self._fill()
        self.set_timer(CATCH_UP_SECONDS if self._runs.unread else LOOK_SECONDS, self._look)

    def _fill(self) -> None:
        chosen = self.chosen
        self._shown = [entry for entry in self._runs.entries if matches(entry, self._filter)]
        rows = self.query_one(Rows)
        width = self.size.width
        self.query_one(".heading", Lines).show([heading(width, COLUMNS)])
        rows.show([row(entry, width, self.console.ascii_only) for entry in self._shown] or list(self._empty()))
        places = [entry.directory.path for entry in self._shown]
        if chosen is not None and chosen.directory.path in places:
            rows.move_to(places.index(chosen.directory.path))
        self.refresh_bars()

    def _empty(self) -> Iterable[Content]:
        if self._runs.trouble:
            yield Content.styled(f"  {self._runs.trouble}", "$bad")
        elif self._filter:
            yield Content.styled(f"  no run matches {self._filter}; esc clears the filter", "$muted")
        else:
            yield Content.styled(f"  no runs in {self.console.runs_dir}", "$muted")

    @property
    def chosen(self) -> Entry | None:
        """The run under the cursor."""
        index = self.query_one(Rows).cursor
        return self._shown[index] if index < len(self._shown) else None

    def about(self) -> str:
        """How many there are."""
        total, shown = len(self._runs.entries), len(self._shown)
        return f"{shown} of {total}" if self._filter else str(total)

    def why_not(self, action: str) -> str | None:
        """Nothing to open where nothing is listed."""
        if action == "open" and self.chosen is None:
            return "there is no run to open"
        return None

    def on_rows_chosen(self) -> None:
        """Enter on a row."""
        self.action_press("open")

    def do_open(self) -> None:
        """Watch the run under the cursor."""

    def do_filter(self) -> None:
        """Type a filter."""
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """The list follows the typing."""
        self._filter = event.value
        self._fill()

    def on_input_submitted(self) -> None:
        """Keep the filter and go back to the rows."""
        self.query_one(Rows).focus()
