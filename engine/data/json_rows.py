"""Finds the rows of JSON files (one to a line, elements of a list, or an object that is the whole file) and parses them
one by one with Python's own reader, so that a value never takes its type, or a key, from another row."""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from engine.data.records import ROW_BYTES, ROW_TOO_LARGE
from engine.errors import DataError

NOT_AN_OBJECT = "not a JSON object"
KEY_TWICE = "a key that occurs twice in one object"
NO_CHARACTER = r"half of a surrogate pair (\ud800 to \udfff), which is not a character"
"""Reasons for which a row of JSON is left out (`data.broken = "skip"`)."""

SHOWN = 60
"""Characters of a broken line that are shown."""

BLOCK_BYTES = 1 << 20
ELEMENT_CHARACTERS = 256 << 20
"""Longest element of a list that is parsed to find its end."""

SPACE = re.compile(r"[ \t\r\n]*+")
"""What may be between the values of JSON."""

SKIP_FIX = "correct or remove that line; or leave out such lines and count them: --set data.broken=skip"
NO_OBJECT_FIX = (
    'write each row as an object, such as {"prompt": "…", "completion": "…"}; or leave out such rows '
    "and count them: --set data.broken=skip"
)


class FoundRow(NamedTuple):
    """Where a row of a file is, and what is wrong with it."""

    start: int
    stop: int
    """The first byte of the row, and the byte after its last."""
    line: int
    """Number of its first line, from 1."""
    columns: tuple[str, ...] = ()
    reason: str = ""
    """Why the row cannot be used, in words that are the same for all such rows; "" where it can."""
    problem: str = ""
    """The end of a sentence that begins with the file: where the row is and what is wrong."""


class _KeyTwice(Exception):
    """An object has the same key twice; its argument is the key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise _KeyTwice(next(name for name in names if names.count(name) > 1))
    return made


_STRICT = json.JSONDecoder(object_pairs_hook=_unique)
_PLAIN = json.JSONDecoder()


def parse_row(raw: bytes) -> dict[str, Any]:
    """Return the row of a line, or of an element of a list, that `find_json_rows` found. NaN and Infinity are read as
    Python's reader does; whole numbers keep all of their digits."""
    value = _PLAIN.decode(raw.removeprefix(codecs.BOM_UTF8).decode())
    return {"text": value} if isinstance(value, str) else dict(value)


def find_json_rows(file: Path) -> Iterator[FoundRow]:
    """Yield the rows of a JSON file that is not compressed, in order. Raises DataError for a list that does not parse,
    because the ends of its elements are then unknown."""
    kind = _layout(file)
    if kind == "list":
        yield from _find_elements(file)
    elif kind == "object":
        raw = file.read_bytes()
        yield _checked(raw, 0, len(raw), 1)
    else:
        yield from _find_lines(file)


def _layout(file: Path) -> str:
    """Return "lines", "list" (the file is one JSON list) or "object" (a single object over several lines)."""
    with file.open("rb") as stream:
        first = next((line for line in iter(lambda: stream.readline(ROW_BYTES + 1), b"") if line.strip()), b"")
        value = _value_of(first)
        if first.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            return "lines" if isinstance(value, list) and any(line.strip() for line in stream) else "list"
    if first and value is None and file.stat().st_size <= ROW_BYTES and isinstance(_value_of(file.read_bytes()), dict):
        return "object"
    return "lines"


def _value_of(raw: bytes) -> Any:
    """Return what the text means; None if it does not parse."""
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None


def _find_lines(file: Path) -> Iterator[FoundRow]:
    start = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _checked(line, start, start + len(line), number)
            start += len(line)


def _checked(line: bytes, start: int, stop: int, number: int) -> FoundRow:
    row, reason, problem = line_problem(line)
    place = f":{number}: {problem}" if problem else ""
    return FoundRow(start, stop, number, tuple(row or ()), reason, place)


def line_problem(line: bytes) -> tuple[dict[str, Any] | None, str, str]:
    """Return the object of a line of JSON that is not blank; or None, the reason for which it is left out, and what is
    wrong with it."""
    try:
        value = _STRICT.decode(line.removeprefix(codecs.BOM_UTF8).decode())
    except _KeyTwice as error:
        return None, KEY_TWICE, f"the key {error.args[0]!r} occurs twice in one object: {_excerpt(line)}"
    except (ValueError, RecursionError) as error:
        return None, NOT_AN_OBJECT, f"{_reason(error)}: {_excerpt(line)}"
    if isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value):
        named = f'a list of turns, where {{"messages": [...]}} is expected: {_excerpt(line)}'
        return None, NOT_AN_OBJECT, named
    if not isinstance(value, dict):
        return None, NOT_AN_OBJECT, f"{not_an_object(value)}: {_excerpt(line)}"
    if _may_have_half_pairs(line) and not _is_text(value):
        return None, NO_CHARACTER, f"{NO_CHARACTER}: {_excerpt(line)}"
    return value, "", ""


def _may_have_half_pairs(raw: bytes) -> bool:
    return b"\\ud" in raw or b"\\uD" in raw


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


JSON_NAMES = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


def not_an_object(value: Any) -> str:
    """Return what is wrong with `value`, a row in JSON that is no object."""
    return f"expected an object, found {JSON_NAMES.get(type(value), 'null')}"


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return "not JSON (not UTF-8 text)"
    return "nested too deeply to be read" if isinstance(error, RecursionError) else f"not JSON ({error})"


def _excerpt(line: bytes) -> str:
    text = line[: 8 * SHOWN].decode("utf-8", "backslashreplace").strip()
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


class _ListText:
    """The text of a file that is one JSON list, read in blocks."""

    def __init__(self, file: Path, stream: IO[bytes]) -> None:
        has_mark = stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
        stream.seek(len(codecs.BOM_UTF8) if has_mark else 0)
        self.file, self._stream = file, stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._place = "", 0
        self.byte, self.line = stream.tell(), 1
        """Where the next character is."""

    def next(self) -> str:
        """Return the next character that is no space, which stays the next one; "" at the end of the file."""
        while True:
            space = SPACE.match(self._text, self._place)
            self._advance(space.end() if space else self._place)
            if self._place < len(self._text) or not self._fill():
                return self._text[self._place : self._place + 1]

    def take(self) -> None:
        """Go on behind the next character."""
        self._advance(self._place + 1)

    def value(self) -> tuple[Any, str]:
        """Return the next value and "", or None and the key that comes twice in an object of it; go on behind it.
        Raises DataError where there is none."""
        while True:
            twice = ""
            try:
                try:
                    value, end = _STRICT.raw_decode(self._text, self._place)
                except _KeyTwice as error:
                    (value, end), twice = _PLAIN.raw_decode(self._text, self._place), error.args[0]
            except (ValueError, RecursionError) as error:
                broken = self._not_json(error)
                if len(self._text) - self._place <= ELEMENT_CHARACTERS and self._fill():
                    continue  # the element goes on in the next block
                raise broken from error
            if end == len(self._text) and self._fill():
                continue  # a number may go on
            self._advance(end)
            return (None, twice) if twice else (value, "")

    def require(self, expected: str) -> str:
        """Return the next character and go on behind it. Raises DataError unless it is one of `expected`."""
        found = self.next()
        if not found or found not in expected:
            names = " or ".join(repr(each) for each in expected)
            raise self._broken(self.line, f"not JSON (expecting {names}, found {repr(found) if found else 'the end'})")
        self.take()
        return found

    def _not_json(self, error: ValueError | RecursionError) -> DataError:
        line = self.line
        if isinstance(error, json.JSONDecodeError):
            line += self._text.count("\n", self._place, error.pos)
            return self._broken(line, f"not JSON ({error.msg})")
        return self._broken(line, _reason(error))

    def _broken(self, line: int, problem: str) -> DataError:
        return DataError(
            f"{self.file}:{line}: {problem}", fix="correct the list, or write one object per line, as .jsonl"
        )

    def _advance(self, place: int) -> None:
        passed = self._text[self._place : place]
        self.byte += len(passed) if passed.isascii() else len(passed.encode())
        self.line += passed.count("\n")
        self._place = place

    def _fill(self) -> bool:
        # At least as much again: a long element is parsed from its start after each block.
        block = self._stream.read(max(BLOCK_BYTES, len(self._text) - self._place))
        self._text, self._place = self._text[self._place :] + self._decoder.decode(block, final=not block), 0
        return bool(block)


def _find_elements(file: Path) -> Iterator[FoundRow]:
    """Yield the elements of a file that is one list. Raises DataError if it does not parse."""
    with file.open("rb") as stream:
        text, number = _ListText(file, stream), 0
        text.require("[")
        going_on = text.next() != "]"
        if not going_on:
            text.take()
        while going_on:
            number += 1
            text.next()
            start, line = text.byte, text.line
            value, twice = text.value()
            yield _checked_element(value, twice, number, FoundRow(start, text.byte, line))
            going_on = text.require(",]") == ","
        if text.next():
            text.require("")


def _checked_element(value: Any, twice: str, number: int, found: FoundRow) -> FoundRow:
    place = f": element {number} of its list: "
    if twice:
        return found._replace(reason=KEY_TWICE, problem=f"{place}the key {twice!r} occurs twice in one object")
    if found.stop - found.start > ROW_BYTES:
        return found._replace(reason=ROW_TOO_LARGE)
    row = {"text": value} if isinstance(value, str) else value  # texts are rows of text
    if not isinstance(row, dict):
        return found._replace(reason=NOT_AN_OBJECT, problem=place + not_an_object(value))
    if not _is_text(row):
        return found._replace(reason=NO_CHARACTER, problem=place + NO_CHARACTER)
    return found._replace(columns=tuple(row))


def is_single_object(file: Path) -> bool:
    """Return whether a file holds one JSON object and nothing else, such as the settings of another program."""
    with file.open("rb") as stream:
        lines = [line for _, line in zip(range(2), (line for line in stream if line.strip()), strict=False)]
    if not lines or not lines[0].lstrip(b"\xef\xbb\xbf \t").startswith(b"{"):
        return False
    return len(lines) == 1 or not isinstance(_value_of(lines[0]), dict)


def keys_of(file: Path) -> set[str]:
    """Return the keys of the first row of a JSON file; none for one that does not parse."""
    try:
        return set(next((found.columns for found in find_json_rows(file) if not found.reason), ()))
    except (DataError, ValueError):
        return set()


def fix_of_single_row(row: dict[str, Any], file: str) -> str | None:
    """Return what makes rows of a file that is a single object of columns, or of a list of rows; None if it is
    neither."""
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
