"""Queue: the running and the waiting runs, in order. Uses the queue and worker of `tunedeck queue`.

A process of its own (`engine.launch.queue_worker`) starts the runs, so leaving the console has no effect.

Try: `tunedeck queue add -p demo -r demo`, then `tunedeck` and the Queue key.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable

from textual.app import ComposeResult
from textual.content import Content

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean, format_number
from engine.journal.index import move_to_trash
from engine.journal.queue import Queue, QueueState
from engine.journal.summary import RunSummary
from engine.launch.queue_worker import start_queue_worker
from tui.keys import bindings
from tui.run.listing import RunEntry, RunList, changed_settings, short_name
from tui.run.table import TableColumn, run_row, table_heading
from tui.screens.base import BaseScreen
from tui.widgets.row_list import RowList
from tui.widgets.text_lines import TextLines

POLL_SECONDS = 1.0
"""Interval at which queue and runs are read."""

READ_SECONDS = 0.05
"""Most seconds for which one poll reads: less than the time that a key press may wait."""


class QueueScreen(BaseScreen):
    """The screen that shows and changes the queue of the runs folder."""

    screen_name = "queue"
    BINDINGS = bindings("queue")

    def __init__(self) -> None:
        super().__init__()
        self._order = QueueState()
        self._read_error = ""
        self._to_remove = ""
        """Name of the run that a second press of the key removes."""
        self._columns = (
            TableColumn("run", 0, 0, lambda entry, _: short_name(entry.directory)),
            TableColumn("place", 5, 0, self._position, right=True),
            TableColumn("step", 13, 70, lambda _, summary: f"{summary.step:,}" if summary.step else "", right=True),
            TableColumn("loss", 8, 80, _loss, right=True),
            TableColumn("changes", 22, 80, lambda _, summary: changed_settings(summary.overrides)),
            TableColumn("profile", 10, 110, lambda _, summary: summary.profile),
            TableColumn("recipe", 14, 120, lambda _, summary: summary.recipe),
            TableColumn("model", 22, 140, lambda _, summary: summary.model),
        )

    def compose_body(self) -> ComposeResult:
        """Yield the column titles, the rows, and a line with the state of the worker process."""
        yield TextLines(classes="heading")
        yield RowList(id="queue")
        yield TextLines(id="worker", classes="heading")

    def on_mount(self) -> None:
        """Create the list of queued runs."""
        self._queue = Queue(self.console.runs_dir)
        self._runs = RunList(self._queued_runs)

    def poll(self) -> float:
        """Read the queue and show it; returns the seconds until the next reading."""
        self._read()
        return POLL_SECONDS

    def _read(self) -> None:
        self._runs.refresh(seconds=READ_SECONDS)
        self._fill()

    def _queued_runs(self) -> list[RunDirectory]:
        """The running run, then the waiting ones in order."""
        try:
            self._order, self._read_error = self._queue.read(), ""
        except TunedeckError as error:
            self._order, self._read_error = QueueState(), error.found
        except OSError as error:
            self._order, self._read_error = QueueState(), f"a waiting run cannot be read: {error.strerror or error}"
        names = [*([self._order.current] if self._is_working else []), *self._order.waiting]
        return [RunDirectory(self.console.runs_dir / str(name)) for name in names]

    @property
    def _is_working(self) -> bool:
        return self._order.worker is not None and self._order.current is not None

    def _position(self, entry: RunEntry, _summary: RunSummary) -> str:
        name = entry.directory.name
        return str(self._order.waiting.index(name) + 1) if name in self._order.waiting else "now"

    def _fill(self) -> None:
        width = self.size.width
        self.query_one(".heading", TextLines).show([table_heading(width, self._columns)])
        lines = [run_row(entry, width, self.console.ascii_only, self._columns) for entry in self._runs.entries]
        self.query_one(RowList).show(lines or list(self._empty()))
        self.query_one("#worker", TextLines).show([Content.styled(self._worker_status(), "$muted")])
        self.refresh_title_and_footer()

    def _empty(self) -> Iterable[Content]:
        if self._read_error:
            yield from Content.styled(clean(self._read_error), "$bad").wrap(self.size.width)
        else:
            yield Content.styled("  the queue is empty; Q on Launch (2) adds a run,", "$muted")
            yield Content.styled("  or use: tunedeck queue add", "$muted")

    def _worker_status(self) -> str:
        if self._order.worker is not None:
            worker = f" process {self._order.worker.pid} starts"
            if left := len(self._order.left_waiting):
                return f"{worker} the runs of a sweep; s lets it also start the {left} others"
            return f"{worker} the runs in order, also without this console"
        return " the queue is not started" + ("; s starts it" if self._order.waiting else "")

    @property
    def chosen(self) -> RunEntry | None:
        """The run under the cursor; None if the queue is empty."""
        entries, index = self._runs.entries, self.query_one(RowList).cursor
        return entries[index] if index < len(entries) else None

    @property
    def _chosen_place(self) -> int | None:
        """The place of the run under the cursor among the waiting runs, counted from 1; None if that run is not
        waiting."""
        chosen = self.chosen
        waits = chosen is not None and chosen.directory.name in self._order.waiting
        return self._order.waiting.index(chosen.directory.name) + 1 if chosen and waits else None

    def title_detail(self) -> str:
        """The number of waiting runs."""
        return f"{len(self._order.waiting)} waiting"

    def disabled_reason(self, action: str) -> str | None:
        """Why a key has no effect: only waiting runs can be moved or removed, and only a stopped queue can be
        started."""
        if action == "start":
            if self._order.worker is not None and not self._order.left_waiting:
                return "the queue is already started"
            return None if self._order.waiting else "no run is waiting"
        if action == "end":
            return None if self._order.worker is not None else "the queue is not started"
        if action == "open":
            return None if self.chosen is not None else "there is no run to open"
        place = self._chosen_place
        if place is None:
            return "this run has started" if self.chosen is not None else "no run is waiting"
        if action == "sooner" and place == 1:
            return "it is already the first of the waiting runs"
        if action == "later" and place == len(self._order.waiting):
            return "it is already the last of the waiting runs"
        return None

    def on_row_list_selected(self) -> None:
        """Open the run when Enter is pressed."""
        self.action_press("open")

    def on_row_list_highlighted(self) -> None:
        """Update the keys in the footer, which depend on the run under the cursor."""
        self._to_remove = ""
        self.refresh_title_and_footer()

    def do_open(self) -> None:
        """Open the Run screen with the run under the cursor."""
        if self.chosen is not None:
            self.console.open_screen("run", self.chosen.directory)

    def do_start(self) -> None:
        """Start the queue's worker process, which starts the waiting runs; a message says whether it was started."""
        try:
            pid = start_queue_worker(self.console.runs_dir)
        except TunedeckError as error:
            self.show_message(f"{error.found}; {error.fix}", "$bad")
        else:
            self.show_message(f"process {pid} starts the waiting runs")

    def do_end(self) -> None:
        """End the worker process, so that no further run is started."""
        if self._order.worker is not None:
            pid = self._order.worker.pid
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                self.show_message("it has already ended")
            except PermissionError:
                self.show_message(f"process {pid} belongs to another user; only they can end it", "$bad")
            else:
                self.show_message("no more runs are started; the current one continues")
        self._read()

    def do_sooner(self) -> None:
        """Move the run under the cursor one place up."""
        self._move(-1)

    def do_later(self) -> None:
        """Move the run under the cursor one place down."""
        self._move(+1)

    def _move(self, places: int) -> None:
        chosen, place = self.chosen, self._chosen_place
        if chosen is None or place is None:
            return
        self._try(lambda: self._queue.move(chosen.directory.name, place + places))
        entries = [entry.directory.path for entry in self._runs.entries]
        if chosen.directory.path in entries:
            self.query_one(RowList).move_to(entries.index(chosen.directory.path))

    def do_remove(self) -> None:
        """Remove the run under the cursor from the queue when the key is pressed a second time."""
        chosen = self.chosen
        if chosen is None:
            return
        name = chosen.directory.name
        if self._to_remove != name:
            self._to_remove = name
            self.show_message(f"x again removes {clean(name)}; its folder goes to the trash", "$caution")
            return
        self._to_remove = ""
        if self._try(lambda: self._queue.remove(name)) and self._try(lambda: move_to_trash(chosen.directory)):
            self.show_message(f"{clean(name)} is in the trash of the runs folder")

    def _try(self, change: Callable[[], object]) -> bool:
        """Call `change`, which changes the queue, then read the queue again. Returns False, and shows the error, if
        `change` raises one."""
        try:
            change()
        except TunedeckError as error:
            self.show_message(f"{clean(error.found)}; {clean(error.fix)}", "$bad")
            return False
        finally:
            self._read()
        return True


def _loss(_entry: RunEntry, summary: RunSummary) -> str:
    return format_number(summary.metrics["train_loss"]) if "train_loss" in summary.metrics else ""
