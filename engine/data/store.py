"""The cache of token columns on disk: found by fingerprint, streamed to a temporary folder, renamed when complete,
memory-mapped when read.

An entry is a folder with .npy files, `drops.json` and `manifest.json` (size and CRC-32 of each file). Its name hashes
contents, never where they lie: the same data has the same name on every machine.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from engine.data.tokenise import Document, RowResult
from engine.data.tokens import Columns, ImageColumns
from engine.errors import EnvironmentProblem

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
        fix="make it writable, or set TUNEDECK_CACHE to a folder that is",
    )


@contextmanager
def locked(entry: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a cache entry. If another process holds it, `notify` says so and this one waits without a limit;
    the operating system releases the lock of a killed process. Raises EnvironmentProblem: cache folder not writable."""
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


COLUMN_DTYPES: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "targets": np.bool_,
    "offsets": np.int64,
    "target_counts": np.int32,
    "sources": np.int16,
    "origins": np.int64,
    "answer_starts": np.int32,
    "answer_ends": np.int32,
    "image_counts": np.int32,
    "image_heights": np.int32,
    "image_widths": np.int32,
    "image_digests": np.uint64,
}

IMAGE_COLUMNS = ("counts", "heights", "widths", "digests")
"""Columns of `ImageColumns`; on disk their names begin with image_."""

READ_BYTES = 1 << 20
"""Bytes per read while checking an entry."""

ROWS_PER_REASON = 5
"""Dropped rows that are named for each reason."""

MAX_REASONS, OTHER_REASONS = 50, "other reasons"
"""Most drop reasons counted separately per source, and the name for all others. A template's error may quote the row,
which would make every reason different."""


@dataclass
class SourceCount:
    """How many rows of a source were read, kept, truncated and dropped."""

    name: str
    format: str
    read: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows by reason."""
    dropped_rows: dict[str, list[int]] = field(default_factory=dict)
    """The first rows dropped for each reason, counted from 0."""
    dropped_at: dict[str, list[str]] = field(default_factory=dict)
    """Files and lines of `dropped_rows`; filled in after the cache is read, because the files may be moved."""
    dropped_turns: dict[str, int] = field(default_factory=dict)
    """Assistant turns of rows that are kept, by reason."""
    chat: dict[str, int] = field(default_factory=dict)
    """Counts by the names in `engine.data.report.CHAT_FACTS`."""

    def add(self, result: RowResult) -> None:
        """Every row counts as either kept or dropped."""
        self.read += 1
        self.truncated += sum(document.truncated for document in result.documents)
        if result.documents:
            self.kept += 1
            for fact, number in result.facts.items():
                self.chat[fact] = self.chat.get(fact, 0) + number
            for reason in result.dropped:
                self.dropped_turns[reason] = self.dropped_turns.get(reason, 0) + 1
            return
        reason = result.dropped[0]
        if reason not in self.dropped and len(self.dropped) >= MAX_REASONS:
            reason = OTHER_REASONS
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if len(self.dropped_rows.setdefault(reason, [])) < ROWS_PER_REASON:
            self.dropped_rows[reason].append(self.read - 1)


@dataclass(frozen=True)
class Store:
    """A finished entry of the token cache: its columns, and how many rows of each source were kept and dropped."""

    columns: Columns
    counts: list[SourceCount]


class _ColumnFile:
    """An .npy file that is appended to. Its header is written for 0 rows; `close` rewrites it with their number."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self.path, self.dtype, self.count = path, np.dtype(dtype), 0
        self._stream = path.open("wb")
        self._write_header()
        self._header_bytes = self._stream.tell()

    def append(self, values: NDArray[Any]) -> None:
        self._stream.write(np.ascontiguousarray(values, self.dtype).tobytes())
        self.count += len(values)

    def close(self) -> None:
        self._stream.seek(0)
        self._write_header()
        # numpy pads the header so that the number of rows fits; without that, the first rows would be overwritten.
        if self._stream.tell() != self._header_bytes:
            raise RuntimeError(f"numpy's header of {self.path.name} changed its size with the number of rows")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._stream, header)


class StoreWriter:
    """Writes documents into a folder as they arrive, so that host memory does not grow with the data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: list[SourceCount] = []
        self._files = {name: _ColumnFile(folder / f"{name}.npy", dtype) for name, dtype in COLUMN_DTYPES.items()}
        self._files["offsets"].append(np.zeros(1))

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        if kind is None:
            (self.folder / "drops.json").write_text(json.dumps([asdict(count) for count in self.counts]))

    def add_source(self, name: str, format_name: str, results: Iterable[list[RowResult]]) -> None:
        """`results` are those of the source's rows in batches, in row order."""
        count = SourceCount(name, format_name)
        self.counts.append(count)
        for batch in results:
            for result in batch:
                count.add(result)
            if documents := [document for result in batch for document in result.documents]:
                self._append(documents, len(self.counts) - 1)

    def _append(self, documents: list[Document], source: int) -> None:
        ends = self._files["ids"].count + np.cumsum([len(document.ids) for document in documents])
        self._files["ids"].append(np.concatenate([document.ids for document in documents]))
        self._files["targets"].append(np.concatenate([document.targets for document in documents]))
        self._files["offsets"].append(ends)
        self._files["target_counts"].append(np.array([int(document.targets.sum()) for document in documents]))
        self._files["sources"].append(np.full(len(documents), source))
        self._files["origins"].append(np.array([document.origin for document in documents]))
        self._files["answer_starts"].append(np.array([document.answer[0] for document in documents]))
        self._files["answer_ends"].append(np.array([document.answer[1] for document in documents]))
        self._files["image_counts"].append(np.array([len(document.images) for document in documents]))
        images = [image for document in documents for image in document.images]
        self._files["image_heights"].append(np.array([image.height for image in images]))
        self._files["image_widths"].append(np.array([image.width for image in images]))
        self._files["image_digests"].append(np.array([image.digest for image in images], np.uint64))


def cached_store(entry: Path, build: Callable[[StoreWriter], None], notify: Callable[[str], None]) -> Store:
    """Open a cache entry, built first by `build` if it is missing or damaged, while other processes wait. A failed
    build leaves no files. Raises EnvironmentProblem when the cache cannot be written."""
    with locked(entry, notify):
        if entry.exists():
            problem = damage(entry)
            if problem is None:
                return _open(entry)
            notify(f"the cached tokens are damaged ({problem}) and are built again")
            shutil.rmtree(entry)
        _build(entry, build)
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


def _build(entry: Path, build: Callable[[StoreWriter], None]) -> None:
    for abandoned in entry.parent.glob(f".{entry.name}-*"):
        # A process was killed while it built this folder: this process has the lock, so no other is writing.
        shutil.rmtree(abandoned)
    draft = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        with StoreWriter(draft) as writer:
            build(writer)
        manifest = {path.name: (path.stat().st_size, _checksum(path)) for path in sorted(draft.iterdir())}
        (draft / "manifest.json").write_text(json.dumps(manifest))
        draft.rename(entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


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
