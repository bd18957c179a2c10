"""The tokenisation cache: token columns on disk, found by fingerprint, streamed to a temporary folder, renamed when
complete, memory-mapped when read.

An entry is a folder with .npy files, `drops.json` and `manifest.json` (size and CRC-32 of each file). Its name hashes
contents, never where they lie: the same data has the same name on every machine.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.tokens import Columns, ImageColumns
from engine.data.workers import COLUMN_DTYPES, Piece, SourceCount
from engine.errors import EnvironmentProblem
from engine.journal import files as journal_files

HASH_BYTES = 16
"""Bytes of a fingerprint, which is written as 32 hex digits."""


def hash_text(*parts: str) -> str:
    """BLAKE2b in hexadecimal. ("ab", "c") and ("a", "bc") have different hashes."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def hash_file(file: Path) -> str:
    """BLAKE2b of its contents, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=HASH_BYTES)).hexdigest()


def hash_files(files: Sequence[Path], digests: Sequence[str], root: Path | None = None) -> str:
    """Hash of the digests of `files`, in order, and of the paths relative to `root` (without one, the suffixes)."""
    parts = []
    for file, digest in zip(files, digests, strict=True):
        parts += [file.relative_to(root).as_posix() if root else "".join(file.suffixes), digest]
    return hash_text(*parts)


def make_cache_folder(folder: Path) -> None:
    """Raises EnvironmentProblem when the folder cannot be created or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"the cache folder {folder} cannot be written: {error.strerror}",
        fix="make it writable, or set TUNEDECK_CACHE to a writable folder",
    )


@contextmanager
def locked(entry: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a cache entry. If another process holds it, `notify` says so and this one waits without a limit;
    the operating system releases the lock of a killed process. Raises EnvironmentProblem: cache folder not writable."""
    make_cache_folder(entry.parent)
    path = entry.with_name(entry.name + ".lock")
    with ExitStack() as held:
        try:
            held.enter_context(journal_files.locked(path, timeout_seconds=0.0))
        except TimeoutError:
            notify("another process is preparing the same data; waiting for it")
            held.enter_context(journal_files.locked(path))
        except OSError as error:
            raise _not_writable(entry.parent, error) from error
        yield


IMAGE_COLUMNS = ("counts", "heights", "widths", "digests")
"""Columns of `ImageColumns`; on disk their names begin with image_."""

READ_BYTES = 1 << 20
"""Bytes per read while checking an entry."""


@dataclass(frozen=True)
class Store:
    """A finished entry of the token cache: its columns, and how many rows of each source were kept and dropped."""

    columns: Columns
    counts: list[SourceCount]


class _ColumnFile:
    """An .npy file that is appended to. Its header is written for 0 rows; `close` rewrites it with their number."""

    def __init__(self, path: Path, dtype: type[np.generic], count: int = 0) -> None:
        """Goes on behind the first `count` values of an existing file. Raises ValueError if it has fewer."""
        self.path, self.dtype, self.count = path, np.dtype(dtype), count
        self._stream = path.open("r+b" if count else "wb")
        if not count:
            self._write_header()
        self._header_bytes = self._length_of_header()
        end = self._header_bytes + count * self.dtype.itemsize
        if path.stat().st_size < end and count:
            self._stream.close()
            raise ValueError(f"{path.name} is shorter than {count:,} values")
        self._stream.seek(end)
        self._stream.truncate()

    def append(self, values: NDArray[Any]) -> None:
        self._stream.write(np.ascontiguousarray(values, self.dtype).tobytes())
        self.count += len(values)

    def sync(self) -> None:
        """Return once the appended values are on the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.seek(0)
        self._write_header()
        # numpy pads the header so that the number of rows fits; without that, the first rows would be overwritten.
        if self._stream.tell() != self._header_bytes:
            raise RuntimeError(f"numpy's header of {self.path.name} changed its size with the number of rows")
        self.sync()
        self._stream.close()

    def _length_of_header(self) -> int:
        self._stream.seek(0)
        if not self.count:
            self._write_header()
            return self._stream.tell()
        np.lib.format.read_magic(self._stream)
        np.lib.format.read_array_header_1_0(self._stream)
        return self._stream.tell()

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._stream, header)


COMMIT_SECONDS = 5.0
"""How often what was tokenised is made to stay: a process that is killed loses no more than this."""

PROGRESS = "progress.json"
"""Of an entry that is being built: the counts of its sources, and how many values of each column belong to them."""
PROGRESS_DRAFT = f"{PROGRESS}.part"


class StoreWriter:
    """Writes documents into a folder as they arrive, so that host memory does not grow with the data. Goes on where an
    earlier process was killed."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError, OSError, KeyError or TypeError for a folder that cannot be gone on with."""
        self.folder = folder
        found: dict[str, Any] = {"columns": {}, "counts": []}
        if (folder / PROGRESS).exists():
            found = json.loads((folder / PROGRESS).read_text())
        self.counts = [SourceCount(**count) for count in found["counts"]]
        self.continued = sum(count.read for count in self.counts)
        """Rows that an earlier process tokenised."""
        self._files: dict[str, _ColumnFile] = {}
        for name, dtype in COLUMN_DTYPES.items():
            self._files[name] = _ColumnFile(folder / f"{name}.npy", dtype, int(found["columns"].get(name, 0)))
        if not self._files["offsets"].count:
            self._files["offsets"].append(np.zeros(1))
        self._committed = time.monotonic()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        for file in self._files.values():
            file.close()
        (self.folder / "drops.json").write_text(json.dumps([asdict(count) for count in self.counts]))
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def add_source(self, number: int, name: str, format_name: str, pieces: Callable[[int], Iterable[Piece]]) -> None:
        """`pieces` gives those of the source's rows from a row on, in row order. `number` of the source, from 0."""
        if number == len(self.counts):
            self.counts.append(SourceCount(name, format_name))
        elif number < len(self.counts) - 1:
            return  # the source after it was begun
        count = self.counts[number]
        for piece in pieces(count.read):
            count.include(piece.count)
            self._append(piece, number)
            if time.monotonic() - self._committed >= COMMIT_SECONDS:
                self._commit()

    def _append(self, piece: Piece, source: int) -> None:
        before = self._files["ids"].count
        for name, values in piece.columns.items():
            self._files[name].append(values + before if name == "offsets" else values)
        self._files["sources"].append(np.full(len(piece.columns["origins"]), source))

    def _commit(self) -> None:
        for file in self._files.values():
            file.sync()
        columns = {name: file.count for name, file in self._files.items()}
        draft = self.folder / PROGRESS_DRAFT
        with draft.open("w") as stream:
            json.dump({"columns": columns, "counts": [asdict(count) for count in self.counts]}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self.folder / PROGRESS)
        self._committed = time.monotonic()


def cached_store(entry: Path, build: Callable[[StoreWriter], None], notify: Callable[[str], None]) -> Store:
    """Open a cache entry, built first by `build` if it is missing or damaged, while other processes wait. A failed
    build leaves no files. Raises EnvironmentProblem when the cache cannot be written."""
    with locked(entry, notify):
        if entry.exists():
            problem = damage(entry)
            if problem is None:
                return _open(entry)
            notify(f"the cached tokens are damaged ({problem}) and will be rebuilt")
            shutil.rmtree(entry)
        _build(entry, build, notify)
        return _open(entry)


def damage(entry: Path) -> str | None:
    """Check all files of an entry against its manifest; the first damage, None if there is none."""
    try:
        manifest = json.loads((entry / "manifest.json").read_text())
        for name, (size, checksum) in manifest.items():
            path = entry / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, not {size}"
            if _checksum(path) != checksum:
                return f"{name} has changed"
        missing = {f"{name}.npy" for name in COLUMN_DTYPES} - set(manifest)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return str(error)
    return f"the manifest lacks {', '.join(sorted(missing))}" if missing else None


def _build(entry: Path, build: Callable[[StoreWriter], None], notify: Callable[[str], None]) -> None:
    """What a killed process left is gone on with: this process has the lock, so no other is writing."""
    draft = entry.with_name(f".{entry.name}-draft")
    try:
        with _writer(draft, notify) as writer:
            build(writer)
        files = [draft / "drops.json", *(draft / f"{name}.npy" for name in COLUMN_DTYPES)]
        manifest = {path.name: (path.stat().st_size, _checksum(path)) for path in sorted(files)}
        (draft / PROGRESS_DRAFT).unlink(missing_ok=True)  # of a killed process
        (draft / "manifest.json").write_text(json.dumps(manifest))
        draft.rename(entry)
    except EnvironmentProblem:
        raise  # a killed worker: what was tokenised stays
    except Exception:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _writer(draft: Path, notify: Callable[[str], None]) -> StoreWriter:
    draft.mkdir(exist_ok=True)
    try:
        writer = StoreWriter(draft)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # The folder is damaged, by a power cut for example: nothing in it is worth more than tokenising again.
        shutil.rmtree(draft)
        draft.mkdir()
        writer = StoreWriter(draft)
    if writer.continued:
        notify(f"continuing after {writer.continued:,} rows that an earlier process tokenised")
    return writer


def _open(entry: Path) -> Store:
    # asarray makes plain arrays of the mapped pages: slicing a `numpy.memmap` takes ten times as long.
    columns = {name: np.asarray(np.load(entry / f"{name}.npy", mmap_mode="r")) for name in COLUMN_DTYPES}
    counts = [SourceCount(**count) for count in json.loads((entry / "drops.json").read_text())]
    images = ImageColumns(**{name: columns.pop(f"image_{name}") for name in IMAGE_COLUMNS})
    return Store(Columns(**columns, images=images if len(images.digests) else None), counts)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            value = zlib.crc32(block, value)
    return value
