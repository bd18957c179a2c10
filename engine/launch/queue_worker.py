"""The queue worker: a process that starts the waiting runs one after another, each as an engine process, until none
waits.

It has no state: if it is killed, the queue is unchanged and the run that it started goes on. A run that cannot be
started is marked failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from engine.config.load import brings_limits
from engine.errors import EnvironmentProblem, TunedeckError, disk_problem
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean
from engine.journal.events import EventWriter, utc_now
from engine.journal.liveness import (
    ProcessIdentity,
    identify,
    identify_self,
    is_claimed,
    lock_after_engine,
    running_engine,
)
from engine.journal.queue import Queue
from engine.journal.summary import summarise
from engine.launch.process import ENTRY_FILE, start_engine

POLL_SECONDS = 0.25
START_POLL_SECONDS = 0.02


def start_queue_worker(runs_dir: Path, only: Sequence[str] | None = None) -> int:
    """Start a worker in an OS session of its own, unless one is running already; returns its pid. It starts the runs
    `only`, or all if None. Raises EnvironmentProblem if it cannot work the queue: another one was faster, or a file
    cannot be written."""
    queue = Queue(runs_dir)
    worker = queue.limit_worker(only)
    if worker is not None:
        return worker.pid
    try:
        queue.folder.mkdir(parents=True, exist_ok=True)
        log = queue.log.open("ab")
    except OSError as error:
        raise EnvironmentProblem(
            f"{queue.log} cannot be written: {error.strerror or error}",
            fix="choose another runs folder with --runs DIR",
        ) from error
    with log:
        process = subprocess.Popen(
            [sys.executable, "-P", str(ENTRY_FILE), "_queue_worker", str(runs_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
    wait_until_registered(queue, process)
    return process.pid


def wait_until_registered(queue: Queue, process: subprocess.Popen[bytes]) -> None:
    """Raises EnvironmentProblem if the worker ends with an error before it runs the queue."""
    while process.poll() is None:
        worker = queue.read().worker
        if worker is not None and worker.pid == process.pid:
            return
        time.sleep(START_POLL_SECONDS)
    worker = queue.read().worker
    if process.returncode and worker is not None:
        raise EnvironmentProblem(
            f"the queue of {queue.runs_dir} is already running: process {worker.pid} on {worker.host}",
            fix="see its runs: tunedeck queue list",
        )
    if process.returncode:
        raise EnvironmentProblem(
            f"the queue of {queue.runs_dir} was not started: its process ended with {process.returncode}",
            fix=f"see {queue.log}; then start it again: tunedeck queue start",
        )


def follow_queue(queue: Queue, pid: int, waiting: Sequence[str], *, only: bool = False) -> Iterator[tuple[str, int]]:
    """Yields (sentence, 0) when a run starts, and (sentence, the run's exit code) when it ends, until the worker ends;
    (sentence, 1) at last if that was killed or could not go on. `waiting`: the runs that waited before the worker was
    started; `only` them are followed, until all have ended. Raises EnvironmentProblem if the queue is held and its
    folder was removed or is being removed."""
    known, current = list(waiting), None
    alive = True
    while alive and known:
        alive = identify(pid) is not None  # looked at before reading, so that nothing written before its end is missed
        state = queue.read()
        queue.require_order()
        if only and state.current not in known:
            state.current = None
        elif not only:
            known += [name for name in (*state.waiting, state.current) if name is not None and name not in known]
        for name in [name for name in known if name not in (*state.waiting, state.current)]:
            known.remove(name)
            directory = queue.run(name)
            # A run may end, or fail to start, between two looks; one that was removed or started by hand is no end.
            if directory.exists() and (name == current or _has_ended(directory)):
                if name != current:
                    yield _start_text(name), 0
                yield _ending(directory)
        if state.current is not None and state.current != current:
            yield _start_text(state.current), 0
        current = state.current
        if alive:
            time.sleep(POLL_SECONDS)
    if known and not alive and queue.was_left_by(pid):
        found = TunedeckError(
            f"the queue's process {pid} ended before its runs did; still waiting: {', '.join(known)}",
            fix=f"see {queue.log}; start the queue again: tunedeck queue start",
        )
        yield found.render(), found.exit_code


def _start_text(name: str) -> str:
    return f"{name} starts; to follow it: tunedeck watch {name}"


def _has_ended(directory: RunDirectory) -> bool:
    return summarise(directory).exit_code is not None or _ended_unrecorded(directory)


def _ended_unrecorded(directory: RunDirectory) -> bool:
    """Whether an engine was started, and is gone without an end in the journal: killed, or unable to write there. The
    status is "running" still, as a launcher would have some seconds to start it again; the queue has waited for it."""
    unended = summarise(directory).status in ("queued", "running", "stale")
    return unended and directory.log.exists() and running_engine(directory) is None and not is_claimed(directory)


def _ending(directory: RunDirectory) -> tuple[str, int]:
    if _ended_unrecorded(directory):
        name = directory.name
        found = TunedeckError(
            f"{name}: its engine ended without recording how the run ended",
            fix=f"read its log: tunedeck log {name}; continue with: tunedeck resume {name}",
        )
        return found.render(), found.exit_code
    summary = summarise(directory)
    error = f": {clean('; '.join(summary.last_error.splitlines()))}" if summary.last_error else ""
    code = 1 if summary.exit_code is None else summary.exit_code
    return f"{directory.name}: {summary.status} at step {summary.step}{error}", code


def run_queue(runs_dir: Path) -> None:
    """Work the queue until it is empty. TERM ends the worker; the current run goes on. Raises EnvironmentProblem if
    another worker is alive, a file cannot be written, or the runs folder was removed."""
    queue = Queue.held(runs_dir)
    own = identify_self()
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        _start_waiting_runs(queue, own)
    except _TerminatedError:
        queue.clear_worker()
        _log("stop requested; a started run continues")


class _TerminatedError(BaseException):
    """Raised in the worker when it receives TERM."""


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    raise _TerminatedError


def _start_waiting_runs(queue: Queue, own: ProcessIdentity) -> None:
    queue.register_worker(own)
    earlier = queue.read().current
    if earlier is not None:
        # The worker that started this run is gone, but the run may still be running.
        _wait_for_end(queue, earlier)
    while (directory := queue.take_next(own)) is not None:
        _log(f"{directory.name} starts")
        try:
            if brings_limits(directory.run_toml):
                _log(f"{directory.name}: its limits and commands are left out, because they were not set by you")
            code = start_engine(directory).wait()
        except Exception as error:  # noqa: BLE001  (whatever it is, the runs behind this one must not wait for ever)
            _record_failed_start(directory, error)
            continue
        _log(f"{directory.name} ended with {code}: {summarise(queue.run(directory.name)).status}")
    left = len(queue.read().waiting)
    _log(
        f"the runs of the sweep have ended; {left} others are waiting; start them with: tunedeck queue start"
        if left
        else "no run is waiting"
    )


def _record_failed_start(directory: RunDirectory, error: Exception) -> None:
    """Show the run as failed, not as queued. If another engine works on the run, or the journal cannot be written
    either, the reason goes to the worker's log alone."""
    known = error if isinstance(error, TunedeckError) else disk_problem(error, str(directory.path))
    known = known or TunedeckError(f"{type(error).__name__}: {error}")
    text = f"the engine could not be started: {known.render()}"
    _log(f"{directory.name}: {text}")
    if not directory.exists():  # it was removed or moved: nothing is made at its old place
        return
    try:
        with lock_after_engine(directory), EventWriter(directory) as writer:
            writer.write("run_finished", status="failed", exit_code=known.exit_code, result=None, error=text)
    except (OSError, TunedeckError) as second:
        _log(f"{directory.name}: the error is not in its journal: {second}")


def _wait_for_end(queue: Queue, name: str) -> None:
    while queue.run(name).exists() and summarise(queue.run(name)).status == "running":
        time.sleep(POLL_SECONDS)


def _log(text: str) -> None:
    sys.stdout.write(f"{utc_now()} {text}\n")
