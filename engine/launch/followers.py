"""Processes beside an engine: those that forward its metrics to experiment trackers, and the user's --on-finish
command."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.config.schema.run import RunSpec
from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.forwarding import read_record
from engine.launch.process import ENTRY_FILE, engine_environment

log = logging.getLogger(__name__)


def run_on_finish(spec: RunSpec, place: RunDirectory, status: str) -> None:
    """Run the command in a shell, with TUNEDECK_RUN (the run directory) and TUNEDECK_STATUS ("done", "failed", …), and
    wait. Its exit code is logged and has no effect."""
    if not spec.limits.on_finish:
        return
    environment = {**os.environ, "TUNEDECK_RUN": str(place.path), "TUNEDECK_STATUS": status}
    done = subprocess.run(spec.limits.on_finish, shell=True, env=environment, check=False)
    log.info("--on-finish ended with %d", done.returncode)


HAND_OVER_SECONDS = 10.0
"""How long an engine that has ended its run waits for its trackers to forward the last metrics, because a container may
end with the engine. A slower tracker goes on alone."""

Warn = Callable[[str, str, str], None]
"""Writes a warning with code, text and fix."""


@contextmanager
def trackers_following(spec: RunSpec, directory: RunDirectory, last_seq: int, warn: Warn) -> Iterator[None]:
    """Inside the block, a process for each tracker of the recipe forwards the run; after it, wait at most
    HAND_OVER_SECONDS. `last_seq`: `seq` of the journal's last event now; `warn` is called for each tracker that
    fails."""
    names = list(dict.fromkeys(spec.recipe.trackers.use))
    watches = [_Watch(directory, name, last_seq, warn) for name in names]
    try:
        yield
    finally:
        deadline = time.monotonic() + HAND_OVER_SECONDS
        for watch in watches:
            watch.end(deadline)


class _Watch:
    def __init__(self, directory: RunDirectory, name: str, last_seq: int, warn: Warn) -> None:
        self._directory, self._name, self._warn = directory, name, warn
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            process = _start(directory, name, last_seq)
        except OSError as error:
            warn("tracker", f"tracker {name} could not be started: {error}", self._fix())
            return
        self._thread = threading.Thread(target=self._wait, args=(process,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (of `time.monotonic`, in seconds); no warning is written after that."""
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._over.set()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code == 0 or self._over.is_set():
            return
        try:
            record = read_record(self._directory, self._name)
            text, fix = record.error, record.fix
        except EnvironmentProblem as error:
            text, fix = error.found, error.fix
        self._warn("tracker", text or f"the process of tracker {self._name} ended with {code}", fix or self._fix())

    def _fix(self) -> str:
        """What a user can do about a process that ended without recording why."""
        log = self._directory.trackers / f"{self._name}.log"
        return f"see {log}; send the missing events: tunedeck sync {self._directory.path} --to {self._name}"


def _start(directory: RunDirectory, name: str, last_seq: int) -> subprocess.Popen[bytes]:
    """An OS session of its own, so that a signal to the engine's session does not end the tracker."""
    directory.trackers.mkdir(exist_ok=True)
    place = ["--engine", str(os.getpid()), "--after", str(last_seq)]
    with (directory.trackers / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", str(ENTRY_FILE), "_forward", str(directory.path), name, *place],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=engine_environment(),
            start_new_session=True,
        )
