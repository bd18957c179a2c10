"""The cache folder, the lock of a cache entry, and the hashes that name entries. Entries are written in `store`.

The folder is `engine.spec.files.user_folders.cache_folder()`. Hashes cover contents, never paths: the same data has
the same name on every machine.

Try: `python -m pytest tests/data/test_prepare.py`
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from engine.errors import EnvironmentProblem

HASH_BYTES = 16
"""Bytes of a fingerprint, which is written as 32 hex digits."""


def hash_text(*parts: str) -> str:
    """BLAKE2b hash of a sequence of texts, in hexadecimal. ("ab", "c") and ("a", "bc") have different hashes."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def hash_files(files: Sequence[Path], root: Path | None = None) -> str:
    """BLAKE2b hash, in hexadecimal, of the contents of `files`, in order. It also covers the files' paths relative to
    `root`, or, without `root`, their suffixes."""
    parts = []
    for file in files:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=HASH_BYTES))
        parts += [file.relative_to(root).as_posix() if root else "".join(file.suffixes), digest.hexdigest()]
    return hash_text(*parts)


def make_cache_folder(folder: Path) -> None:
    """Create a folder of the cache. Raises EnvironmentProblem when it cannot be created or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"the cache folder {folder} cannot be written: {error.strerror}",
        fix="make it writable, or set TUNEDECK_CACHE to a folder that is",
    )


@contextmanager
def locked(entry: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of the cache entry `entry` while the block runs. If another process holds it, `notify` is called
    with a sentence that says so, and this process waits without a time limit.

    The operating system releases the lock of a process that is killed. Raises EnvironmentProblem when the cache folder
    cannot be written.
    """
    make_cache_folder(entry.parent)
    lock = FileLock(entry.with_name(entry.name + ".lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        notify("another process is preparing the same data; waiting for it")
        lock.acquire()
    except OSError as error:
        raise _not_writable(entry.parent, error) from error
    try:
        yield
    finally:
        lock.release()
