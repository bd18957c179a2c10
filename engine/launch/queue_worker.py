"""The keeper of a queue: a small process of its own that starts one waiting run after another, each its own engine.

It holds no device and no state: killed, it loses nothing, and the run it started goes on. A run that fails, or cannot
be started, is noted and the next one begins. It ends when nothing waits.

Try: `tunedeck queue start`, then `cat runs/.queue/keeper.log`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from engine.errors import EnvironmentProblem, TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.events import utc_now
from engine.journal.liveness import ProcessIdentity, identify
from engine.journal.queue import Queue
from engine.journal.summary import summarise
from engine.launch.process import ENTRY_FILE, start_engine

POLL_SECONDS = 0.5


def start_queue_worker(runs_dir: Path) -> int:
    """Start a keeper in a session of its own, unless one is at work already; returns its pid."""
    queue = Queue(runs_dir)
    keeper = queue.look().keeper
    if keeper is not None:
        return keeper.pid
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
            [sys.executable, "-P", str(ENTRY_FILE), "_keeper", str(runs_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
    return process.pid


def run_queue(runs_dir: Path) -> None:
    """Work the queue until it is empty. TERM ends the keeper and leaves the present run going."""
    queue = Queue(runs_dir)
    own = identify(os.getpid())
    if own is None:
        raise EnvironmentProblem("this process does not see itself in the process table", fix="mount /proc")
    signal.signal(signal.SIGTERM, _leave)
    try:
        _work(queue, own)
    except _Asked:
        queue.dismiss()
        _say("asked to end; a run that has begun goes on")


class _Asked(BaseException):
    """TERM came."""


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise _Asked


def _work(queue: Queue, own: ProcessIdentity) -> None:
    earlier = queue.look().current
    if earlier is not None:
        # An earlier keeper is gone, its run may not be.
        _wait_for(RunDirectory(queue.runs_dir / earlier))
    while (directory := queue.take(own)) is not None:
        _say(f"{directory.name} begins")
        try:
            code = start_engine(directory).wait()
        except TunedeckError as error:
            _say(f"{directory.name} could not be started: {error.render()}")
            continue
        _say(f"{directory.name} ended with {code}: {summarise(directory).status}")
    _say("nothing waits")


def _wait_for(directory: RunDirectory) -> None:
    while directory.exists() and summarise(directory).status == "running":
        time.sleep(POLL_SECONDS)


def _say(text: str) -> None:
    sys.stdout.write(f"{utc_now()} {text}\n")
