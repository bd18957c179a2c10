"""Follows the journal of a run and forwards its metrics to one tracker, each event once, over any number of
restarts, in a process of its own: a tracker that is slow, hangs or fails neither slows nor ends the run."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from engine.config.files.machine import install_packages
from engine.config.load import load_run_spec
from engine.errors import KILLED_CODE, EnvironmentProblem, StoppedError, TunedeckError, UsageError
from engine.extras.trackers.mlflow_tracker import MlflowTracker
from engine.extras.trackers.swanlab_tracker import SwanLabTracker
from engine.extras.trackers.tensorboard_tracker import TensorBoardTracker
from engine.extras.trackers.tracker import TrackedRun, Tracker, point_of
from engine.extras.trackers.trackio_tracker import TrackioTracker
from engine.extras.trackers.wandb_tracker import WandbTracker
from engine.journal.directory import RunDirectory
from engine.journal.events import Event, EventTail, decode_event, end_of_events
from engine.journal.files import locked, remove_drafts
from engine.journal.forwarding import Record, read_record, record_file, write_record
from engine.journal.liveness import ProcessIdentity, identify, is_alive
from engine.journal.stages import stage_name

DEFAULT_PROJECT = "tunedeck"

TRACKER_CLASSES: dict[str, Callable[[TrackedRun, dict[str, Any] | None], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanLabTracker,
}


def open_tracker(run: TrackedRun, name: str, position: dict[str, Any] | None) -> Tracker:
    """Open a tracker; `position` is what its `position` or `close` returned in an earlier process. Raises whatever the
    tracker's package raises."""
    return TRACKER_CLASSES[name](run, position)


def tracked_run(directory: RunDirectory, name: str) -> TrackedRun:
    """Also creates the folder for the tracker's files. Raises UsageError for a tracker of an unknown name."""
    if name not in TRACKER_CLASSES:
        raise UsageError(f"unknown tracker {name!r}", expected=f"one of: {', '.join(TRACKER_CLASSES)}")
    spec = load_run_spec(directory.run_toml, own=True)
    parent = directory.path.parent.parent.name if directory.path.parent.name == "stages" else None
    sweep = spec.provenance.sweep
    folder = directory.trackers / name
    for each in (directory.trackers, folder):  # the run's folder is not made again where it was moved
        each.mkdir(exist_ok=True)
    return TrackedRun(
        name=f"{parent}/{stage_name(directory)}" if parent else directory.name,
        group=parent or (sweep.id if sweep else None),
        project=spec.recipe.trackers.project or DEFAULT_PROJECT,
        tags=spec.recipe.trackers.tags,
        # A webhook's URL is a secret.
        config=spec.recipe.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"finish": {"webhook"}}),
        folder=folder,
        names_result=spec.recipe.trackers.result,
    )


POLL_SECONDS = 1.0

RESUMED = b'"resumed"'
"""In the line of such an event, and of few others."""

CALL_SECONDS = 300.0
"""A tracker whose package takes longer for one call hangs, and its process is ended."""


def forward_all(directory: RunDirectory, name: str) -> int:
    """Forward every event that tracker `name` lacks; returns how many had metrics. Raises EnvironmentProblem if the
    tracker fails, or another process forwards to it now."""
    try:
        return _follow(directory, name, None, 0, lock_seconds=0.0)
    except TimeoutError as error:
        raise EnvironmentProblem(
            f"another process is sending {directory.name} to {name}",
            fix="nothing: that process sends the remaining events",
        ) from error


def follow_engine(directory: RunDirectory, name: str, engine_pid: int, after: int) -> int:
    """Forward events until the engine `engine_pid` has ended; returns how many had metrics. `after`: the `seq` of the
    journal's last event when that engine began. Waits for an earlier process that still forwards the run. Raises
    EnvironmentProblem if the tracker fails."""
    return _follow(directory, name, identify(engine_pid), after, lock_seconds=-1.0)


def _follow(
    directory: RunDirectory, name: str, engine: ProcessIdentity | None, after: int, *, lock_seconds: float
) -> int:
    directory.trackers.mkdir(exist_ok=True)
    with locked(directory.trackers / f"{name}.lock", timeout_seconds=lock_seconds):
        record = read_record(directory, name)
        remove_drafts(record_file(directory, name))
        with _failures_recorded(directory, name, record):
            with _ended_if_it_hangs(directory, name, record, "starting"):
                shown = tracked_run(directory, name)
                tracker = open_tracker(shown, name, record.position)
            return _Follower(directory, name, record, tracker, shown.names_result).run(engine, after)


@contextmanager
def _failures_recorded(directory: RunDirectory, name: str, record: Record) -> Iterator[None]:
    """Write any exception in the block with its fix into `record`, and raise it as EnvironmentProblem."""
    try:
        yield
    except Exception as error:  # of any kind: the code of a tracker's package runs here
        problem = _problem(directory, name, error)
        record.error, record.fix = problem.found, problem.fix
        write_record(directory, name, record)
        raise problem from error


@contextmanager
def _ended_if_it_hangs(directory: RunDirectory, name: str, record: Record, doing: str) -> Iterator[None]:
    """End this process, and record why, if the block takes longer than CALL_SECONDS: a package that waits for a network
    cannot be interrupted in any other way."""

    def end() -> None:
        slow = f"tracker {name} did not respond for {CALL_SECONDS:g} s in {doing}; its process was ended"
        record.error, record.fix = slow, f"send the missing events: tunedeck sync {directory.path} --to {name}"
        try:
            write_record(directory, name, record)
            sys.stderr.write(f"{slow}\n")
            sys.stderr.flush()
        finally:
            os._exit(1)

    timer = threading.Timer(CALL_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _problem(directory: RunDirectory, name: str, error: Exception) -> EnvironmentProblem:
    again = f"then send the missing events: tunedeck sync {directory.path} --to {name}"
    if isinstance(error, ModuleNotFoundError):
        missing = f"tracker {name} is not installed: {error}"
        return EnvironmentProblem(missing, fix=f"{install_packages(name)}; {again}")
    text = error.found if isinstance(error, TunedeckError) else f"{type(error).__name__}: {error}"
    return EnvironmentProblem(f"tracker {name} failed: {text}", fix=f"see {directory.trackers}/{name}.log; {again}")


def _resumes(path: Path, start: int, end: int) -> deque[tuple[int, int]]:
    """Return, for each `resumed` event between two places of a journal, where its line ends, and the earliest step that
    it or a later one resumes from: events before it of a later step are done again."""
    tail, found = EventTail(path, offset=start), deque[tuple[int, int]]()
    for line in tail.lines():
        if tail.offset > end:
            break
        event = decode_event(line) if RESUMED in line else None
        if event is not None and event["kind"] == "resumed":
            found.append((tail.offset, int(event["step"])))
    earliest = math.inf
    for place in reversed(range(len(found))):
        earliest = min(earliest, found[place][1])
        found[place] = found[place][0], int(earliest)
    return found


class _Follower:
    def __init__(self, directory: RunDirectory, name: str, record: Record, tracker: Tracker, refers: bool) -> None:
        self._directory, self._name, self._record, self._tracker = directory, name, record, tracker
        self._tail = EventTail(directory.events)
        self._seq = record.seq if tracker.last_seq is None else tracker.last_seq
        self._refers = refers
        self._exit_code = 0
        self._ended = False

    def run(self, engine: ProcessIdentity | None, after: int) -> int:
        """Forward until `engine` has ended (None: to the journal's present end); returns how many events had
        metrics."""
        self._remember()
        count = 0
        while True:
            # Looked at before the events are read, so that nothing written before the engine's end is missed.
            over = self._ended or engine is None or not is_alive(engine)
            count += self._forward_new(after)
            if over:
                break
            if not self._ended:
                time.sleep(POLL_SECONDS)
        killed = engine is not None and not self._ended
        with self._limited("finishing"):
            position = self._tracker.close(KILLED_CODE if killed else self._exit_code)
        self._write(self._seq, position)
        return count

    def _forward_new(self, after: int) -> int:
        self._tail.path = self._directory.events  # of a run that was moved elsewhere than before
        # One event after the other: a journal may have gigabytes.
        start, end = self._tail.offset, end_of_events(self._tail.path)
        resumes = deque() if self._tracker.replaces_steps else _resumes(self._tail.path, start, end)
        count = 0
        for line in self._tail.lines():
            event = decode_event(line)
            while resumes and resumes[0][0] <= self._tail.offset:
                resumes.popleft()
            if event is not None and event["seq"] > self._seq:
                again = bool(resumes) and event["kind"] in ("step", "eval") and event["step"] > resumes[0][1]
                count += self._forward(event, after, send=not again)
            if self._tail.offset >= end:
                break
        if count:
            self._remember()
        return count

    def _forward(self, event: Event, after: int, *, send: bool) -> bool:
        """Whether the event had metrics that were sent. A `run_finished` event ends the following if its `seq` is above
        `after`."""
        self._seq = event["seq"]
        if event["kind"] == "resumed":
            self._tracker.rewind(event["step"])
        if event["kind"] == "run_finished":
            stopped = event["exit_code"] == StoppedError.exit_code
            self._exit_code = 0 if stopped else event["exit_code"]
            self._ended = event["seq"] > after
            if self._refers and event["result"]:
                with self._limited("reporting the result"):
                    self._tracker.refer_to(self._directory.path / event["result"])
        point = point_of(event) if send else None
        if point is not None:
            with self._limited("logging"):
                self._tracker.forward(point)
        return point is not None

    def _limited(self, doing: str) -> AbstractContextManager[None]:
        return _ended_if_it_hangs(self._directory, self._name, self._record, doing)

    def _remember(self) -> None:
        position = self._tracker.position()
        if position is not None:
            self._write(self._seq, position)

    def _write(self, seq: int, position: dict[str, Any]) -> None:
        self._record.seq, self._record.position = seq, position
        self._record.error = self._record.fix = ""
        write_record(self._directory, self._name, self._record)
