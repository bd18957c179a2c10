"""Which files of a folder are its data, and which only lie beside them: a README, the settings of another program. And
the separator of a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.config.files.data_files import COMPRESSION_SUFFIXES, LOADERS, suffix_of
from engine.config.schema.data import Source
from engine.data.json_rows import TOO_MANY_FIELDS, is_single_object, keys_of
from engine.data.records import open_unpacked
from engine.errors import DataError

ABOUT = ("readme", "license", "licence", "notice", "changelog", "citation", "contributing")
"""Stems of text files that are about the data beside them; read as data where no other text is there."""

SEPARATORS = ",;\t|"
HEADER_BYTES = 1 << 16
"""Of a CSV file, in which the names of its columns are looked for."""


class FolderFiles(NamedTuple):
    """The files of a folder that hold its data, and those beside them."""

    data: list[Path]
    beside: list[Path]


def data_of_folder(source: Source, files: Sequence[Path]) -> FolderFiles:
    """Raises DataError where tables of several formats lie in it, of which one alone would be read."""
    texts = [file for file in files if LOADERS.get(suffix_of(file)) == "text"]
    tables = [file for file in files if LOADERS.get(suffix_of(file)) not in (None, "text")]
    if not tables:
        about = [file for file in texts if file.stem.lower().split(".")[0] in ABOUT]
        data = [file for file in texts if file not in about] or texts
        return FolderFiles(data, [file for file in files if file not in data])
    strays = _stray_objects(tables)
    data = [file for file in tables if file not in strays]
    kinds = sorted({suffix_of(file) for file in data}, key=lambda suffix: LOADERS[suffix])
    if len({LOADERS[kind] for kind in kinds}) > 1:
        raise DataError(
            f"source {source.name}: the folder {source.path} holds tables of several formats ({', '.join(kinds)})",
            fix=f'make one source of each, such as path = "{source.path}/**/*{kinds[0]}"',
        )
    return FolderFiles(data, [file for file in files if file not in data])


def _stray_objects(tables: Sequence[Path]) -> list[Path]:
    """JSON files of a single object that has no key of the other tables' rows, or of nothing."""
    objects = [file for file in tables if suffix_of(file) == ".json" and _is_plain(file) and _is_one_object(file)]
    rows = [file for file in tables if file not in objects]
    if not rows:
        return []
    first = rows[0]
    known = keys_of(first) if LOADERS[suffix_of(first)] == "json" and _is_plain(first) else set()
    return [file for file in objects if not known & keys_of(file)]


def _is_one_object(file: Path) -> bool:
    return is_single_object(file) or (file.stat().st_size < HEADER_BYTES and not keys_of(file))


def _is_plain(file: Path) -> bool:
    return file.suffix.lower() not in COMPRESSION_SUFFIXES


def separator_of(file: Path) -> str:
    """Of a CSV file: the comma, unless its first line has none and another separator makes it several names."""
    if suffix_of(file) == ".tsv":
        return "\t"
    with open_unpacked(file) as stream:
        line = stream.readline(HEADER_BYTES).decode("utf-8-sig", "replace").rstrip("\r\n")
    if len(_cells(line, ",")) > 1:
        return ","
    fields = {separator: _cells(line, separator) for separator in SEPARATORS}
    fitting = [
        each for each, names in fields.items() if len(names) > 1 and all(names) and len(set(names)) == len(names)
    ]
    return max(fitting, key=lambda each: len(fields[each]), default=",")


def _cells(line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:  # a name longer than the reader takes
        return []


def without_long_records(file: Path, separator: str, copy: Path) -> dict[int, str]:
    """Write `copy` without the records that have more fields than `file` has columns; returns them by the number of
    their line, with what was found."""
    found: dict[int, str] = {}
    with open_unpacked(file) as packed, copy.open("w", encoding="utf-8", newline="") as stream:
        text = (line.decode("utf-8-sig" if not number else "utf-8") for number, line in enumerate(packed))
        reader, writer, columns = csv.reader(text, delimiter=separator), csv.writer(stream, delimiter=separator), 0
        csv.field_size_limit(1 << 30)
        for record in reader:
            columns = columns or len(record)
            if len(record) > columns:
                found[reader.line_num] = TOO_MANY_FIELDS
            else:
                writer.writerow(record)
    return found
