"""Rows of JSON and CSV files and lines of text, each read from the bytes that the file has for it.

Where the rows are is found once, kept in the cache folder under the digest of the file, and mapped into memory. Nothing
is kept under a path or a time of change, so a file that was replaced is read again."""

from __future__ import annotations

import bisect
import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.config.files.caches import cache_folder
from engine.data.csv_files import QUOTE_FIX, CsvLayout, find_records, layout_of
from engine.data.json_rows import NO_OBJECT_FIX, SKIP_FIX, FoundRow, find_json_rows, parse_row
from engine.data.records import PLACES, ROW_TOO_LARGE, Screened, conversion
from engine.data.store import hash_file, hash_text
from engine.errors import DataError

Kind = Literal["json", "csv", "line"]

INDEX_VERSION = "rows 1"
"""Part of the name of an index. Increase it when other rows are found."""

AT_ONCE = 1 << 16
"""Numbers of an index that are in memory while it is written."""


@dataclass
class Index:
    """What is known of the rows of one file."""

    count: int = 0
    columns: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that cannot be used, by reason."""
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Lines of the first of them."""
    problem: str = ""
    """The first such row that ends the reading unless `data.broken` says otherwise: where it is, and what is wrong."""

    def note(self, found: FoundRow) -> None:
        """Count a row that cannot be used."""
        self.dropped[found.reason] = self.dropped.get(found.reason, 0) + 1
        if len(self.lines.setdefault(found.reason, [])) < PLACES:
            self.lines[found.reason].append(found.line)
        if not self.problem and found.reason != ROW_TOO_LARGE:
            self.problem = found.problem


@dataclass(frozen=True)
class FilePart:
    """One of the files of a source."""

    file: Path
    reads: Path
    """The file itself, or a copy that is not compressed and has no lines beyond the bounds."""
    digest: str
    """Of the file's contents."""
    kind: Kind
    layout: CsvLayout | None
    spans: Path
    """The index: int64[rows, 3], the first byte of each row, the byte after its last, and the number of its line."""
    count: int

    def parse(self, raw: bytes) -> dict[str, Any]:
        """Return the row that these bytes of the file are."""
        if self.layout is not None:
            return dict(self.layout.parse(raw))
        return parse_row(raw) if self.kind == "json" else {"text": _line_text(raw)}


class FileRows:
    """The rows of files, in order. Slices are lists of rows; each row has the keys that it has in its file."""

    in_lists = True

    def __init__(
        self, parts: Sequence[FilePart], columns: Sequence[str], first: int = 0, stop: int | None = None
    ) -> None:
        """The rows from number `first` to before `stop` of all parts together."""
        self.parts, self.columns = list(parts), list(columns)
        self._ends = list(accumulate(part.count for part in self.parts))
        self.first, self.stop = first, self._ends[-1] if stop is None else stop
        self._stamps = {number: _stamp(part.reads) for number, part in enumerate(self.parts)}

    def __len__(self) -> int:
        return self.stop - self.first

    def section(self, start: int, stop: int) -> FileRows:
        """Return the rows from `start` to before `stop` without reading them."""
        return FileRows(self.parts, self.columns, self.first + start, self.first + stop)

    def __getitem__(self, rows: slice) -> list[dict[str, Any]]:
        start, stop, _ = rows.indices(len(self))
        return [row for number, spans in self._spans(start, stop) for row in self._read(number, spans)]

    def nbytes(self, start: int, stop: int) -> int:
        """Return the bytes of the rows from `start` to before `stop` in their files."""
        return sum(int((spans[:, 1] - spans[:, 0]).sum()) for _, spans in self._spans(start, stop))

    def places(self, rows: Sequence[int]) -> list[str]:
        """Return `FILE:LINE` of rows."""
        found = (next(self._spans(row, row + 1)) for row in rows)
        return [f"{self.parts[number].file}:{spans[0, 2]}" for number, spans in found]

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the number of each part that has some of these rows, and their spans."""
        start, stop = start + self.first, min(stop + self.first, self.stop)
        while start < stop:
            number = bisect.bisect_right(self._ends, start)
            part, before = self.parts[number], self._ends[number] - self.parts[number].count
            end = min(stop, self._ends[number])
            yield number, _index_of(part.spans)[start - before : end - before]
            start = end

    def _read(self, number: int, spans: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        part = self.parts[number]
        with part.reads.open("rb") as stream:
            self._require_unchanged(number, os.fstat(stream.fileno()))
            for start, stop in spans[:, :2].tolist():
                stream.seek(start)
                yield part.parse(stream.read(stop - start))

    def _require_unchanged(self, number: int, status: os.stat_result) -> None:
        """Raise DataError if the file that was hashed has other contents now."""
        part, stamp = self.parts[number], _stamp_of(status)
        if stamp == self._stamps[number]:
            return
        if part.reads == part.file and hash_file(part.file) != part.digest:
            raise DataError(f"{part.file} was changed while it was read", fix="start again when it is complete")
        self._stamps[number] = stamp


def _stamp(file: Path) -> tuple[int, int, int]:
    return _stamp_of(file.stat())


def _stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


@lru_cache(maxsize=256)
def _index_of(spans: Path) -> NDArray[np.int64]:
    if not spans.stat().st_size:
        return np.empty((0, 3), np.int64)
    return np.asarray(np.memmap(spans, np.int64, mode="r")).reshape(-1, 3)


def _line_text(raw: bytes) -> str:
    return raw.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")


def open_file_rows(
    screened: Sequence[Screened], reads: Sequence[Path], digests: Sequence[str], kind: Kind, *, skip: bool,
    separators: Sequence[str] = (),
) -> FileRows:  # fmt: skip
    """Open the rows of files. `reads` is what is read of each of `screened`, not compressed; `digests` are of their
    contents, `separators` of CSV files. Rows that cannot be used are counted in `screened`. Raises DataError for the
    first of them unless `skip`."""
    parts, columns = [], dict[str, None]()
    for number, (each, read, digest) in enumerate(zip(screened, reads, digests, strict=True)):
        layout = layout_of(read, separators[number]) if kind == "csv" else None
        key = hash_text(INDEX_VERSION, kind, repr(layout), repr(each.dropped))[:16]
        spans = cache_folder() / "screened" / f"{digest}-{key}.rows"
        index = _known(spans) or _write_index(spans, _found(read, kind, layout), layout)
        if index.problem and not skip:
            raise _refusal(each.file, kind, index)
        for reason, count in index.dropped.items():
            each.dropped[reason] = each.dropped.get(reason, 0) + count
            each.lines[reason] = [*each.lines.get(reason, []), *index.lines[reason]][:PLACES]
        columns |= dict.fromkeys(index.columns)
        parts.append(FilePart(each.file, read, digest, kind, layout, spans, index.count))
    return FileRows(parts, list(columns))


def _refusal(file: Path, kind: Kind, index: Index) -> DataError:
    fix = QUOTE_FIX if kind == "csv" else NO_OBJECT_FIX if "an object was expected" in index.problem else SKIP_FIX
    if "not UTF-8" in index.problem:
        fix = f"{conversion(file)}; or {SKIP_FIX}"
    return DataError(f"{file}{index.problem}", fix=fix)


def _found(file: Path, kind: Kind, layout: CsvLayout | None) -> Iterator[FoundRow]:
    if layout is not None:
        return find_records(file, layout)
    return find_json_rows(file) if kind == "json" else _find_lines(file)


def _find_lines(file: Path) -> Iterator[FoundRow]:
    """Yield the lines of a text. Raises UnicodeDecodeError where it is not UTF-8."""
    start = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            line.decode()
            yield FoundRow(start, start + len(line), number, ("text",))
            start += len(line)


def _known(spans: Path) -> Index | None:
    """Return what an earlier process found; None if that cannot be used."""
    try:
        index = Index(**json.loads(spans.with_suffix(".json").read_text()))
        return index if spans.stat().st_size == 24 * index.count else None
    except (OSError, ValueError, TypeError):
        return None


def _write_index(spans: Path, found: Iterator[FoundRow], layout: CsvLayout | None) -> Index:
    index = Index(columns=list(layout.columns if layout else ()))
    with tempfile.TemporaryDirectory(dir=spans.parent) as folder:
        draft = Path(folder, spans.name)
        with draft.open("wb") as stream:
            _write_spans(stream, found, index)
        note = draft.with_suffix(".json")
        note.write_text(json.dumps(asdict(index)))
        draft.replace(spans)
        note.replace(spans.with_suffix(".json"))
    return index


def _write_spans(stream: IO[bytes], found: Iterator[FoundRow], index: Index) -> None:
    columns, numbers = dict.fromkeys(index.columns), array("q")
    for row in found:
        if row.reason:
            index.note(row)
            continue
        index.count += 1
        columns |= dict.fromkeys(row.columns)
        numbers.extend((row.start, row.stop, row.line))
        if len(numbers) >= AT_ONCE:
            stream.write(numbers.tobytes())
            del numbers[:]
    stream.write(numbers.tobytes())
    index.columns = list(columns)
