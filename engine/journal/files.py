"""Writes and locks small files that several processes use at the same time; a file is written whole or not at all.

Used for requests, identities and specs; events have a writer of their own (`engine.journal.events`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` whole or not at all: a reader, or a crash, finds the old content or the new. Raises
    OSError; no temporary file is left behind."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except BaseException:  # an interrupt, too, leaves no temporary file
        os.unlink(temporary)
        raise


@contextmanager
def locked(path: Path, *, timeout_seconds: float = -1.0) -> Iterator[None]:
    """Hold the lock file `path` for this process until the block ends; a negative timeout waits without a limit.

    The kernel releases the lock when the process ends for any reason; the file is not deleted. Forked children do not
    hold the lock. Raises TimeoutError if another process holds the lock longer than the timeout, other OSErrors if the
    file cannot be locked.
    """
    from filelock import FileLock  # imported here: it takes longer than most commands that never lock

    with FileLock(path, timeout=timeout_seconds, poll_interval=0.05, mode=0o644, thread_local=False):
        yield
