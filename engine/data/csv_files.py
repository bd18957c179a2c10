"""CSV files: their separator, how their cells are read, and records with too many fields."""

from __future__ import annotations

import csv
import re
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from engine.config.files.data_files import suffix_of
from engine.data.json_rows import TOO_MANY_FIELDS
from engine.data.records import open_unpacked

SEPARATORS = ",;\t|"
HEADER_BYTES = 1 << 16
"""In which the names of the columns are looked for."""

NAMED_SEPARATOR = re.compile(r'"?sep=(.)"?')
"""The line before the names in which a spreadsheet says what separates them."""


def separator_of(file: Path) -> str:
    """Of a CSV file: the comma, unless its first line has none and another separator makes it several names."""
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


def _first_line(file: Path) -> str:
    with open_unpacked(file) as stream:
        return stream.readline(HEADER_BYTES).decode("utf-8-sig", "replace").rstrip("\r\n")


def csv_options(file: Path, *, as_text: bool) -> dict[str, Any]:
    """How `datasets` reads a CSV file, and others with the same columns. `as_text`: every cell as it stands, None where
    it is empty; otherwise numbers are numbers, and words such as "None" and "NA" are empty."""
    options: dict[str, Any] = {"sep": separator_of(file)}
    if NAMED_SEPARATOR.fullmatch(_first_line(file)):
        options["skiprows"] = 1
    if not as_text:
        return options
    names = _column_names(file, options["sep"], skip=options.get("skiprows", 0))
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {**options, "features": features, "keep_default_na": False, "na_values": [""]}


def _column_names(file: Path, separator: str, *, skip: int) -> list[str]:
    """As pandas calls them: a second "a" is "a.1", one without a name "Unnamed: 3"."""
    with open_unpacked(file) as packed:
        text = (line.decode("utf-8-sig" if not number else "utf-8") for number, line in enumerate(packed))
        cells = next((cells for cells in islice(csv.reader(text, delimiter=separator), skip, None) if cells), [])
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
