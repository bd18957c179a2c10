"""The cache folder, the lock on one entry of it, and the hashes that name entries. Contents belong to `store`.

The folder is the platform's user cache, or $TUNEDECK_CACHE. Hashes cover contents, never paths: the same data has the
same name on every machine.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from engine.errors import EnvironmentProblem

HASH_BYTES = 16
"""Bytes of a fingerprint; 128 bits, shown as 32 hex digits."""


def cache_folder() -> Path:
    """Where tokens and the tables of `datasets` are kept: $TUNEDECK_CACHE, else the user's cache folder."""
    return Path(os.environ.get("TUNEDECK_CACHE") or platformdirs.user_cache_dir("tunedeck")).expanduser()


def hash_text(*parts: str) -> str:
    """Fingerprint of some texts, in order; where one ends and the next begins counts."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def hash_files(files: Sequence[Path], root: Path | None = None) -> str:
    """Fingerprint of the contents of files, in order; with `root`, of their names below it too."""
    parts = []
    for file in files:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=HASH_BYTES))
        parts += [file.relative_to(root).as_posix() if root else "".join(file.suffixes), digest.hexdigest()]
    return hash_text(*parts)


def make_cache_folder(folder: Path) -> None:
    """Make a folder of the cache. Raises EnvironmentProblem when it cannot be made or written."""
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
def locked(entry: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of one cache entry; a second process waits here, without a limit, and says so.

    The operating system drops the lock with the process, so a killed one leaves nothing to clean up.
    Raises EnvironmentProblem when the cache folder cannot be written.
    """
    make_cache_folder(entry.parent)
    try:
        handle = os.open(entry.with_name(entry.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _not_writable(entry.parent, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is preparing the same data; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
