"""Small files that are written whole or not at all, and read within bounds whatever lies there; lock files."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


def write_atomically(path: Path, text: str, *, durable: bool = True, mode: int = 0o666) -> None:
    """Write `text` whole or not at all: a reader, or a crash, finds the old content or the new. Without `durable`, what
    a loss of power damages can be made again. Raises OSError; no temporary file is left."""
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
        if isinstance(error, OSError) and error.filename in (None, temporary):
            error.filename = str(path)
        os.unlink(temporary)
        raise


def flush(path: Path) -> None:
    """Write a file, or a folder's list of files, from the operating system's memory to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_drafts(path: Path) -> None:
    """Remove what killed processes left of `write_atomically` for this path; no other process may be writing it. Raises
    OSError."""
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
        raise ValueError(f"a table was expected, not {type(found).__name__}")
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
        raise ValueError(f"a number of {len(text)} digits")
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
    the file cannot be locked."""
    from filelock import FileLock  # imported here: it takes longer than most commands that never lock

    with FileLock(path, timeout=timeout_seconds, poll_interval=0.05, thread_local=False):
        yield
