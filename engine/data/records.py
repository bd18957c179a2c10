"""The rows of a source and the records that formats make of them, and where a JSON file is broken."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from engine.config.schema.data import Source
from engine.errors import DataError


@dataclass(frozen=True)
class TextRecord:
    """Plain text, all of it targets."""

    text: str


@dataclass(frozen=True)
class PairRecord:
    """A prompt, and the completion, whose tokens are the targets."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatRecord:
    """A conversation: turns with role and content (text, or parts {"type": "text", "text": …} and {"type": "image"}),
    and the tools that it may use."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    images: tuple[ImageReference, ...] = ()
    """The conversation's images, in the order of its image parts."""


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


COMPRESSED = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile, ".bz2": bz2.BZ2File}

SHOWN = 60
"""Characters of a broken line that are shown."""


def find_json_error(files: Sequence[Path]) -> str | None:
    """`FILE:LINE: the problem` of the first file that does not parse; None when all of them do."""
    for file in files:
        try:
            problem = _document_problem(file) if file.name.lower().removesuffix(".gz").endswith(".json") else None
            problem = _line_problem(file) if problem is None else problem
        except (OSError, EOFError, lzma.LZMAError) as error:
            return f"{file}: {error}"
        if problem:
            return f"{file}:{problem}"
    return None


def find_json_lines(files: Sequence[Path], rows: Sequence[int]) -> dict[int, str]:
    """Map each of `rows` (counted from 0 over all files) to its `FILE:LINE`; those not found are left out. Empty when a
    row's line is not a JSON object, because then the file is not JSON lines."""
    found: dict[int, str] = {}
    row = 0
    for file in files if rows else ():
        with _open(file) as stream:
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
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                return f"{number}: not JSON ({_reason(error)}): {_excerpt(line)}"
            except RecursionError:
                return f"{number}: nested too deeply to be read: {_excerpt(line)}"
            if not isinstance(value, dict):
                return f"{number}: an object was expected, found {type(value).__name__}: {_excerpt(line)}"
    return ""


def _document_problem(file: Path) -> str | None:
    """`LINE: the problem` of a file that is one JSON document; "" if it parses; None if it looks like JSON lines."""
    with _open(file) as stream:
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


def _open(file: Path) -> IO[bytes]:
    return COMPRESSED[file.suffix](file) if file.suffix in COMPRESSED else file.open("rb")


def _reason(error: ValueError) -> str:
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "not UTF-8 text"


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace").strip()
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


ROWS_AT_ONCE = 256
"""Rows held in memory while streaming."""


@dataclass(frozen=True)
class SourceRows:
    """The rows of a source, read on demand."""

    columns: list[str]
    count: int
    fingerprint: str
    """Hash of the contents, independent of where the files lie."""
    table: Any
    """A `datasets.Dataset`, or a list of rows."""
    explain: Callable[[BaseException], DataError] | None = None
    """Turns an exception from reading a row into the error to show; None for a list of rows, which is in memory."""
    line_files: Sequence[Path] = ()
    """JSON files with one row per line, in order; empty for any other source."""

    def places(self, rows: Sequence[int]) -> list[str]:
        """`FILE:LINE`, or the number of the row, counted from 1."""
        lines = find_json_lines(self.line_files, rows)
        return [lines.get(row, f"row {row + 1}") for row in rows]

    def batches(self, size: int = ROWS_AT_ONCE) -> Iterator[list[dict[str, Any]]]:
        """All rows in order, as lists of up to `size` rows; a row is a dict by column."""
        for start in range(0, self.count, size):
            stop = min(start + size, self.count)
            yield self.table[start:stop] if isinstance(self.table, list) else self._decoded(start, stop)

    def row(self, number: int) -> dict[str, Any]:
        """Counted from 0, a dict by column. Images stay undecoded. Raises DataError for text that is not UTF-8."""
        (row,) = self.table[number : number + 1] if isinstance(self.table, list) else self._decoded(number, number + 1)
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
