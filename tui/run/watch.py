"""Follow one run for the Run screen: read what was added to its journal, and keep what the screen shows.

`read_more` reads for a bounded time and goes on where it stopped, so a run of a million steps opens at once and its
curve fills in. Memory is bounded: of steps, only the curve and the latest ones are kept. Nothing here draws or writes,
and no state of the run directory (incomplete, damaged, unreadable, gone) raises an error.

Try: `watch = RunWatch(resolve_run("last", None)); watch.read_more(seconds=1.0)`
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.evaluations import Evaluation, read_evaluations
from engine.journal.event_text import clean, describe_event, on_one_line
from engine.journal.events import Event, EventTail, decode_event, end_of_events
from engine.journal.journal_state import JournalState
from engine.journal.summary import (
    KIND_WITHIN_BYTES,
    LINES_PER_CLOCK_CHECK,
    QUIET_LINE,
    STEP_MARK,
    RunSummary,
    decode_step,
    summarise_state,
)
from tui.plot.series import BoundedSeries
from tui.run.gpus import GpuHistory
from tui.run.table import ASKED_FOR

STEP = re.compile(rb'"step":(\d{1,18}),"epoch":[^,]*,"loss":([^,]{1,40}),.*?"peak_bytes":(\d{1,18})[,}]')
"""Step, loss and peak in a step's line as the engine writes it. Any other line is parsed as JSON, which is slower."""

PEEK_BYTES = 64 * 1024
"""How much of a long journal's end is read first, for the latest step."""

GPU_MARK = b'"kind":"gpu"'
FEED_LINES = 1000
"""Number of newest events stored for the events pane. All events are in events.jsonl."""

PACE_STEPS = 50
"""Number of latest steps whose mean duration the time estimate uses: enough for a steady estimate, few enough
to reflect a backoff soon."""


class FeedLine(NamedTuple):
    """One event as shown in the events pane."""

    time: str
    kind: str
    text: str


@dataclass
class Curves:
    """The steps read so far: the loss of all steps, and the complete events of the latest steps."""

    loss: BoundedSeries = field(default_factory=BoundedSeries)
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    """The complete events of the latest steps."""


MOST_SAMPLES = 200
"""Evaluations during training whose answers are kept, to be looked at one after another."""


class RunWatch:
    """Follows one run: reads its journal bit by bit and keeps the state, curve and events that the Run screen shows."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.state = JournalState()
        self.curves = Curves()
        self.feed: deque[FeedLine] = deque(maxlen=FEED_LINES)
        self.checkpoint_steps: list[int] = []
        """Steps after which a checkpoint was written, including checkpoints deleted since."""
        self.feed_total = 0
        """Number of events that were ever added to the feed."""
        self.gpu_readings: dict[int, Event] = {}
        """The latest reading of each device."""
        self.gpus = GpuHistory()
        """The readings of each device over the last minutes."""
        self.summary: RunSummary | None = None
        self.read_error = ""
        """Why the run cannot be read right now; the data read before are still shown."""
        self.version = 0
        """Incremented whenever something changed."""
        self.evaluations: list[Evaluation] = []
        """Scores of the run's checkpoints by `tunedeck eval`."""
        self._scored_stamp = (-1, -1)
        self._tail = EventTail(directory.events)
        self._damaged = 0
        self._peeked_to = 0
        """Where a long journal ended at the first look, in bytes. Once it is read up to there, the two below are of the
        past, though more is written all the time."""
        self._peeked: Event | None = None
        self._end: JournalState | None = None
        """The state after a long journal's last events alone: how the run ended, before the journal is read."""

    def read_more(self, *, seconds: float) -> bool:
        """Read new lines of the journal for about `seconds`; returns whether anything changed."""
        summary: RunSummary | None
        try:
            if not self.version:
                self._peek()
            news = self._read(time.monotonic() + seconds)
            if self._tail.offset >= self._peeked_to:
                self._peeked = self._end = None
            summary = summarise_state(self.directory, self.state, self._damaged, end=self._end)
            read_error = (
                "" if self.directory.exists() else (f"the run's folder was removed: {clean(self.directory.path)}")
            )
        except TunedeckError as error:
            news, summary, read_error = True, self.summary, clean(error.found)
        except OSError as error:
            news, summary, read_error = True, self.summary, clean(f"cannot be read: {error.strerror or error}")
        # If the folder no longer exists, the last summary is still shown: a new one would be empty.
        summary = self.summary if read_error and self.summary is not None else summary
        news = self._read_evaluations() or news
        changed = bool(news) or (summary, read_error) != (self.summary, self.read_error)
        self.summary, self.read_error = summary, read_error
        self.version += changed
        return changed

    @property
    def unread_share(self) -> float:
        """The share of the journal that has not been read yet."""
        try:
            size = os.stat(self.directory.events).st_size
        except OSError:
            return 0.0
        return max(0.0, 1.0 - self._tail.offset / size) if size else 0.0

    @property
    def latest(self) -> Event | None:
        """The event of the newest step, even if the journal before it has not been read yet."""
        return self._peeked or self.state.last_step

    @property
    def step(self) -> int:
        """The number of the last completed step; 0 before the first."""
        return int(self.latest["step"]) if self.latest is not None else self.state.step

    def seconds_left(self) -> float | None:
        """Estimated time until the run ends, from the mean of recent steps; None if the number of steps is unknown."""
        recent = (event.get("step_seconds") for event in self.curves.recent)
        steps = [float(seconds) for seconds in recent if seconds is not None]
        if not self.state.max_steps or not steps:
            return None
        return max(0, self.state.max_steps - self.step) * sum(steps) / len(steps)

    def _peek(self) -> None:
        """Read the last events of a long journal before everything else, since reading a million steps takes two
        seconds."""
        end = end_of_events(self.directory.events)
        if end > PEEK_BYTES:
            self._end = JournalState(running={})  # it began before these events
            for event in EventTail(self.directory.events, offset=end - PEEK_BYTES).poll():
                self._end.fold(event)
            self._peeked, self._peeked_to = self._end.last_step, end

    def _read_evaluations(self) -> bool:
        """Read the run's evaluations if their file has changed; returns whether it has."""
        try:
            found = os.stat(self.directory.evaluations)
        except OSError:
            return False
        stamp = found.st_size, found.st_mtime_ns
        if stamp == self._scored_stamp:
            return False
        self._scored_stamp, self.evaluations = stamp, read_evaluations(self.directory)
        return True

    def _read(self, deadline: float) -> bool:
        batch = _StepBatch()
        count = 0
        for line in self._tail.lines():
            count += 1
            if line.find(STEP_MARK, 0, KIND_WITHIN_BYTES) >= 0:
                if not batch.take(line):
                    self._damaged += 1
            elif not QUIET_LINE.search(line, 0, KIND_WITHIN_BYTES):
                self._fold(batch)
                batch = _StepBatch()
                self._read_event(line)
            elif GPU_MARK in line:
                self._read_gpu(decode_event(line))
            if count % LINES_PER_CLOCK_CHECK == 0 and time.monotonic() > deadline:
                break
        self._fold(batch)
        return count > 0

    def _fold(self, batch: _StepBatch) -> None:
        """Add a batch of steps to the loss curve and to the latest steps, and update the run's state with the first and
        the last step of the batch."""
        latest = [event for event in map(decode_step, batch.latest) if event is not None]
        self._damaged += len(batch.latest) - len(latest)
        if not latest:
            return
        self.curves.loss.extend(batch.steps, batch.losses)
        self.curves.recent.extend(latest)
        self.state.peak_bytes = max(self.state.peak_bytes, batch.peak_bytes)
        self.state.fold_steps(decode_step(batch.first), latest[-1])

    def _read_event(self, line: bytes) -> None:
        """Process a journal line that is not the event of a step or that could not be parsed as one."""
        event = decode_event(line)
        if event is None:
            self._damaged += 1
            return
        text = self._apply(event, line)
        if text is not None:
            self.feed_total += 1
            self.feed.append(FeedLine(str(event.get("time", "")), str(event["kind"]), text))

    def _apply(self, event: Event, line: bytes) -> str | None:
        """Update the state with an event; returns the event's text for the events pane, None if it has no text."""
        if event["kind"] == "step":
            batch = _StepBatch()
            batch.take(line)
            self._fold(batch)
            return None
        text = _event_text(event)
        if event["kind"] == "eval":
            self._forget_old_samples()
        stage = self.state.stage
        self.state.fold(event)
        if event["kind"] == "run_started":
            self.gpus.clear()  # the readings of an engine that ended lie hours back
        if self.state.stage != stage or event.get("from_start"):
            self.curves, self.checkpoint_steps = Curves(), []  # steps count from 1 again in each stage
        if event["kind"] == "resumed":
            self.curves.loss.cut_after(float(event["step"]))
            self.curves.recent.clear()
            self.checkpoint_steps = [step for step in self.checkpoint_steps if step <= int(event["step"])]
        if event["kind"] == "checkpoint_saved":
            self.checkpoint_steps.append(int(event["step"]))
        return text

    def _forget_old_samples(self) -> None:
        """Keep the answers of the newest evaluations alone."""
        for old in self.state.evals[:-MOST_SAMPLES]:
            old.pop("samples", None)

    def _read_gpu(self, event: Event | None) -> None:
        if event is not None and isinstance(event.get("index"), int):
            self.gpu_readings[event["index"]] = event
            self.gpus.add(event)


class _StepBatch:
    """Consecutive step events of a journal: step and loss of all of them for the curve, and the complete lines of the
    latest."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.losses: list[float | None] = []
        self.latest: deque[bytes] = deque(maxlen=PACE_STEPS)
        self.first = b""
        self.peak_bytes = 0

    def take(self, line: bytes) -> bool:
        """Add one journal line; returns False, adding nothing, if it is not the event of a step."""
        found = STEP.search(line)
        try:
            step, loss, peak = found.groups() if found else _parsed(line)
            point = float(step), None if loss == b"null" else float(loss), int(peak)
            if point[1] is not None and not math.isfinite(point[1]):
                return False  # no JSON: the engine writes null
        except ValueError:
            return False
        self.steps.append(point[0])
        self.losses.append(point[1])
        self.peak_bytes = max(self.peak_bytes, point[2])
        self.first = self.first or line
        self.latest.append(line)
        return True


def _parsed(line: bytes) -> tuple[Any, Any, Any]:
    """Return (step, loss, peak bytes) of a journal line in another form than STEP matches, parsed as JSON; the loss is
    b"null" if it is no number. Raises ValueError for a line that is no steps's event."""
    event = decode_step(line)
    if event is None:
        raise ValueError("no steps")
    return event["step"], b"null" if event["loss"] is None else event["loss"], event["peak_bytes"] or 0


def _event_text(event: Event) -> str | None:
    """The text of an event in the events pane; None for an event that changes only figures."""
    if event["kind"] == "run_started":
        again = "again " if event.get("resumed") else ""
        where = event.get("device_name") or event.get("device") or "this machine"
        return clean(f"the engine started {again}on {where}")
    if event["kind"] == "run_finished":
        why = event.get("error") or event.get("reason")
        if event.get("status") == "paused" and why in (None, ASKED_FOR):
            return None  # the event `paused` before this one has the same text
        if why == ASKED_FOR:
            return clean(f"{event.get('status')} as requested")
        return clean(event.get("status")) + (f": {on_one_line(why)}" if why else "")
    return describe_event(event)
