"""Queue: what runs now and what waits, in order. The same list and the same keeper as `tunedeck queue`.

The work is done by a process of its own (`engine.launch.queue_worker`): leaving the console changes nothing.

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
from engine.journal.queue import Queue, QueueState
from engine.journal.summary import RunSummary
from engine.journal.trash import move_to_trash
from engine.launch.queue_worker import start_queue_worker
from tui.keys import bindings
from tui.run.listing import Entry, RunList
from tui.run.table import Column, heading, row
from tui.screens.base import BaseScreen
from tui.widgets.row_list import Rows
from tui.widgets.text_lines import Lines

LOOK_SECONDS = 1.0
SLICE_SECONDS = 0.05


class QueueScreen(BaseScreen):
    """The queue of the runs folder."""

    where = "queue"
    BINDINGS = bindings("queue")

    def __init__(self) -> None:
        super().__init__()
        self._order = QueueState()
        self._trouble = ""
        self._doomed = ""
        """The run that the next press of the same key takes out."""
        self._columns = (
            Column("turn", 4, 0, self._turn, right=True),
            Column("run", 0, 0, lambda entry, _: entry.directory.name),
            Column("step", 13, 70, lambda _, summary: f"{summary.step:,}" if summary.step else "", right=True),
            Column("loss", 8, 80, _loss, right=True),
            Column("profile", 10, 90, lambda _, summary: summary.profile),
            Column("recipe", 14, 110, lambda _, summary: summary.recipe),
            Column("model", 22, 130, lambda _, summary: summary.model),
        )

    def body(self) -> ComposeResult:
        """Column titles, the rows, and a line on who works on them."""
        yield Lines(classes="heading")
        yield Rows(id="queue")
        yield Lines(id="keeper", classes="heading")

    def on_mount(self) -> None:
        """Begin to look."""
        self._queue = Queue(self.console.runs_dir)
        self._runs = RunList(self._in_order)
        self._look()

    def on_screen_resume(self) -> None:
        """Shown again: look at once."""
        super().on_screen_resume()
        self._read()

    def _look(self) -> None:
        if self.is_current:
            self._read()
        self.set_timer(LOOK_SECONDS, self._look)

    def _read(self) -> None:
        self._runs.refresh(seconds=SLICE_SECONDS)
        self._fill()

    def _in_order(self) -> list[RunDirectory]:
        """The present run, then those that wait."""
        try:
            self._order, self._trouble = self._queue.look(), ""
        except TunedeckError as error:
            self._order, self._trouble = QueueState(), error.found
        except OSError as error:
            self._order, self._trouble = QueueState(), f"a run that waits cannot be read: {error.strerror or error}"
        names = [*([self._order.current] if self._at_work else []), *self._order.waiting]
        return [RunDirectory(self.console.runs_dir / str(name)) for name in names]

    @property
    def _at_work(self) -> bool:
        return self._order.keeper is not None and self._order.current is not None

    def _turn(self, entry: Entry, _summary: RunSummary) -> str:
        name = entry.directory.name
        return str(self._order.waiting.index(name) + 1) if name in self._order.waiting else "now"

    def _fill(self) -> None:
        width = self.size.width
        self.query_one(".heading", Lines).show([heading(width, self._columns)])
        lines = [row(entry, width, self.console.ascii_only, self._columns) for entry in self._runs.entries]
        self.query_one(Rows).show(lines or list(self._empty()))
        self.query_one("#keeper", Lines).show([Content.styled(self._state(), "$muted")])
        self.refresh_bars()

    def _empty(self) -> Iterable[Content]:
        if self._trouble:
            yield from Content.styled(clean(self._trouble), "$bad").wrap(self.size.width)
        else:
            yield Content.styled("  nothing waits; add a run from Launch, or with: tunedeck queue add", "$muted")

    def _state(self) -> str:
        if self._order.keeper is not None:
            return f" process {self._order.keeper.pid} works on the queue, also without this console"
        return " nobody works on the queue" + ("; s starts it" if self._order.waiting else "")

    @property
    def chosen(self) -> Entry | None:
        """The run under the cursor."""
        entries, index = self._runs.entries, self.query_one(Rows).cursor
        return entries[index] if index < len(entries) else None

    @property
    def _chosen_place(self) -> int | None:
        """Place of the run under the cursor among those that wait, from 1; None for the present run."""
        chosen = self.chosen
        waits = chosen is not None and chosen.directory.name in self._order.waiting
        return self._order.waiting.index(chosen.directory.name) + 1 if chosen and waits else None

    def about(self) -> str:
        """How many wait."""
        return f"{len(self._order.waiting)} wait"

    def why_not(self, action: str) -> str | None:
        """Moving and removing are for runs that wait; starting for a queue that rests."""
        if action == "start":
            if self._order.keeper is not None:
                return "the queue is being worked on already"
            return None if self._order.waiting else "nothing waits"
        if action == "end":
            return None if self._order.keeper is not None else "nobody works on the queue"
        if action == "open":
            return None if self.chosen is not None else "there is no run to open"
        place = self._chosen_place
        if place is None:
            return "this run has begun" if self.chosen is not None else "nothing waits"
        if action == "sooner" and place == 1:
            return "it is the next already"
        if action == "later" and place == len(self._order.waiting):
            return "it is the last already"
        return None

    def on_rows_chosen(self) -> None:
        """Enter on a row."""
        self.action_press("open")

    def on_rows_moved(self) -> None:
        """Other keys apply to another run."""
        self._doomed = ""
        self.refresh_bars()

    def do_open(self) -> None:
        """Watch the run under the cursor."""
        if self.chosen is not None:
            self.console.open_screen("run", self.chosen.directory)

    def do_start(self) -> None:
        """Work on the queue."""
        try:
            pid = start_queue_worker(self.console.runs_dir)
        except TunedeckError as error:
            self.say(f"{error.found}; {error.fix}", "$bad")
        else:
            self.say(f"process {pid} begins with the first run")

    def do_end(self) -> None:
        """Start no further run."""
        if self._order.keeper is not None:
            try:
                os.kill(self._order.keeper.pid, signal.SIGTERM)
            except ProcessLookupError:
                self.say("it has ended by itself")
            except PermissionError:
                self.say(f"process {self._order.keeper.pid} belongs to someone else, who alone can end it", "$bad")
            else:
                self.say("no further run is started; the present one goes on")
        self._read()

    def do_sooner(self) -> None:
        """One place up."""
        self._move(-1)

    def do_later(self) -> None:
        """One place down."""
        self._move(+1)

    def _move(self, places: int) -> None:
        chosen, place = self.chosen, self._chosen_place
        if chosen is None or place is None:
            return
        self._try(lambda: self._queue.move(chosen.directory.name, place + places))
        entries = [entry.directory.path for entry in self._runs.entries]
        if chosen.directory.path in entries:
            self.query_one(Rows).move_to(entries.index(chosen.directory.path))

    def do_remove(self) -> None:
        """Take a run out, on the second press."""
        chosen = self.chosen
        if chosen is None:
            return
        name = chosen.directory.name
        if self._doomed != name:
            self._doomed = name
            self.say(f"once more takes {clean(name)} out; its folder goes to the trash", "$caution")
            return
        self._doomed = ""
        if self._try(lambda: self._queue.remove(name)) and self._try(lambda: move_to_trash(chosen.directory)):
            self.say(f"{clean(name)} is in the trash of the runs folder")

    def _try(self, change: Callable[[], object]) -> bool:
        """Make a change and look again; what speaks against it is said."""
        try:
            change()
        except TunedeckError as error:
            self.say(f"{clean(error.found)}; {clean(error.fix)}", "$bad")
            return False
        finally:
            self._read()
        return True


def _loss(_entry: Entry, summary: RunSummary) -> str:
    return format_number(summary.metrics["train_loss"]) if "train_loss" in summary.metrics else ""
