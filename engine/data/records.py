"""The rows of a source and the records that formats make of them, and where a JSON file is broken."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from engine.config.schema.data import Source
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


@dataclass(frozen=True)
class ImageReference:
    """An image of a row: the bytes of an encoded file, or the path of one."""

    path: str | None = None
    data: bytes | None = None


@dataclass(frozen=True)
class Dropped:
    """Takes the place of a row, or of one turn, that is left out. The report counts these by reason."""

    reason: str


Record = TextRecord | PairRecord | ChatRecord

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

SHOWN = 60
"""Characters of a broken line that are shown."""


UNPACKING_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)


def find_json_error(files: Mapping[Path, Path]) -> str | None:
    """`FILE:LINE: the problem` of the first file that does not parse; None when all of them do. `files` maps each to
    the one that is read in its place."""
    for file, reads in files.items():
        try:
            problem = _document_problem(reads) if file.name.lower().removesuffix(".gz").endswith(".json") else None
            problem = _line_problem(reads) if problem is None else problem
        except UNPACKING_ERRORS as error:
            return f"{file}: {error}"
        if problem:
            return f"{file}:{problem}"
    return None


def find_not_utf8(files: Mapping[Path, Path]) -> tuple[Path, int] | None:
    """(file, line from 1) of the first text that is not UTF-8; None also for what cannot be unpacked. `files` as for
    `find_json_error`."""
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


def find_json_lines(files: Mapping[Path, Path], rows: Sequence[int]) -> dict[int, str]:
    """Map each of `rows` (counted from 0 over all files) to its `FILE:LINE`; those not found are left out. Empty when a
    row's line is not a JSON object, because then the file is not JSON lines. `files` as for `find_json_error`."""
    found: dict[int, str] = {}
    row = 0
    for file, reads in files.items() if rows else ():
        with open_unpacked(reads) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                if row in rows:
                    if not _is_object(line):
                        return {}
                    found[row] = f"{file}:{number}"
                    if len(found) == len(set(rows)):
                        return found
                row += 1
    return found


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _line_problem(file: Path) -> str:
    """`LINE: the problem` of the first line that is not a JSON object; "" when all of them are."""
    with open_unpacked(file) as stream:
        for number, line in enumerate(stream, start=1):
            _, problem = line_problem(line)
            if problem:
                return f"{number}: {problem}"
    return ""


def line_problem(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """The object of a line of JSON, and what is wrong with one that holds none; neither for a blank line."""
    if not line.strip():
        return None, ""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        return None, f"not JSON ({_reason(error)}): {_excerpt(line)}"
    except RecursionError:
        return None, f"nested too deeply to be read: {_excerpt(line)}"
    if isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value):
        return None, f'a conversation without a name, {{"messages": [...]}} is expected: {_excerpt(line)}'
    if not isinstance(value, dict):
        return None, f"{not_an_object(value)}: {_excerpt(line)}"
    return value, ""


JSON_NAMES = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


def not_an_object(value: Any) -> str:
    """`value`: of a row in JSON that is no object."""
    return f"an object was expected, found {JSON_NAMES.get(type(value), 'null')}"


def _document_problem(file: Path) -> str | None:
    """`LINE: the problem` of a file that is one JSON document; "" if it parses; None if it looks like JSON lines."""
    with open_unpacked(file) as stream:
        raw = stream.read()
    try:
        json.loads(raw.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return None if raw.lstrip().startswith(b"{") else f"{error.lineno}: not JSON ({error.msg})"
    except RecursionError:
        return None if raw.lstrip().startswith(b"{") else "1: nested too deeply to be read"
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return f"{line}: not UTF-8 text"
    return ""


def open_unpacked(file: Path) -> IO[bytes]:
    """A file's contents, unpacked by its suffix."""
    suffix = file.suffix.lower()
    opened: IO[bytes] = COMPRESSED[suffix](file) if suffix in COMPRESSED else file.open("rb")
    return opened


def _reason(error: ValueError) -> str:
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "not UTF-8 text"


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace").strip()
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


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
    longest: int = 0
    """Bytes of the longest line that is kept."""
    unpacked: int = 0
    """Bytes read of the file, unpacked."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Lines left out, by reason."""
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Numbers, from 1, of the first lines left out for each reason."""
    odd_row: str = ""
    """The first row of JSON that must not be given to Arrow, as the end of a sentence that begins with the file: at a
    null Arrow crashes, and of a list of lists it makes a column of text."""

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
class SourceRows:
    """The rows of a source, read on demand."""

    columns: list[str]
    count: int
    fingerprint: str
    """Hash of the contents, independent of where the files lie."""
    table: Any
    """A `datasets.Dataset`, a list of rows, or `engine.data.documents.Documents`, whose slices are lists."""
    explain: Callable[[BaseException], DataError] | None = None
    """Turns an exception from reading a row into the error to show; None for a list of rows, which is in memory."""
    line_files: Mapping[Path, Path] = field(default_factory=dict)
    """JSON files with one row per line, in order, and what is read in place of each; empty for any other source."""
    left_out: Sequence[Screened] = ()
    """Files with lines that are not among the rows, as they are beyond the bounds of `engine.data.bounds`."""
    image_columns: Sequence[str] = ()
    notices: Sequence[str] = ()
    """What the reader left aside or assumed, as sentences."""

    @property
    def in_lists(self) -> bool:
        """Whether slices of the table are lists of rows."""
        return isinstance(self.table, list) or hasattr(self.table, "in_lists")

    def places(self, rows: Sequence[int]) -> list[str]:
        """`FILE:LINE`, or the number of the row, counted from 1."""
        lines = find_json_lines(self.line_files, rows)
        return [lines.get(row, f"row {row + 1}") for row in rows]

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
            return list(self.table[start:stop])
        if stop - start == 1 and not self._fits(start, stop):
            return [Dropped(ROW_TOO_LARGE)]
        return list(self._decoded(start, stop))

    @cached_property
    def _arrow(self) -> Any:
        """The same table, whose slices are not decoded."""
        return self.table.with_format("arrow")

    def row(self, number: int) -> dict[str, Any]:
        """Counted from 0, a dict by column. Images stay undecoded. Raises DataError for text that is not UTF-8."""
        (row,) = self.table[number : number + 1] if self.in_lists else self._decoded(number, number + 1)
        return dict(row)

    def _decoded(self, start: int, stop: int) -> list[dict[str, Any]]:
        try:
            columns = self.table[start:stop]
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
            f"source {source.name}: split {source.split!r} is not understood",
            expected="a name, or a name with a slice, such as train, train[:1000] or train[10%:20%]",
        )
    return match[1]


def no_rows(source: Source) -> DataError:
    found = f"source {source.name}: {describe_source(source)} holds no rows"
    return DataError(found, fix="check the file and the split")


def describe_source(source: Source) -> str:
    return f"{source.path or source.hub}, split {source.split}"
