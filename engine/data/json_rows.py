"""Rows of JSON files that Arrow cannot hold in one table: columns of mixed types, keys that come and go, an object per
file. Lines are found once and read on demand."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.records import Screened, line_problem, not_an_object
from engine.errors import DataError

NOT_AN_OBJECT = "not a JSON object"
TOO_MANY_FIELDS = "more fields than the file has columns"
BROKEN_REASONS = (NOT_AN_OBJECT, TOO_MANY_FIELDS)
"""Reasons for which a line or record is left out (`data.broken = "skip"`)."""


class JsonRows:
    """The rows of JSON files, one to a line, one to a file, or elements of a list."""

    in_lists = True
    """Slices are lists of rows."""

    def __init__(self, screened: Sequence[Screened], files: Sequence[Path], *, skip: bool) -> None:
        """`files` are unpacked, one for each of `screened`, where lines that hold no object are counted if `skip`.
        Raises DataError for such a line otherwise."""
        self._files, self._whole = files, dict[int, list[dict[str, Any]]]()
        self.columns: list[str] = []
        spans: list[tuple[int, int, int]] = []
        for number, (each, file) in enumerate(zip(screened, files, strict=True)):
            whole = _whole_document(file)
            if whole is None:
                spans += [(number, *span) for span in self._lines(each, file, skip)]
                continue
            rows = [row for row in whole if isinstance(row, dict)]
            for place, row in enumerate(whole, start=1):
                if isinstance(row, dict):
                    continue
                if not skip:
                    found = f"{each.file}: element {place} of its list: {not_an_object(row)}"
                    raise DataError(found, fix=NO_OBJECT_FIX)
                each.leave_out(NOT_AN_OBJECT, 1)
            self._whole[number] = rows
            self._note_columns(*rows)
            spans += [(number, place, -1) for place in range(len(rows))]
        self._spans = np.array(spans, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, rows: slice) -> list[dict[str, Any]]:
        found = (self._row(*map(int, span)) for span in self._spans[rows])
        return [{name: row.get(name) for name in self.columns} for row in found]

    def nbytes(self, start: int, stop: int) -> int:
        """Bytes of the rows from `start` to before `stop` in files of lines."""
        return int(np.maximum(self._spans[start:stop, 2] - self._spans[start:stop, 1], 0).sum())

    def _row(self, number: int, start: int, stop: int) -> dict[str, Any]:
        if number in self._whole:
            return self._whole[number][start]
        with self._files[number].open("rb") as stream:
            stream.seek(start)
            return dict(json.loads(stream.read(stop - start).decode("utf-8-sig")))

    def _lines(self, screened: Screened, file: Path, skip: bool) -> list[tuple[int, int]]:
        """First byte and byte after the last of each line that holds an object."""
        spans, start = [], 0
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                stop = start + len(line)
                row, problem = line_problem(line)
                if problem and not skip:
                    raise DataError(f"{screened.file}:{number}: {problem}", fix=SKIP_FIX)
                if problem:
                    screened.leave_out(NOT_AN_OBJECT, number)
                elif row is not None:
                    self._note_columns(row)
                    spans.append((start, stop))
                start = stop
        return spans

    def _note_columns(self, *rows: dict[str, Any]) -> None:
        for row in rows:
            self.columns += [name for name in row if name not in self.columns]


SKIP_FIX = "mend or remove that line; or leave such lines out and count them: --set data.broken=skip"
NO_OBJECT_FIX = (
    'write each row as an object, such as {"prompt": "…", "completion": "…"}; or leave such rows out and count them: '
    "--set data.broken=skip"
)


def _whole_document(file: Path) -> list[Any] | None:
    """The elements of a file that is one JSON list, or its single object; None for a file of lines."""
    with file.open("rb") as stream:
        first = next((line for line in stream if line.strip()), b"")
    if not line_problem(first)[1]:
        return None
    try:
        found = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else [found] if isinstance(found, dict) else None


def is_single_object(file: Path) -> bool:
    """Whether a file holds one JSON object and nothing else, such as the settings of another program."""
    with file.open("rb") as stream:
        lines = [line for _, line in zip(range(2), (line for line in stream if line.strip()), strict=False)]
    if not lines or not lines[0].lstrip(b"\xef\xbb\xbf \t").startswith(b"{"):
        return False
    return len(lines) == 1 or line_problem(lines[0])[1] != ""


def keys_of(file: Path) -> set[str]:
    """The keys of the first row of a JSON file; none for one that does not parse."""
    with file.open("rb") as stream:
        first = next((line for line in stream if line.strip()), b"")
    row, problem = line_problem(first)
    if problem:
        whole = _whole_document(file) or []
        row = next((each for each in whole if isinstance(each, dict)), None)
    return set(row or ())


def fix_of_single_row(row: dict[str, Any], file: str) -> str | None:
    """What makes rows of a file that is a single object of columns, or of a list of rows; None if it is neither."""
    for name, value in row.items():
        rows = value if isinstance(value, list) else []
        if len(rows) > 1 and all(isinstance(each, dict) and not {"role", "from"} & set(each) for each in rows):
            return f"write the rows under {name} as lines: jq -c '.{name}[]' {shlex.quote(file)} > rows.jsonl"
    lengths = {len(value) if isinstance(value, (list, dict)) else -1 for value in row.values()}
    if len(row) > 1 and len(lengths) == 1 and max(lengths) > 1:
        return (
            "the file is one object of columns; write an object per row, with pandas: "
            f"pandas.read_json({file!r}).to_json('rows.jsonl', orient='records', lines=True)"
        )
    return None
