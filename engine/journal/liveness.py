"""Finds out which process works on a run, whether that process is still alive, and whether the kernel killed it because
host memory ran out.

Pids are reused, and a zombie answers `kill -0`: two identities are the same process when pid, start time and boot of
the machine agree. A process that cannot be looked up from here (another host or container) is judged by its lock on the
run, and where locks are not shared by whether the run's files changed just now. The lock, which the kernel releases
when its engine ends, prevents two engines on one run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.config.files.cgroups import PROC, memory_limit_bytes, oom_kills
from engine.errors import EnvironmentProblem
from engine.journal.control import was_requested
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.files import (
    locked,
    open_regular,
    read_table,
    remove_abandoned_drafts,
    remove_drafts,
    write_atomically,
)

STALE_SECONDS = 15.0
"""Silence after which a run is stale when its process does not exist on this machine and nobody holds its lock: three
missed heartbeats, in which a launcher may start its ranks again."""

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


def is_suspended(identity: ProcessIdentity) -> bool:
    """Whether a signal (SIGSTOP, or a debugger's) has stopped the process, which lives and does nothing until SIGCONT.
    False where that cannot be seen."""
    found = _stat_fields(identity.pid)
    return found is not None and found[0] in ("T", "t") and is_alive(identity)


def parse_identity(found: Any) -> ProcessIdentity:
    """From the table of a state file. Raises ValueError for any other value."""
    match found:
        case {"pid": int(pid), "started": str(started), "host": str(host)} if 0 < pid < 2**31 and pid is not True:
            return ProcessIdentity(pid, started, host)
    raise ValueError("expected a table with pid, started and host")


def engine_process(directory: RunDirectory) -> ProcessIdentity | None:
    """The recorded engine, which works on the run or was killed while it did; None if the last one ended normally.
    Raises EnvironmentProblem if the record is damaged, OSError if it cannot be read."""
    try:
        return parse_identity(read_table(directory.engine))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise EnvironmentProblem(
            f"{directory.engine} cannot be read: {error}", fix="remove the file if this run has no running engine"
        ) from error


def running_engine(directory: RunDirectory) -> ProcessIdentity | None:
    """The recorded engine if it is alive on this machine; None also where the record cannot be read."""
    try:
        identity = engine_process(directory)
    except (EnvironmentProblem, OSError):
        return None
    return identity if identity is not None and is_alive(identity) else None


def record_engine(directory: RunDirectory, identity: ProcessIdentity) -> None:
    """Record who works on the run, so that others can find it and, if need be, kill it. Raises OSError."""
    write_atomically(directory.engine, json.dumps(asdict(identity)) + "\n")


def clear_engine(directory: RunDirectory) -> None:
    """Called when the engine ends normally."""
    directory.engine.unlink(missing_ok=True)


@contextmanager
def claim(directory: RunDirectory) -> Iterator[ProcessIdentity]:
    """Claim the run for this process inside the block, and remove what killed ones left. Raises EnvironmentProblem if
    another process has claimed it. If the process is killed inside the block, its recorded identity is left behind."""
    with _run_lock(directory):
        remove_abandoned_drafts(directory.path)
        began, identity = time.time(), identify_self()
        if not _is_recorded(directory, identity):
            record_engine(directory, identity)
        try:
            yield identity
        finally:
            clear_engine(directory)
            # What was there before and is there still: who started this engine was killed while he recorded it.
            remove_abandoned_drafts(directory.path, time.time() - began)


def _is_recorded(directory: RunDirectory, identity: ProcessIdentity) -> bool:
    """Whoever started this process has recorded it already: on a full disk it need not be written again."""
    try:
        return engine_process(directory) == identity
    except EnvironmentProblem:
        return False  # a damaged record, which is replaced


@contextmanager
def lock_after_engine(directory: RunDirectory) -> Iterator[None]:
    """Lock the run inside the block, to write the last event of an engine that is gone; unlike `claim`, the recorded
    engine stays. Raises EnvironmentProblem if an engine or another process holds the lock."""
    with _run_lock(directory):
        yield


def write_after_end(directory: RunDirectory, kind: str, **fields: Any) -> bool:
    """Append an event to the journal of a run that has ended. Returns False if a process works on it, or the disk is
    full."""
    try:
        with lock_after_engine(directory), EventWriter(directory) as writer:
            writer.write(kind, **fields)
    except (EnvironmentProblem, OSError):
        return False
    return True


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
        who = _holder(directory)
        raise EnvironmentProblem(
            f"another engine is running {directory.name}{who}",
            expected="one engine per run",
            fix=_way_past_engine(directory),
        ) from error
    except OSError as error:
        if error.errno not in NO_FILE_LOCKS:
            raise  # The lock file cannot be opened, which is as true of anything else in this folder.
        raise EnvironmentProblem(
            f"{directory.lock} cannot be locked: {error.strerror}",
            fix="put the runs on a file system that supports file locks",
        ) from error
    with lock:
        yield


def _way_past_engine(directory: RunDirectory) -> str:
    if was_requested(directory, "stop") or was_requested(directory, "pause"):
        return f"it is ending; wait with tunedeck wait {directory.name}, then repeat the command"
    return f"stop it first: tunedeck stop {directory.name}"


def _holder(directory: RunDirectory) -> str:
    try:
        holder = engine_process(directory)
    except (EnvironmentProblem, OSError):
        return ""
    stopped = ", suspended by a signal" if holder and is_suspended(holder) else ""
    return f" (process {holder.pid} on {holder.host}{stopped})" if holder else ""


def is_claimed(directory: RunDirectory) -> bool:
    """Whether a process holds the lock of `claim`, on any machine that shares the lock. Writes nothing, and a process
    that claims the run at this moment waits for microseconds."""
    try:
        with open_regular(directory.lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def changed_within(seconds: float, *paths: Path) -> bool:
    """Whether a file changed in the last `seconds`. A time in the future proves nothing: the clock was set back, or is
    another machine's."""
    return any(-seconds <= age <= seconds for path in paths if (age := _age(path)) is not None)


def _age(path: Path) -> float | None:
    """In seconds, below zero for a time in the future; None without the file."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return None


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
    fields = _stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}:{fields[19]}"


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of proc(5) stat from the process's state on; None without such a process, or without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()  # the command name may hold anything, even ')'


@dataclass(frozen=True)
class Attempt:
    """An engine at work."""

    kills: dict[str, int] = field(default_factory=dict)
    """Processes killed for memory in each control group before it started."""
    budget_bytes: int | None = None
    """Its micro-batch budget; None before the first probe."""
    killed_before: int = 0
    """Attempts in a row that were killed before their first probe, before this one."""


def _note(directory: RunDirectory) -> Path:
    return directory.path / "host_memory.json"


def note_attempt(directory: RunDirectory, attempt: Attempt) -> None:
    """Raises OSError. Removes what an engine left that was killed while it wrote its note."""
    note = _note(directory)
    write_atomically(note, json.dumps(asdict(attempt)))
    remove_drafts(note)


def forget_attempt(directory: RunDirectory) -> None:
    """To be called by an engine that ends and records why."""
    _note(directory).unlink(missing_ok=True)


def killed_attempt(directory: RunDirectory, proc: Path = PROC) -> Attempt | None:
    """The attempt whose engine the kernel killed for memory; None if there is none, or the kernel does not say."""
    try:
        attempt = Attempt(**json.loads(_note(directory).read_text("utf-8")))
        now = oom_kills(proc)
        return attempt if any(now.get(group, 0) > count for group, count in attempt.kills.items()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # no note, or one of another shape


def killed_text(directory: RunDirectory) -> str | None:
    """Words for an engine that was killed for memory, None for any other."""
    if killed_attempt(directory) is None:
        return None
    limit = memory_limit_bytes()
    whose = f"the container's limit of {limit / 2**20:,.0f} MiB" if limit else "the machine's memory"
    return f"was killed by the kernel because host memory ran out ({whose})"
