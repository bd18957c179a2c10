"""The rows of one source, as the rest of this folder reads them, and what all kinds of sources share: the syntax of
splits and the error for a source without rows.

Try: `tunedeck data -r demo --show 3`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.data.json_errors import find_json_lines
from engine.errors import DataError
from engine.spec.schema.data import Source

ROWS_AT_ONCE = 256
"""SourceRows held in memory while streaming."""


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
        """Where the user finds each of `rows`: `FILE:LINE`, or the number of the row, counted from 1."""
        lines = find_json_lines(self.line_files, rows)
        return [lines.get(row, f"row {row + 1}") for row in rows]

    def batches(self, size: int = ROWS_AT_ONCE) -> Iterator[list[dict[str, Any]]]:
        """All rows in order, as lists of up to `size` rows; a row is a dict by column."""
        for start in range(0, self.count, size):
            stop = min(start + size, self.count)
            yield self.table[start:stop] if isinstance(self.table, list) else self._decoded(start, stop)

    def row(self, number: int) -> dict[str, Any]:
        """The row with this number, counted from 0, as a dict by column. Images stay undecoded.

        Raises DataError for text that is not UTF-8.
        """
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
    """The name of the split without its slice: "train" for "train[:1000]". Raises DataError for any other syntax."""
    match = re.fullmatch(r"([\w.-]+)(?:\[[^\[\]]*\])?", source.split)
    if match is None:
        raise DataError(
            f"source {source.name}: split {source.split!r} is not understood",
            expected="a name, or a name with a slice, such as train, train[:1000] or train[10%:20%]",
        )
    return match[1]


def no_rows(source: Source) -> DataError:
    """The error for a source in which there is no row."""
    found = f"source {source.name}: {describe_source(source)} holds no rows"
    return DataError(found, fix="check the file and the split")


def describe_source(source: Source) -> str:
    """The source's path or hub name and its split, for messages."""
    return f"{source.path or source.hub}, split {source.split}"
