"""Follows one run for the screen: reads what was added to its events, and keeps what the screen draws.

The engine knows nothing of it. A look reads for a bounded time and goes on at the next one, so a run of a million steps
opens at once and its curve fills in. Memory stays bounded: of steps, only the curve and the latest lines are kept.
Nothing here draws or writes, and no state of the run directory (torn, damaged, unreadable, gone) raises.

Try: `watch = RunWatch(resolve_run("last", None)); watch.look(seconds=1.0)`
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean, describe_event
from engine.journal.events import Event, EventTail, decode_event, end_of_events
from engine.journal.journal_state import JournalState
from engine.journal.summary import (
    KIND_WITHIN_BYTES,
    LINES_PER_CLOCK_CHECK,
    QUIET_LINE,
    STEP_MARK,
    RunSummary,
    summarise_state,
)
from tui.plot.series import Series

STEP = re.compile(rb'"step":(\d+),"epoch":[^,]*,"loss":([^,]+),.*?"peak_bytes":(\d+)')
"""What the curve needs of a step's line, as the writer spells it. A line spelled otherwise is parsed in full."""

PEEK_BYTES = 64 * 1024
"""How much of the end is read first where a long history lies before it."""

GPU_MARK = b'"kind":"gpu"'
ASKED_FOR = "asked for"
"""The engine's reason for ending because someone said so: no news to whoever did."""

FEED_LINES = 1000
"""Events that the feed keeps. All of them are in events.jsonl."""

PACE_STEPS = 50
"""Steps whose mean duration the estimate rests on: calm, and quick to follow a backoff."""


class FeedLine(NamedTuple):
    """One event that a person should read."""

    time: str
    kind: str
    text: str


@dataclass
class Curves:
    """What has been seen of the steps."""

    loss: Series = field(default_factory=Series)
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    """The latest steps, whole."""


class RunWatch:
    """One run, followed."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.state = JournalState()
        self.curves = Curves()
        self.feed: deque[FeedLine] = deque(maxlen=FEED_LINES)
        self.saved: list[int] = []
        """Steps after which a checkpoint was written, whether it is still there or not."""
        self.fed = 0
        """How many events the feed has had, those it has let go included."""
        self.gpus: dict[int, Event] = {}
        """The latest reading of each device."""
        self.summary: RunSummary | None = None
        self.trouble = ""
        """Why the run cannot be read right now; what was known of it stays."""
        self.version = 0
        """Grows with every look that brought something."""
        self._tail = EventTail(directory.events)
        self._damaged = 0
        self._peeked: Event | None = None

    def look(self, *, seconds: float) -> bool:
        """Read what was added, for about this long. True when anything is different from before."""
        summary: RunSummary | None
        try:
            if not self.version:
                self._peek()
            news = self._read(time.monotonic() + seconds)
            summary = summarise_state(self.directory, self.state, self._damaged)
            trouble = "" if self.directory.exists() else f"the run's folder is gone: {clean(self.directory.path)}"
        except TunedeckError as error:
            news, summary, trouble = True, self.summary, clean(error.found)
        except OSError as error:
            news, summary, trouble = True, self.summary, clean(f"cannot be read: {error.strerror or error}")
        # With the folder gone, what was known is worth more than what an empty place looks like.
        summary = self.summary if trouble and self.summary is not None else summary
        changed = bool(news) or (summary, trouble) != (self.summary, self.trouble)
        self.summary, self.trouble = summary, trouble
        self.version += changed
        return changed

    @property
    def behind(self) -> float:
        """The share of the events that has not been read yet."""
        try:
            size = os.stat(self.directory.events).st_size
        except OSError:
            return 0.0
        return max(0.0, 1.0 - self._tail.offset / size) if size else 0.0

    @property
    def latest(self) -> Event | None:
        """The newest step there is, also while its history is still being read."""
        return self._peeked if self._peeked is not None and self.behind else self.state.last_step

    @property
    def step(self) -> int:
        """The number of steps done."""
        return int(self.latest["step"]) if self.latest is not None else self.state.step

    def seconds_left(self) -> float | None:
        """An estimate from the mean of recent steps; None when it cannot be known."""
        recent = (event.get("step_seconds") for event in self.curves.recent)
        steps = [float(seconds) for seconds in recent if seconds is not None]
        if not self.state.max_steps or not steps:
            return None
        return max(0, self.state.max_steps - self.step) * sum(steps) / len(steps)

    def _peek(self) -> None:
        """Before a long history is read: what its last step says. Reading a million steps takes two seconds."""
        end = end_of_events(self.directory.events)
        if end > PEEK_BYTES:
            tail = EventTail(self.directory.events, offset=end - PEEK_BYTES)
            steps = [event for event in tail.poll() if event["kind"] == "step"]
            self._peeked = steps[-1] if steps else None

    def _read(self, deadline: float) -> bool:
        batch = _Batch()
        count = 0
        for line in self._tail.lines():
            count += 1
            if line.find(STEP_MARK, 0, KIND_WITHIN_BYTES) >= 0:
                if not batch.take(line):
                    self._damaged += 1
            elif not QUIET_LINE.search(line, 0, KIND_WITHIN_BYTES):
                self._fold(batch)
                batch = _Batch()
                self._other(line)
            elif GPU_MARK in line:
                self._gpu(decode_event(line))
            if count % LINES_PER_CLOCK_CHECK == 0 and time.monotonic() > deadline:
                break
        self._fold(batch)
        return count > 0

    def _fold(self, batch: _Batch) -> None:
        """Take a stretch of steps into the curve, the latest steps, and by its ends into the state."""
        latest = [event for event in map(decode_event, batch.latest) if event is not None]
        if not latest:
            return
        self.curves.loss.extend(batch.steps, batch.losses)
        self.curves.recent.extend(latest)
        self.state.peak_bytes = max(self.state.peak_bytes, batch.peak_bytes)
        self.state.fold_steps(decode_event(batch.first), latest[-1])

    def _other(self, line: bytes) -> None:
        """Take in one line that is not one of a stretch of steps."""
        event = decode_event(line)
        try:
            text = None if event is None else self._meaning(event, line)
        except (KeyError, TypeError, ValueError, AttributeError):
            event = None  # JSON, but not an event as any version of the engine writes it
        if event is None:
            self._damaged += 1
            return
        if text is not None:
            self.fed += 1
            self.feed.append(FeedLine(str(event.get("time", "")), str(event["kind"]), text))

    def _meaning(self, event: Event, line: bytes) -> str | None:
        """Take an event into the state; returns its line for the feed, if it has one."""
        if event["kind"] == "step":
            batch = _Batch()
            batch.take(line)
            self._fold(batch)
            return None
        text = _words(event)
        if event["kind"] == "eval" and self.state.evals:
            self.state.evals[-1].pop("samples", None)  # only the latest answers are shown
        self.state.fold(event)
        if event["kind"] == "resumed":
            self.curves.loss.cut_after(float(event["step"]))
            self.curves.recent.clear()
            self.saved = [step for step in self.saved if step <= int(event["step"])]
        if event["kind"] == "checkpoint_saved":
            self.saved.append(int(event["step"]))
        return text

    def _gpu(self, event: Event | None) -> None:
        if event is not None and isinstance(event.get("index"), int):
            self.gpus[event["index"]] = event


class _Batch:
    """A stretch of step lines: numbers for the curve, and the last lines whole."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.losses: list[float | None] = []
        self.latest: deque[bytes] = deque(maxlen=PACE_STEPS)
        self.first = b""
        self.peak_bytes = 0

    def take(self, line: bytes) -> bool:
        """Take one line in; False when it is none of ours."""
        found = STEP.search(line)
        try:
            step, loss, peak = found.groups() if found else _parsed(line)
            point = float(step), None if loss == b"null" else float(loss), int(peak)
        except ValueError:
            return False
        self.steps.append(point[0])
        self.losses.append(point[1])
        self.peak_bytes = max(self.peak_bytes, point[2])
        self.first = self.first or line
        self.latest.append(line)
        return True


def _parsed(line: bytes) -> tuple[Any, Any, Any]:
    """Step, loss and peak of a line that the quick look does not understand. Raises ValueError for a damaged one."""
    event = decode_event(line)
    if event is None or not isinstance(event.get("step"), int):
        raise ValueError("no step")
    loss = event.get("loss")
    return event["step"], b"null" if not isinstance(loss, int | float) else loss, event.get("peak_bytes") or 0


def _words(event: Event) -> str | None:
    """What the feed says of an event; None for those that only move figures."""
    if event["kind"] == "run_started":
        again = "again " if event.get("resumed") else ""
        where = event.get("device_name") or event.get("device") or "this machine"
        return clean(f"the engine started {again}on {where}")
    if event["kind"] == "run_finished":
        why = event.get("error") or event.get("reason")
        if event.get("status") == "paused" and why in (None, ASKED_FOR):
            return None  # its own event has said so
        return clean(f"{event.get('status')}" + (f": {why}" if why else ""))
    return describe_event(event)


class LogTail:
    """The last lines of a file that may grow by megabytes a second: its end is read, never the rest."""

    READ_BYTES = 16 * 1024

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = (-1, -1)
        self.lines: list[str] = []

    def look(self) -> bool:
        """Read the end again where the file has changed; True when it had."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_size, found.st_mtime_ns) == self._seen:
                    return False
                self._seen = (found.st_size, found.st_mtime_ns)
                file.seek(max(0, found.st_size - self.READ_BYTES))
                text = file.read(self.READ_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return False
        # A progress bar overwrites its line with carriage returns: the last state of it is what counts.
        lines = text.split("\n")
        lines = lines[1:] if found.st_size > self.READ_BYTES else lines
        self.lines = [_log_line(line) for line in lines if line.strip()]
        return True


def _log_line(line: str) -> str:
    """One line of a log with its control characters taken out and its indentation kept."""
    text = line.rstrip().rpartition("\r")[2].expandtabs()
    return text[: len(text) - len(text.lstrip(" "))] + clean(text)
