"""Finds the records of CSV files and reads their cells as text, exactly as they are written."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from engine.config.files.data_files import suffix_of
from engine.data.json_rows import FoundRow
from engine.data.records import open_unpacked
from engine.errors import DataError

TOO_MANY_FIELDS = "more fields than the file has columns"
BROKEN_QUOTES = "quotes that do not enclose a cell"
"""Reasons for which a record is left out (`data.broken = "skip"`)."""

QUOTE_FIX = (
    'quote cells that contain a separator or a quote, and double the quotes inside ("a ""b"", c"); or '
    "leave out such records and count them: --set data.broken=skip"
)

SEPARATORS = ",;\t|"
HEADER_BYTES = 1 << 16
"""In which the names of the columns are looked for."""

NAMED_SEPARATOR = re.compile(r'"?sep=(.)"?')
"""The line before the names in which a spreadsheet says what separates them."""

csv.field_size_limit(1 << 30)


@dataclass(frozen=True)
class CsvLayout:
    """How the records of one CSV file are read."""

    separator: str
    columns: tuple[str, ...]
    header_lines: int
    """Lines before the first record."""
    header_bytes: int
    line_end: str
    """A line feed, or a carriage return in a file of an old Mac. The other one is a part of cells in quotes."""

    def parse(self, raw: bytes) -> dict[str, str | None]:
        """Return the cells of a record by column; None where a cell is empty or missing."""
        cells = next(csv.reader([raw.decode()], delimiter=self.separator, strict=True))
        return {name: (cells[place] or None) if place < len(cells) else None for place, name in enumerate(self.columns)}


def separator_of(file: Path) -> str:
    """Return what separates the cells of a CSV file: the comma, unless its first line has none and another separator
    makes it several names."""
    if suffix_of(file) == ".tsv":
        return "\t"
    line = _first_line(file)
    if named := NAMED_SEPARATOR.fullmatch(line):
        return named[1]
    if len(_cells(line, ",")) > 1:
        return ","
    fields = {separator: _cells(line, separator) for separator in SEPARATORS}
    fitting = [
        each for each, names in fields.items() if len(names) > 1 and all(names) and len(set(names)) == len(names)
    ]
    return max(fitting, key=lambda each: len(fields[each]), default=",")


def line_end(head: bytes) -> str:
    """Return what ends the lines of a CSV file that begins with `head`: a line feed, or a carriage return alone, as in
    files of old Macs."""
    first = re.search(rb"\r\n?|\n", head)
    return "\r" if first is not None and first[0] == b"\r" else "\n"


def _first_line(file: Path) -> str:
    with open_unpacked(file) as stream:
        text = stream.read(HEADER_BYTES).decode("utf-8-sig", "replace")
    return re.split(r"[\r\n]", text, maxsplit=1)[0]


class _Lines:
    """The lines of a text, with their ends, and how much of it they were."""

    def __init__(self, text: TextIO, byte: int) -> None:
        self._text, self.byte, self.line = text, byte, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._text)
        self.byte += len(line) if line.isascii() else len(line.encode())
        self.line += 1
        return line


def layout_of(file: Path, separator: str) -> CsvLayout:
    """Return how a CSV file that is not compressed is read. Raises UnicodeDecodeError where it is not UTF-8; DataError
    where the names of its columns are not in proper quotes."""
    try:
        return _layout_of(file, separator)
    except csv.Error as error:
        problem = f":1: {_in_words(error, separator)}"
        raise DataError(f"{file}{problem}", fix="correct the line with the column names") from error


def _layout_of(file: Path, separator: str) -> CsvLayout:
    with file.open("rb") as stream:
        end = line_end(stream.read(HEADER_BYTES))
        lines = _lines_of(stream, end)
        reader = csv.reader(lines, delimiter=separator, strict=True)
        cells = next((cells for cells in reader if cells), [])
        if NAMED_SEPARATOR.fullmatch(separator.join(cells)) and lines.line == 1:
            cells = next((cells for cells in reader if cells), [])
        return CsvLayout(separator, tuple(_column_names(cells)), lines.line, lines.byte, end)


def _lines_of(stream: io.BufferedReader, end: str, start: int = 0) -> _Lines:
    """`start`: the first byte that is read, behind a byte order mark."""
    stream.seek(0)
    if start == 0 and stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
        start = len(codecs.BOM_UTF8)
    stream.seek(start)
    return _Lines(io.TextIOWrapper(stream, encoding="utf-8", newline=end), start)


def find_records(file: Path, layout: CsvLayout) -> Iterator[FoundRow]:
    """Yield the records of a CSV file that is not compressed, in order; blank lines are none. Raises UnicodeDecodeError
    where it is not UTF-8."""
    with file.open("rb") as stream:
        lines = _lines_of(stream, layout.line_end, layout.header_bytes)
        reader = csv.reader(lines, delimiter=layout.separator, strict=True)
        while True:
            start, line = lines.byte, layout.header_lines + lines.line + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                problem = f":{line}: {_in_words(error, layout.separator)}"
                yield FoundRow(start, lines.byte, line, reason=BROKEN_QUOTES, problem=problem)
                continue
            if cells is None:
                return
            if len(cells) > len(layout.columns):
                problem = f":{line}: {len(cells)} fields, but the file has {len(layout.columns)} columns"
                yield FoundRow(start, lines.byte, line, reason=TOO_MANY_FIELDS, problem=problem)
            elif cells:
                yield FoundRow(start, lines.byte, line)


def _in_words(error: csv.Error, separator: str) -> str:
    if "unexpected end of data" in str(error):
        return "a quoted cell is not closed"
    if "expected after" in str(error):
        return f"no {separator!r} after the quote that closes a cell"
    return "a line break in an unquoted cell" if "new-line" in str(error) else str(error)


def _column_names(cells: list[str]) -> list[str]:
    """Name the columns as pandas does: a second "a" is "a.1", one without a name "Unnamed: 3"."""
    names: list[str] = []
    for place, cell in enumerate(cells):
        name, count = cell or f"Unnamed: {place}", 0
        while name in names:
            count += 1
            name = f"{cell or f'Unnamed: {place}'}.{count}"
        names.append(name)
    return names


def _cells(line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:  # a name longer than the reader takes
        return []
