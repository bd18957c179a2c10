"""A process that has imported the engine and forks one engine process after another; each is killed at a given moment.

Starting Python and importing torch and transformers' models takes seconds; a fork takes none, so hundreds of deaths
become affordable. What runs in the fork is the engine's own `main.run` in a session of its own, and it dies of a real
SIGKILL.

Try: `make torture`
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PATIENCE_SECONDS = 300.0
"""An engine that lives longer hangs."""

WITHOUT_THREADS = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""A process that has threads must not fork."""

FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "shutil.rmtree", "os.truncate"}
"""Audit events that announce a change of, or a look into, a file or folder."""


@dataclass(frozen=True)
class Death:
    """The moment at which an engine is killed; never, if every field has its default."""

    after_seconds: float | None = None
    at_operation: int | None = None
    """Right before the n-th file operation in the run directory or the cache, 1 being the first."""
    seen: str = ""
    """As soon as something new in the run directory matches this glob."""


@dataclass(frozen=True)
class Obituary:
    """How an engine process ended."""

    code: int
    """Its exit code; -9 when it was killed."""
    operations: int
    """The number of file operations up to the end; 0 unless the engine was to be killed at one."""
    seconds: float
    """How long it lived."""


class CrashServer:
    """Starts the process that forks engines; use as a context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **WITHOUT_THREADS, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, place: Path, death: Death, *, resume: bool) -> Obituary:
        """Run an engine on `place` until it ends or is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"place": str(place), "resume": resume, "death": asdict(death)}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Obituary(**answer)


def serve() -> None:
    """Fork an engine for each request on standard input, until the input is closed. The engine is imported before."""
    from engine.train.run import main
    from tests.fork_server import preload

    preload()
    for line in sys.stdin:
        asked = json.loads(line)
        counter = os.memfd_create("operations")
        os.truncate(counter, 8)
        death = Death(**asked["death"])
        child = os.fork()
        if child == 0:
            _become_engine(main.run, Path(asked["place"]), asked["resume"], death, counter)
        began = time.monotonic()
        code = _await(child, Path(asked["place"]), death)
        seconds = time.monotonic() - began
        operations = int.from_bytes(os.pread(counter, 8, 0), "little")
        os.close(counter)
        sys.stdout.write(json.dumps({"code": code, "operations": operations, "seconds": seconds}) + "\n")
        sys.stdout.flush()


def _become_engine(run: Any, place: Path, resume: bool, death: Death, counter: int) -> None:
    os.setsid()
    log = os.open(place / "engine.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    if death.at_operation is not None:
        _die_at(death.at_operation, (str(place), os.environ["TUNEDECK_CACHE"]), counter)
    os._exit(run(place, resume=resume))


def _die_at(operation: int, roots: tuple[str, ...], counter: int) -> None:
    """Count file operations below `roots`, and kill this process right before the given one."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in FILE_OPERATIONS or not str(arguments[0]).startswith(roots):
            return
        count += 1
        os.pwrite(counter, count.to_bytes(8, "little"), 0)
        if count == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _await(child: int, place: Path, death: Death) -> int:
    """Wait for the engine, and kill it at the given moment; returns its exit code."""
    began = time.monotonic()
    left_behind = set(place.glob(death.seen)) if death.seen else set()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        lived = time.monotonic() - began
        due = death.after_seconds is not None and lived >= death.after_seconds
        if due or lived > PATIENCE_SECONDS or (death.seen and set(place.glob(death.seen)) - left_behind):
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.001)


if __name__ == "__main__":
    serve()
