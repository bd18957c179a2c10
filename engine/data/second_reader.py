"""Reads some rows of a source a second time by the simplest means (json, csv, pyarrow) and compares them, value by
value, with the rows that are tokenised.

It goes through the files from their start and shares no code with the first reader that finds, cuts or converts a row,
so a mistake of either one shows as a difference."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from engine.data.arrow_values import Shape
from engine.data.bounds import DEPTH, LINE_BYTES, LINE_TOO_LONG, UNPACKS_TOO_FAR
from engine.data.records import ROW_TOO_LARGE, ROWS_AT_ONCE, Dropped, SourceRows
from engine.errors import DataError

BLOCKS = 8
"""Blocks of rows that are compared: the first, the last, and others at random."""

FROM_BLOCK = 120
"""Rows of a block that are compared besides its first and last ones."""

BORDER = 4
"""First and last rows of each block that are compared."""

SAMPLE_CHARACTERS = 64 << 20
"""The sample ends with the row that reaches this length."""

LIST_BYTES = 256 << 20
"""A file that is one JSON list of more bytes is not read again, as that would take all of it at once."""

Read = Callable[[], Any]
"""Reads one row."""


def compare_rows(rows: SourceRows, name: str) -> int:
    """Return how many rows are equal in a second reading; 0 where there is none, as for data sets of the hub. Raises
    DataError, with the row, the key and both values, for the first difference. `name` is the source's."""
    origin, reasons = rows.origin, {reason for screened in rows.left_out for reason in screened.dropped}
    if origin is None or (origin.kind == "csv" and LINE_TOO_LONG in reasons) or ROW_TOO_LARGE in reasons:
        return 0
    wanted, compared = _sample(rows), 0
    for number, read in enumerate(_rows_again(rows), start=-origin.first):
        if number >= rows.count:
            if rows.count == rows.available and UNPACKS_TOO_FAR not in reasons:
                raise _difference(rows, name, f"row {number + 1}", "the file has more rows than were read")
            break
        if number in wanted:
            row, again = wanted.pop(number), read()
            if isinstance(again, list) and len(again) == len(row):  # the cells of a CSV file
                again = dict(zip(row, again, strict=True))
            first, second = _canonical(row, rows), _canonical(again, rows)
            if first != second:
                key, values = _unlike(first, second)
                raise _difference(rows, name, rows.places([number])[0], f"key {key} was read as {values}")
            compared += 1
        if not wanted and rows.count < rows.available:
            break
    if wanted and compared:
        raise _difference(rows, name, f"row {min(wanted) + 1}", "the file has fewer rows than were read")
    return compared


def _difference(rows: SourceRows, name: str, place: str, what: str) -> DataError:
    for kept in rows.origin.kept if rows.origin else ():
        shutil.rmtree(kept) if kept.is_dir() else kept.unlink(missing_ok=True)
    return DataError(
        f"source {name}: {place}: {what}",
        expected="the same rows from a second, simple reader of the file",
        fix="start again: the cached rows of this file were removed; if it happens again, report this row",
    )


def _sample(rows: SourceRows) -> dict[int, dict[str, Any]]:
    """Return rows by number, as the tokeniser gets them: whole blocks are read, and some rows of each are kept."""
    drawn, starts = random.Random(rows.fingerprint), range(0, rows.count, ROWS_AT_ONCE)
    chosen = {0, len(starts) - 1, *drawn.sample(range(len(starts)), min(len(starts), BLOCKS))}
    sample: dict[int, dict[str, Any]] = {}
    characters = 0
    for block in (starts[number] for number in sorted(chosen)):
        stop = min(block + ROWS_AT_ONCE, rows.count)
        inner = range(block + BORDER, stop - BORDER)
        numbers = {*range(block, stop)[:BORDER], *range(block, stop)[-BORDER:]}
        numbers |= {*drawn.sample(inner, min(len(inner), FROM_BLOCK))}
        for first, last in takewhile(lambda span: span[0] < stop, rows.spans(block)):  # noqa: B023
            if numbers.isdisjoint(range(first, last)):
                continue
            for number, row in enumerate(rows.rows(first, last), start=first):
                if number in numbers and not isinstance(row, Dropped) and characters < SAMPLE_CHARACTERS:
                    sample[number] = row
                    characters += len(str(row))
    return sample


def _canonical(row: Any, rows: SourceRows) -> Any:
    """Return a row of either reading in a form in which equal rows are equal: of a table without nulls, and without
    images."""
    if not isinstance(row, dict):
        return row
    is_table = rows.origin is not None and rows.origin.kind in ("parquet", "arrow")
    meant = {
        name: _meant(value, rows.shapes.get(name), is_table)
        for name, value in row.items()
        if name not in rows.image_columns and not (is_table and value is None)
    }
    return json.loads(json.dumps(meant, ensure_ascii=False, default=_as_text))


def _meant(value: Any, shape: Shape | None, is_table: bool) -> Any:
    if isinstance(value, dict):
        keys: Mapping[str, Any] = shape.keys if shape else {}
        return {
            key: _meant(each, keys.get(key), is_table and (shape is None or shape.kind != "json"))
            for key, each in value.items()
            if not (is_table and each is None and (shape is None or shape.kind != "json"))
        }
    if isinstance(value, list):
        inner = is_table and (shape is None or shape.kind != "json")
        return [_meant(each, shape.item if shape and shape.kind == "list" else shape, inner) for each in value]
    if shape is not None and shape.kind == "class":
        number = int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else None
        return value if number is None or value in shape.names else shape.names[number] if number >= 0 else None
    return json.loads(value) if shape is not None and shape.kind == "json" and isinstance(value, str) else value


def _as_text(value: Any) -> str:
    if isinstance(value, Decimal):
        return format(value, "f")
    return value.isoformat() if hasattr(value, "isoformat") else repr(value)


def _unlike(first: Any, second: Any, key: str = "") -> tuple[str, str]:
    """Return where two values differ, and both as text."""
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(first, dict) and isinstance(second, dict):
        pairs = [(name, first.get(name), second.get(name)) for name in {**first, **second}]
        odd = [name for name in {**first, **second} if (name in first) != (name in second)]
        if odd:
            name = odd[0]
            sides = [repr(side[name])[:200] if name in side else "missing" for side in (first, second)]
            return f"{key}.{name}".lstrip("."), " and as ".join(sides)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = [(place, *pair) for place, pair in enumerate(zip(first, second, strict=True))]
    for name, one, other in pairs:
        if json.dumps(one) != json.dumps(other):
            return _unlike(one, other, f"{key}.{name}".lstrip("."))
    return key or "of the row", f"{first!r:.200} and as {second!r:.200}"


def _rows_again(rows: SourceRows) -> Iterator[Read]:
    """Yield the rows of all files of a source from the first one on."""
    origin = rows.origin
    assert origin is not None
    dropped = {screened.file for screened in rows.left_out if screened.dropped}
    for number, file in enumerate(origin.files):
        if origin.kind == "json":
            yield from _json_rows(file, left_out=file in dropped)
        elif origin.kind == "csv":
            yield from _csv_rows(file, origin.separators[number], left_out=file in dropped)
        elif origin.kind == "line":
            with _opened(file) as stream:
                yield from (partial(_line, line) for line in _lines(stream) if line)
        else:
            yield from _table_rows(file, origin.kind)


def _opened(file: Path) -> IO[bytes]:
    suffix = file.suffix.lower()
    if suffix == ".zst":
        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    opened: IO[bytes] = openers.get(suffix, open)(file, "rb")
    return opened


def _line(line: bytes) -> dict[str, str]:
    text = line.decode("utf-8-sig")
    text = text[:-1] if text.endswith("\n") else text
    return {"text": text[:-1] if text.endswith("\r") else text}


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield lines with their ends; an empty one for each that is beyond the bound."""
    while line := stream.readline(LINE_BYTES + 1):
        is_long = len(line) > LINE_BYTES
        while is_long and line and not line.endswith(b"\n"):
            line = stream.readline(LINE_BYTES)
        yield b"" if is_long else line


def _json_rows(file: Path, *, left_out: bool) -> Iterator[Read]:
    with _opened(file) as stream:
        head = stream.read(LINE_BYTES + 1)
        first = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        whole = len(head) <= LINE_BYTES and first == b"{" and isinstance(_parsed(head, strict=False), dict)
    if whole or (first == b"[" and _is_list(file)):
        yield from _document_rows(file, left_out)
        return
    with _opened(file) as stream:
        for line in _lines(stream):
            if line.strip() and (not left_out or _usable(line)):
                yield partial(_parsed, line, strict=False)


def _is_list(file: Path) -> bool:
    """Return whether a file that begins with a bracket is one list, and not a list in each line."""
    with _opened(file) as stream:
        lines = (line for line in _lines(stream) if line.strip())
        return not isinstance(_parsed(next(lines, b""), strict=False), list) or next(lines, None) is None


def _document_rows(file: Path, left_out: bool) -> Iterator[Read]:
    """Yield the elements of a file that is one list, or its only object."""
    with _opened(file) as stream:
        text = stream.read(LIST_BYTES + 1)
    if len(text) > LIST_BYTES:
        return
    whole = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_marked if left_out else None)
    for element in [whole] if isinstance(whole, dict) else whole:
        if not left_out or _is_text(_element(element)):
            yield partial(_element, element)


def _element(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


def _parsed(text: bytes, *, strict: bool) -> Any:
    """Return what JSON text means; None if it does not parse, or with `strict` where a key occurs twice."""
    try:
        return json.loads(text.decode("utf-8-sig"), object_pairs_hook=_without_repeats if strict else None)
    except (ValueError, RecursionError):
        return None


def _marked(pairs: list[tuple[str, Any]]) -> Any:
    """Return an object, or in place of one with a key that comes twice a value that JSON does not have."""
    return dict(pairs) if len({name for name, _ in pairs}) == len(pairs) else ...


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _usable(line: bytes) -> bool:
    """Return whether a line is not one of those that are left out."""
    value = _parsed(line, strict=True)
    return isinstance(value, dict) and _depth(value) <= DEPTH and _is_text(value)


def _is_text(row: Any) -> bool:
    """Return whether a value is an object whose texts have no half of a surrogate pair."""
    try:
        return isinstance(row, dict) and bool(json.dumps(row, ensure_ascii=False).encode())
    except (UnicodeEncodeError, TypeError):
        return False


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _csv_rows(file: Path, separator: str, *, left_out: bool) -> Iterator[Read]:
    with _opened(file) as stream:
        head = stream.peek(1 << 16) if hasattr(stream, "peek") else b""
        end = "\r" if 0 <= head.find(b"\r") != head.find(b"\r\n") and b"\n" not in head[: head.find(b"\r")] else "\n"
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline=end)
        reader, names = csv.reader(text, delimiter=separator, strict=True), list[str]()
        while True:
            try:
                cells = next(reader, None)
            except csv.Error:
                continue
            if cells is None:
                return
            is_setting = not names and reader.line_num == 1 and separator.join(cells).strip('"').startswith("sep=")
            if not cells or is_setting or (names and left_out and len(cells) > len(names)):
                continue
            if not names:
                names = cells
            else:
                yield partial(_record, names, cells)


def _record(names: Sequence[str], cells: Sequence[str]) -> list[str | None]:
    return [*(cell or None for cell in cells), *([None] * (len(names) - len(cells)))]


def _table_rows(file: Path, kind: str) -> Iterator[Read]:
    if kind == "parquet":
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=1024, use_threads=False):
                yield from (partial(_scalars, batch, place) for place in range(batch.num_rows))
        return
    with pyarrow.memory_map(str(file)) as source:
        try:
            batches: Any = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            opened_file = pyarrow.ipc.open_file(source)
            batches = map(opened_file.get_batch, range(opened_file.num_record_batches))
        for batch in batches:
            yield from (partial(_scalars, batch, place) for place in range(batch.num_rows))


def _scalars(batch: Any, place: int) -> dict[str, Any]:
    return {name: batch.column(number)[place].as_py() for number, name in enumerate(batch.schema.names)}
