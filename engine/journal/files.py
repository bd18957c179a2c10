"""Small files that are written whole or not at all, and read within bounds whatever lies there; lock files."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import as_os_error


def write_atomically(path: Path, text: str, *, durable: bool = True, mode: int = 0o666) -> None:
    """Write `text` whole or not at all: a reader, or a crash, finds the old content or the new. Without `durable`, what
    a loss of power damages can be made again. Raises OSError; no temporary file is left."""
    while not _wrote_and_replaced(path, text, durable=durable, mode=mode):
        pass  # stopped for longer than ABANDONED_SECONDS in the middle, and taken for dead


def _wrote_and_replaced(path: Path, text: str, *, durable: bool, mode: int) -> bool:
    """False if another process has removed the temporary file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    # Unlike those of `tempfile`, readable as the umask says.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # an interrupt, too, leaves no temporary file
        was_removed = isinstance(error, FileNotFoundError) and not temporary.exists() and path.parent.is_dir()
        if was_removed:
            return False
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):
            error.filename = str(path)
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return True


def flush(path: Path) -> None:
    """Write a file, or a folder's list of files, from the operating system's memory to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_drafts(path: Path) -> None:
    """Remove what killed processes left of `write_atomically` for this path; one that is writing it now begins again.
    Raises OSError."""
    for draft in path.parent.glob(f".{path.name}.*.tmp"):
        draft.unlink(missing_ok=True)


ABANDONED_SECONDS = 60.0
"""Age of a draft whose process must be gone: it is written and renamed at once."""

_DRAFT = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")


def remove_abandoned_drafts(folder: Path, older_than_seconds: float = ABANDONED_SECONDS) -> None:
    """Remove what killed processes left of `write_atomically` anywhere in a folder. What cannot be removed stays."""
    for draft in folder.rglob(".*.tmp"):
        with suppress(OSError):
            if _DRAFT.fullmatch(draft.name) and time.time() - draft.lstat().st_mtime > older_than_seconds:
                draft.unlink()


REMOVING_SECONDS = 2.0
"""How long a process waits for another that removes drafts: anyone who may read the folder can keep it locked."""


@contextmanager
def making_drafts(folder: Path, remove: Callable[[bool], None], within: Path | None = None) -> Iterator[None]:
    """Create `folder`, but not `within`, which is missing where it was moved; and call `remove` to remove what killed
    processes left of drafts there; its argument says whether no other process makes one now. Inside the block, no other
    process removes those of this one: the lock on the folder ends with the process, however long that is stopped and
    whatever the clock says. Raises OSError."""
    if folder != within:
        folder.mkdir(parents=within is None, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove(_locked(opened, fcntl.LOCK_EX))
        until = time.monotonic() + REMOVING_SECONDS
        while not _locked(opened, fcntl.LOCK_SH) and time.monotonic() < until:
            time.sleep(0.02)  # another process removes drafts, of which it saw none of ours
        yield
    finally:
        os.close(opened)


def _locked(folder: int, kind: int) -> bool:
    """Lock an open folder without waiting; return whether that was possible. The lock ends with the process."""
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except OSError:  # another process makes a draft, or the file system has no locks
        return False
    return True


DRAFT_SUFFIX = ".draft"


@contextmanager
def held_draft(target: Path, within: Path | None = None) -> Iterator[Path]:
    """Yield a path next to `target` for a file or folder in the making, `.NAME-HEX.draft`, which the caller renames to
    `target`; what is left there when the block ends is removed. `within`: the folder of `target`, or the one above it,
    if it must be there already. Raises OSError."""

    def remove_killed(alone: bool) -> None:
        for draft in target.parent.glob(f".*{DRAFT_SUFFIX}") if alone else ():
            _remove(draft)

    with making_drafts(target.parent, remove_killed, within):
        draft = target.with_name(f".{target.name}-{secrets.token_hex(4)}{DRAFT_SUFFIX}")
        before = {parent: parent.stat().st_ino for parent in target.absolute().parents}
        try:
            yield draft
        except Exception as error:  # raised again: safetensors reports a full disk in words alone
            failed = as_os_error(error, target)
            if failed is None:
                raise
            raise failed from error
        finally:
            _remove(draft)
            remove_new_parents(before)


def remove_new_parents(before: Mapping[Path, int]) -> None:
    """Remove empty folders that a library made in place of those that were moved away; `before` has the inodes,
    innermost first."""
    with suppress(OSError):  # one is not empty, or is gone: those above it stay
        for parent, inode in before.items():
            if parent.stat().st_ino == inode:
                return
            parent.rmdir()


def _remove(path: Path) -> None:
    """What cannot be removed stays: the next process tries again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        with suppress(OSError):
            path.unlink()


MOST_BYTES = 64 << 20
"""Size of the largest file that is read as a whole."""

MOST_DIGITS = 40
"""Of a whole number in JSON: a longer one is no count, size or seed, and cannot be shown."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for what is no regular file: a FIFO would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path) -> bytes:
    """The content of a small file. Raises OSError if it cannot be read, ValueError if it is larger than MOST_BYTES."""
    with open_regular(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
    return data


def read_table(path: Path, *, finite: bool = True) -> dict[str, Any]:
    """The JSON object in a small file. Raises OSError or ValueError for anything else, and if `finite` for NaN."""
    found = decode_json(read_bounded(path), finite=finite)
    if not isinstance(found, dict):
        raise ValueError(f"expected a table, not {type(found).__name__}")
    return found


def decode_json(data: bytes, *, finite: bool = True) -> Any:
    """JSON in UTF-8, if `finite` strict. Raises ValueError for anything else, also for numbers that are too large, and
    nesting that is too deep to be read."""
    try:
        return (_STRICT if finite else _WITH_NAN).decode(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _bounded_whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:MOST_DIGITS]} is not finite")
    return value


_STRICT = json.JSONDecoder(parse_int=_bounded_whole, parse_float=_finite_number, parse_constant=_finite_number)
_WITH_NAN = json.JSONDecoder(parse_int=_bounded_whole)


@contextmanager
def locked(path: Path, *, timeout_seconds: float = -1.0) -> Iterator[None]:
    """Hold the lock file `path` inside the block; a negative timeout waits without a limit. The kernel releases the
    lock when the process ends for any reason; forked children do not hold it. Raises TimeoutError, or other OSErrors if
    the file cannot be locked or its folder is missing, which is not made."""
    descriptor = _lock_file(path, math.inf if timeout_seconds < 0 else time.monotonic() + timeout_seconds)
    _own_locks.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _own_locks:  # else this is a fork, which has closed it
            _own_locks.discard(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


LOCK_POLL_SECONDS = 0.05

_own_locks: set[int] = set()
"""The open lock files of this process."""


def _close_own_locks() -> None:
    while _own_locks:
        os.close(_own_locks.pop())


os.register_at_fork(after_in_child=_close_own_locks)


def _lock_file(path: Path, until: float) -> int:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # followed where it is moved meanwhile
    try:
        while (descriptor := _lock_now(path.name, folder)) is None:
            if time.monotonic() >= until:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), str(path))
            time.sleep(LOCK_POLL_SECONDS)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(folder)
    return descriptor


def _lock_now(name: str, folder: int) -> int | None:
    """Open and lock a file of an open folder; return its descriptor, None if another process has the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            raise
    os.close(descriptor)  # another process has the lock, or has removed the file
    return None
