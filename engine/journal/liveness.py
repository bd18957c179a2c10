"""Who works on a run, and whether that process is still there.

A pid alone proves nothing: pids are reused, and a zombie answers `kill -0`. A process is the same one when its pid, its
start time and the machine's boot agree. What cannot be seen from here (another host, another container) is judged by
the age of the event file alone. Two engines on one run are kept apart by a file lock that the kernel drops with
its holder, so no crash leaves a run locked.

Try: `cat runs/*/engine.json`
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.files import write_atomically

STALE_SECONDS = 15.0
"""Three missed heartbeats. Enough when the process is also seen to be gone from this machine: the silence only has to
rule out that it lives where this process cannot look, such as another container with the same host name."""

REMOTE_STALE_SECONDS = 120.0
"""Where only silence can be judged: NFS may show a file's old size for up to 60 s (acregmax of nfs(5)), and an engine
that loads a large model can hold Python's lock for tens of seconds."""

ProcessState = Literal["alive", "gone", "foreign"]


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, for good: a later process with the same pid compares unequal."""

    pid: int
    started: str
    """Boot and start time in the kernel's own terms; compared, never interpreted."""
    host: str


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a living process on this machine; None when there is none, or only a zombie."""
    started = _started(pid)
    return None if started is None else ProcessIdentity(pid, started, platform.node())


def process_state(identity: ProcessIdentity) -> ProcessState:
    """alive or gone on this machine, or foreign: on another one, where this process cannot look."""
    if identity.host != platform.node():
        return "foreign"
    return "alive" if identify(identity.pid) == identity else "gone"


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process is seen alive from here."""
    return process_state(identity) == "alive"


def engine_process(directory: RunDirectory) -> ProcessIdentity | None:
    """The process that works on the run, or that died on it; None when none does and the last one left in order."""
    try:
        found = json.loads(directory.engine.read_text("utf-8"))
        return ProcessIdentity(int(found["pid"]), str(found["started"]), str(found["host"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentProblem(
            f"{directory.engine} cannot be read: {error}", fix="remove the file if no engine works on this run"
        ) from error


def record_engine(directory: RunDirectory, identity: ProcessIdentity) -> None:
    """Write down who works on the run, so that others can judge and, if need be, kill it."""
    write_atomically(directory.engine, json.dumps(asdict(identity)) + "\n")


def clear_engine(directory: RunDirectory) -> None:
    """Nobody works on the run any more, and that is no accident."""
    directory.engine.unlink(missing_ok=True)


@contextmanager
def claim(directory: RunDirectory) -> Iterator[ProcessIdentity]:
    """Hold the run for this process. Raises EnvironmentProblem when another process holds it.

    Who holds it is on record until the block ends, and stays there when the process is killed in it.
    """
    with _locked(directory):
        identity = identify(os.getpid())
        if identity is None:
            raise EnvironmentProblem("this process does not see itself in the process table", fix="mount /proc")
        record_engine(directory, identity)
        try:
            yield identity
        finally:
            clear_engine(directory)


@contextmanager
def lock_after_engine(directory: RunDirectory) -> Iterator[None]:
    """Hold the run to write the last words of an engine that is gone; who worked on it stays on record."""
    with _locked(directory):
        yield


def refuse_if_claimed(directory: RunDirectory) -> None:
    """Raise EnvironmentProblem when a process holds the run right now, on any machine that shares the lock."""
    with _locked(directory, patience_seconds=0.0):
        return


_held: set[int] = set()
"""Descriptors whose lock this process holds."""


def _let_go_in_child() -> None:
    for file in _held:
        os.close(file)
    _held.clear()


# A forked data worker would share the lock, and keep it from the next engine if it outlives this one. Closing the
# child's copy leaves the parent's lock as it is (flock(2)).
os.register_at_fork(after_in_child=_let_go_in_child)


@contextmanager
def _locked(directory: RunDirectory, *, patience_seconds: float = 1.0) -> Iterator[None]:
    # Never unlinked: a lock on a removed file would keep nobody out.
    file = os.open(directory.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(file, directory, time.monotonic() + patience_seconds)
        _held.add(file)
        yield
    finally:
        _held.discard(file)
        os.close(file)


def _take(file: int, directory: RunDirectory, deadline: float) -> None:
    """Lock the file. Tried again until the deadline: `refuse_if_claimed` elsewhere holds it for microseconds."""
    try:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
    except BlockingIOError as error:
        holder = engine_process(directory)
        who = f" (process {holder.pid} on {holder.host})" if holder else ""
        raise EnvironmentProblem(
            f"another engine works on run {directory.name}{who}",
            expected="one engine per run",
            fix=f"stop it first: tunedeck stop {directory.name}",
        ) from error
    except OSError as error:
        raise EnvironmentProblem(
            f"{directory.lock} cannot be locked: {error.strerror}", fix="put the runs on a file system with file locks"
        ) from error


def seconds_since_change(path: Path) -> float:
    """Seconds since the file last changed; infinite when it does not exist."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return float("inf")


def _started(pid: int) -> str | None:
    if os.path.exists("/proc/self/stat"):
        return _started_linux(pid)
    import psutil  # only where there is no /proc: the import costs 20 ms

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{process.create_time():.3f}"
    except psutil.NoSuchProcess:
        return None


def _started_linux(pid: int) -> str | None:
    """Boot id, and start time in clock ticks since boot (field 22 of proc(5) stat): no clock change moves them."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the command name may hold anything, even ')'
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"
