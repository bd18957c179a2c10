"""The rows of a source, and the records that formats make of them."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

from engine.config.schema.data import Source
from engine.data.arrow_values import Shape, plain
from engine.errors import DataError


@dataclass(frozen=True)
class TextRecord:
    """Plain text, all of it targets: a document, or a part of one."""

    text: str
    starts: bool = True
    ends: bool = True


@dataclass(frozen=True)
class PairRecord:
    """A prompt, and the completion, whose tokens are the targets."""

    prompt: str
    completion: str
    has_markers: bool = False
    """Whether the texts carry the markers of the chat template already."""


@dataclass(frozen=True)
class TokenRecord:
    """A row that is tokens already."""

    ids: tuple[int, ...]
    targets: tuple[bool, ...]


@dataclass(frozen=True)
class ChatRecord:
    """A conversation: turns with role and content (text, or parts {"type": "text", "text": …} and {"type": "image"}),
    and the tools that it may use."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    images: tuple[ImageReference, ...] = ()
    """The conversation's images, in the order of its image parts."""
    untrained: frozenset[int] = frozenset()
    """Numbers of the assistant messages that are context and no targets."""
    from_pair: bool = False
    """Whether the row has a prompt and a completion."""
    context: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By number of an assistant message: ranges of characters of its content that are context and no targets."""
    asked: int = 0
    """Turns of other roles that ask to be learned (train, weight), which they are not."""
    tools_wrapped: bool = False
    """Whether the row has its tools or calls in another shape than that of OpenAI's API."""


@dataclass(frozen=True)
class ImageReference:
    """An image of a row: the bytes of an encoded file, or the path of one."""

    path: str | None = None
    data: bytes | None = None


@dataclass(frozen=True)
class Dropped:
    """Takes the place of a row, or of one turn, that is left out. The report counts these by reason."""

    reason: str


Record = TextRecord | PairRecord | ChatRecord | TokenRecord

NO_TARGET = "no target token"
"""Drop reason."""


def _zstandard(file: Path) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))


COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": _zstandard,
}

UNPACKING_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)


def find_not_utf8(files: Mapping[Path, Path]) -> tuple[Path, int] | None:
    """(file, line from 1) of the first text that is not UTF-8; None also for what cannot be unpacked. `files` maps
    each to the one that is read in its place."""
    for file, reads in files.items():
        with suppress(*UNPACKING_ERRORS), open_unpacked(reads) as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    return file, number
    return None


GUESSED_BYTES = 1 << 20
"""Read of a file to guess its encoding."""
NOT_IN_WINDOWS = {0x81, 0x8D, 0x8F, 0x90, 0x9D}
"""Bytes that are no characters of Windows-1252."""


def conversion(file: Path) -> str:
    """What to do about a file that is not UTF-8. Windows-1252, in which Excel writes CSV files, is a guess, and Latin-1
    where it has no such characters; UTF-16 shows in the file's first bytes. `tunedeck data` then shows what is in
    it."""
    with open_unpacked(file) as stream:
        text = stream.read(GUESSED_BYTES)
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "utf-16" if text.startswith(marks) else "latin1" if NOT_IN_WINDOWS & set(text) else "windows-1252"
    made = f"{file.name.partition('.')[0]}-utf8{''.join(file.suffixes)}"
    return f"convert it: iconv -f {encoding} -t utf-8 {shlex.quote(str(file))} > {shlex.quote(made)}"


def open_unpacked(file: Path) -> IO[bytes]:
    """A file's contents, unpacked by its suffix."""
    suffix = file.suffix.lower()
    opened: IO[bytes] = COMPRESSED[suffix](file) if suffix in COMPRESSED else file.open("rb")
    return opened


ROWS_AT_ONCE = 512
"""Most rows held in memory while streaming."""

ROW_BYTES, ROW_IMAGE_BYTES = 16 << 20, 256 << 20
"""Largest row without and with the bytes of its images, and the most of several rows held in memory."""

ROW_TOO_LARGE = f"a row of more than {ROW_BYTES >> 20} MiB, or {ROW_IMAGE_BYTES >> 20} MiB with its images"


@dataclass
class Screened:
    """A data file, what is read in its place, and what was left out (`engine.data.bounds`)."""

    file: Path
    reads: Path
    """The file itself, or a copy without the lines that are left out."""
    kept: int = 0
    """Lines that are not blank and not left out; 0 for a file that is not read by lines."""
    unpacked: int = 0
    """Bytes read of the file, unpacked."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Lines left out, by reason."""
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Numbers, from 1, of the first lines left out for each reason."""

    def leave_out(self, reason: str, line: int) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if len(self.lines.setdefault(reason, [])) < PLACES:
            self.lines[reason].append(line)

    def places(self, reason: str) -> list[str]:
        """`FILE:LINE` of the first lines left out for a reason."""
        return [f"{self.file}:{line}" for line in self.lines[reason]]


PLACES = 5
"""Lines that are named for each reason."""


@dataclass(frozen=True)
class Origin:
    """The files that the rows of a source come from, for a second reading."""

    files: Sequence[Path]
    kind: Literal["json", "csv", "line", "parquet", "arrow"]
    separators: Sequence[str] = ()
    """Of CSV files."""
    first: int = 0
    """Number, among the rows of all files, of the source's first row."""
    kept: Sequence[Path] = ()
    """What the cache folder has of the files' rows."""


@dataclass(frozen=True)
class SourceRows:
    """The rows of a source, read on demand."""

    columns: list[str]
    count: int
    fingerprint: str
    """Hash of the contents, independent of where the files lie."""
    table: Any
    """A `datasets.Dataset`, a list of rows, or `FileRows` or `Documents`, whose slices are lists."""
    explain: Callable[[BaseException], DataError] | None = None
    """Turns an exception from reading a row into the error to show; None for a list of rows, which is in memory."""
    left_out: Sequence[Screened] = ()
    """Files with lines that are not among the rows, as they are beyond the bounds of `engine.data.bounds`."""
    image_columns: Sequence[str] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Of columns whose stored values are not yet those of the rows."""
    notices: Sequence[str] = ()
    """What the reader left aside or assumed, as sentences."""
    origin: Origin | None = None
    """None where the rows are not those of local files."""
    in_files: int | None = None
    """Rows of the split's files; None where these are `count`, before the source's `limit`."""

    @property
    def available(self) -> int:
        """Rows of the files, of which the source's slice and limit take `count`."""
        return self.count if self.in_files is None else self.in_files

    @property
    def in_lists(self) -> bool:
        """Whether slices of the table are lists of rows."""
        return isinstance(self.table, list) or hasattr(self.table, "in_lists")

    def places(self, rows: Sequence[int]) -> list[str]:
        """`FILE:LINE`, or the number of the row, counted from 1."""
        if hasattr(self.table, "places"):
            return list(self.table.places(rows))
        return [f"row {row + 1}" for row in rows]

    def numbered(self, column: str) -> SourceRows:
        """Return the same rows with numbers in a column of classes, in place of their names."""
        return replace(self, shapes={name: shape for name, shape in self.shapes.items() if name != column})

    def batches(self, size: int = ROWS_AT_ONCE) -> Iterator[list[dict[str, Any] | Dropped]]:
        """All rows in order, as lists of up to `size` rows and ROW_BYTES bytes."""
        return (self.rows(start, stop) for start, stop in self.spans(size=size))

    def spans(self, first: int = 0, size: int = ROWS_AT_ONCE) -> Iterator[tuple[int, int]]:
        """The rows from `first` on in order, as (row, row after the last) of up to `size` rows and ROW_BYTES bytes."""
        for start in range(first, self.count, size):
            yield from self._parted(start, min(start + size, self.count))

    def _parted(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        if stop - start == 1 or self._fits(start, stop):
            yield start, stop
            return
        middle = (start + stop) // 2
        yield from self._parted(start, middle)
        yield from self._parted(middle, stop)

    def _fits(self, start: int, stop: int) -> bool:
        """Whether these rows may be in memory at once."""
        if self.in_lists:
            return not hasattr(self.table, "nbytes") or self.table.nbytes(start, stop) <= ROW_BYTES
        part = self._arrow[start:stop]
        plain = part.drop_columns(list(self.image_columns)).nbytes
        return bool(plain <= ROW_BYTES and part.nbytes <= ROW_IMAGE_BYTES)

    def rows(self, start: int, stop: int) -> list[dict[str, Any] | Dropped]:
        """A row is a dict by column, or Dropped where it is larger than a row may be."""
        if self.in_lists:
            return [self._plain(row) for row in self.table[start:stop]]
        if stop - start == 1 and not self._fits(start, stop):
            return [Dropped(ROW_TOO_LARGE)]
        return list(self._decoded(start, stop))

    @cached_property
    def _arrow(self) -> Any:
        """The same table, whose slices are not decoded."""
        return self.table.with_format("arrow")

    def row(self, number: int) -> dict[str, Any]:
        """Counted from 0, a dict by column. Images stay undecoded. Raises DataError for text that is not UTF-8."""
        if self.in_lists:
            (row,) = self.table[number : number + 1]
            return self._plain(row)
        (row,) = self._decoded(number, number + 1)
        return row

    def _plain(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, **{name: plain(row[name], shape) for name, shape in self.shapes.items() if name in row}}

    def _decoded(self, start: int, stop: int) -> list[dict[str, Any]]:
        part = self._arrow[start:stop]
        try:
            columns = {
                name: [plain(value, self.shapes.get(name)) for value in part.column(name).to_pylist()]
                for name in self.columns
            }
        except UnicodeDecodeError as error:
            # Arrow stores strings as bytes and decodes them only when they are read.
            if self.explain is None:
                raise
            raise self.explain(error) from error
        return [{name: columns[name][row] for name in self.columns} for row in range(stop - start)]


def split_name(source: Source) -> str:
    """ "train" for "train[:1000]". Raises DataError for any other syntax."""
    match = re.fullmatch(r"([\w.-]+)(?:\[[^\[\]]*\])?", source.split)
    if match is None:
        raise DataError(
            f"source {source.name}: split {source.split!r} is not a valid split",
            expected="a name, or a name with a slice, such as train, train[:1000] or train[10%:20%]",
        )
    return match[1]


def no_rows(source: Source) -> DataError:
    found = f"source {source.name}: {describe_source(source)} has no rows"
    return DataError(found, fix="check the file and the split")


def describe_source(source: Source) -> str:
    return f"{source.path or source.hub}, split {source.split}"
