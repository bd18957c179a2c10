"""Finds out which process works on a run, and whether that process is still alive.

Pids are reused, and a zombie answers `kill -0`: two identities are the same process when pid, start time and boot of
the machine agree. A process that cannot be looked up from here (another host or container) is judged by the age of the
event file alone. A file lock, which the kernel releases when its engine ends, prevents two engines on one run.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory, locked, write_atomically

STALE_SECONDS = 15.0
"""Silence after which a run is stale when its process does not exist on this machine: three missed heartbeats. The
silence rules out that the process lives in another container with the same host name."""

REMOTE_STALE_SECONDS = 120.0
"""Silence after which a run of another machine is stale: NFS may show a file's old size for up to 60 s (acregmax of
nfs(5)), and an engine that loads a large model can hold Python's global lock for tens of seconds."""

NO_FILE_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of flock(2) on a file system without file locks."""

ProcessState = Literal["alive", "gone", "remote"]


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies one process for all time: a later process with the same pid compares unequal."""

    pid: int
    started: str
    """Boot and start time in the kernel's own units; compared, never interpreted."""
    host: str


def identify(pid: int) -> ProcessIdentity | None:
    """None if no process of this machine has this pid, or only a zombie."""
    started = _started(pid)
    return None if started is None else ProcessIdentity(pid, started, platform.node())


def identify_self() -> ProcessIdentity:
    """Raises EnvironmentProblem where the process table cannot be read."""
    identity = identify(os.getpid())
    if identity is None:
        raise EnvironmentProblem("this process is not in the process table", fix="mount /proc")
    return identity


def process_state(identity: ProcessIdentity) -> ProcessState:
    """Also "remote", for a process of another machine."""
    if identity.host != platform.node():
        return "remote"
    return "alive" if identify(identity.pid) == identity else "gone"


def is_alive(identity: ProcessIdentity) -> bool:
    """False for a process of another machine."""
    return process_state(identity) == "alive"


def engine_process(directory: RunDirectory) -> ProcessIdentity | None:
    """The recorded engine, which works on the run or was killed while it did; None if the last one ended normally.
    Raises EnvironmentProblem if the record is damaged."""
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
    """Record who works on the run, so that others can find it and, if need be, kill it. Raises OSError."""
    write_atomically(directory.engine, json.dumps(asdict(identity)) + "\n")


def clear_engine(directory: RunDirectory) -> None:
    """Called when the engine ends normally."""
    directory.engine.unlink(missing_ok=True)


@contextmanager
def claim(directory: RunDirectory) -> Iterator[ProcessIdentity]:
    """Claim the run for this process inside the block. Raises EnvironmentProblem if another process has claimed it. If
    the process is killed inside the block, its recorded identity is left behind."""
    with _run_lock(directory):
        identity = identify_self()
        record_engine(directory, identity)
        try:
            yield identity
        finally:
            clear_engine(directory)


@contextmanager
def lock_after_engine(directory: RunDirectory) -> Iterator[None]:
    """Lock the run inside the block, to write the last event of an engine that is gone; unlike `claim`, the recorded
    engine stays. Raises EnvironmentProblem if an engine or another process holds the lock."""
    with _run_lock(directory):
        yield


def refuse_if_claimed(directory: RunDirectory) -> None:
    """Raise EnvironmentProblem if a process has locked the run, on any machine that shares the lock."""
    with _run_lock(directory, timeout_seconds=0.0):
        return


@contextmanager
def _run_lock(directory: RunDirectory, *, timeout_seconds: float = 1.0) -> Iterator[None]:
    """Waits up to a second by default: `refuse_if_claimed` elsewhere may hold the lock for microseconds. Raises
    EnvironmentProblem if another process holds it longer."""
    lock = ExitStack()
    try:
        lock.enter_context(locked(directory.lock, timeout_seconds=timeout_seconds))
    except TimeoutError as error:
        holder = engine_process(directory)
        who = f" (process {holder.pid} on {holder.host})" if holder else ""
        raise EnvironmentProblem(
            f"another engine works on run {directory.name}{who}",
            expected="one engine per run",
            fix=f"stop it first: tunedeck stop {directory.name}",
        ) from error
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_FILE_LOCKS:
            raise  # The lock file cannot be opened, which is as true of anything else in this folder.
        raise EnvironmentProblem(
            f"{directory.lock} cannot be locked: {error}", fix="put the runs on a file system with file locks"
        ) from error
    with lock:
        yield


def seconds_since_change(path: Path) -> float:
    """Infinite when the file does not exist."""
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
    """Boot id, and start time in clock ticks since boot (field 22 of proc(5) stat): changes of the clock affect
    neither."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the command name may hold anything, even ')'
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"
