"""A TOML document in memory: its data, and for every key the file and line where it was written."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli

from engine.config.files.text import visible
from engine.errors import SpecError

Place = tuple[str | int, ...]
"""Keys, and indices of list entries, outermost first."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'",
    re.DOTALL,
)
_PLAIN = re.compile(r"[^,\]}\n#]*")


def key_lines(text: str) -> dict[Place, int]:
    """The line, counted from 1, of every table, key and list entry of a text that tomli has accepted. Neither tomli nor
    pydantic reports lines."""
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Place, int] = {}
        self.entries: dict[Place, int] = {}
        self._counted_to = 0
        self._line = 1

    def scan(self) -> dict[Place, int]:
        table: Place = ()
        self._skip(_BLANK)
        while self.at < len(self.text):
            if self._take("[["):
                table = self._entry(self._key())
                self._take("]]")
            elif self._take("["):
                table = self._walk(self._key())
                self._take("]")
            else:
                self._pair(table)
            self._skip(_BLANK)
        return self.lines

    def _pair(self, table: Place) -> None:
        line = self._line_here()
        place = self._walk(self._key(), table, line)
        self._skip(_SPACE)
        self._take("=")
        self._skip(_SPACE)
        self._value(place)

    def _entry(self, keys: list[str]) -> Place:
        place = (*self._walk(keys[:-1]), keys[-1])
        self.lines.setdefault(place, self._line_here())
        self.entries[place] = self.entries.get(place, -1) + 1
        entry = (*place, self.entries[place])
        self.lines[entry] = self._line_here()
        return entry

    def _walk(self, keys: list[str], start: Place = (), line: int | None = None) -> Place:
        """Record the line of each nested key below `start`; the name of an array of tables means its newest entry."""
        place = start
        for key in keys:
            place = (*place, key)
            self.lines.setdefault(place, line or self._line_here())
            if place in self.entries:
                place = (*place, self.entries[place])
        return place

    def _key(self) -> list[str]:
        keys = []
        while True:
            self._skip(_SPACE)
            if match := _STRING.match(self.text, self.at):
                keys.append(str(tomli.loads(f"key = {match[0]}")["key"]))
            else:
                match = _BARE_KEY.match(self.text, self.at)
                if match is None:
                    raise ValueError(f"not a TOML key at character {self.at}: scan only what tomli accepts")
                keys.append(match[0])
            self.at = match.end()
            self._skip(_SPACE)
            if not self._take("."):
                return keys

    def _value(self, place: Place) -> None:
        if self._take("["):
            self._array(place)
        elif self._take("{"):
            self._inline_table(place)
        elif match := _STRING.match(self.text, self.at):
            self.at = match.end()
        else:
            self._skip(_PLAIN)

    def _array(self, place: Place) -> None:
        index = 0
        self._skip(_BLANK)
        while not self._take("]"):
            self.lines[(*place, index)] = self._line_here()
            self._value((*place, index))
            index += 1
            self._skip(_BLANK)
            self._take(",")
            self._skip(_BLANK)

    def _inline_table(self, place: Place) -> None:
        self._skip(_BLANK)
        while not self._take("}"):
            self._pair(place)
            self._skip(_BLANK)
            self._take(",")
            self._skip(_BLANK)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        if match := pattern.match(self.text, self.at):
            self.at = match.end()

    def _take(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        if found:
            self.at += len(token)
        return found

    def _line_here(self) -> int:
        # Only the text since the last call is counted, which keeps the scan linear.
        self._line += self.text.count("\n", self._counted_to, self.at)
        self._counted_to = self.at
        return self._line


MAX_FILE_BYTES = 1 << 20
"""A larger file is refused: a profile or recipe is a page of text."""

MAX_DEPTH = 100
"""Allowed nesting of tables and lists; a spec needs five levels."""

INTEGER_RANGE = "integers in TOML have 64 bits, at most 9223372036854775807"

FROM_COMMAND_LINE = "--set"
"""The label, in `Document.where`, of values from the command line."""


@dataclass(frozen=True)
class Problem:
    """What is wrong at a place (keys and list indices), and what is allowed; `beside`: other places that contribute."""

    place: Place
    found: str
    allowed: str
    beside: tuple[Place, ...] = ()

    def under(self, prefix: Place) -> Problem:
        """A copy for a document that contains the checked one as a table at `prefix`."""
        beside = tuple((*prefix, *place) for place in self.beside)
        return Problem((*prefix, *self.place), self.found, self.allowed, beside)


Problems = Iterator[Problem]


@dataclass
class Document:
    """The data of a TOML file, perhaps with overrides. `where` maps each place to "file:line" or "--set"."""

    label: str
    data: dict[str, Any]
    where: dict[Place, str] = field(default_factory=dict)
    sha256: str = ""

    def written_at(self, place: Place) -> str:
        """The "file:line" or "--set" of `place`, or of the nearest enclosing table if that is not recorded."""
        for length in range(len(place), 0, -1):
            if place[:length] in self.where:
                return self.where[place[:length]]
        return f"{self.label}:1"

    def render(self, problem: Problem) -> str:
        """A problem as one line: `file:line: key: found; allowed`, or `--set key: found; allowed`."""
        typed = [place for place in (problem.place, *problem.beside) if self.written_at(place) == FROM_COMMAND_LINE]
        place = typed[0] if typed else problem.place
        label, key = self.written_at(place), key_text(place, self.data)
        head = f"{label} {key}" if label == FROM_COMMAND_LINE else f"{label}: {key}"
        return f"{head}: {problem.found}; {problem.allowed}"

    def render_all(self, problems: Iterable[Problem]) -> list[str]:
        """In the order of their lines, without duplicates."""
        return sorted(dict.fromkeys(self.render(problem) for problem in problems), key=_line_of)


def _line_of(rendered: str) -> int:
    match = re.match(r".*?:(\d+): ", rendered)
    return int(match[1]) if match else 0


def read_document(path: str | Path) -> Document:
    """Read and parse one TOML file. Raises SpecError with file and line for anything that is not TOML."""
    label = visible(str(path))
    raw = read_bytes(Path(path), label)
    document = _parsed(raw, label)
    return replace(document, data=_copied(document.data), where=dict(document.where))


@lru_cache(maxsize=64)
def _parsed(raw: bytes, label: str) -> Document:
    """Cached: the console resolves the same files at every keystroke, and parsing takes longer than planning."""
    return parse_document(decode_utf8(raw, label), label, hashlib.sha256(raw).hexdigest())


def _copied(node: Any, room: int = MAX_DEPTH) -> Any:
    """Raises RecursionError for tables and lists nested more than `room` levels deep."""
    if not isinstance(node, (dict, list)):
        return node
    if not room:
        raise RecursionError
    if isinstance(node, dict):
        return {key: _copied(value, room - 1) for key, value in node.items()}
    return [_copied(value, room - 1) for value in node]


def parse_document(text: str, label: str, sha256: str = "") -> Document:
    """Parse the text of a TOML file that messages call `label`. Raises SpecError as `read_document` does."""
    try:
        data = _copied(tomli.loads(text))
    except tomli.TOMLDecodeError as error:
        raise SpecError([_syntax_problem(label, error, text)], fix="see https://toml.io for the format") from None
    except ValueError:
        # The only other ValueError: Python refuses to read whole numbers of thousands of digits.
        raise SpecError([f"{label}: an integer is too long; {INTEGER_RANGE}"]) from None
    except RecursionError:
        raise SpecError([f"{label}:1: tables or lists are nested too deeply; no key of Tunedeck needs this"]) from None
    where = {place: f"{label}:{line}" for place, line in key_lines(text.replace("\r\n", "\n")).items()}
    return Document(label, data, where, sha256)


def read_bytes(path: Path, label: str) -> bytes:
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SpecError([f"{label}: not a regular file; a TOML file is needed"])
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SpecError([f"{label}: cannot be read: {reason}"], fix="check the path and its permissions") from None
    if len(raw) > MAX_FILE_BYTES:
        raise SpecError([f"{label}: larger than {MAX_FILE_BYTES // 1024} KiB, the limit for profiles and recipes"])
    return raw


def _open_without_waiting(path: str, flags: int) -> int:
    """An `opener` that does not block, as opening a FIFO would until another process writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def decode_utf8(raw: bytes, label: str) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SpecError([f"{label}:1: UTF-16 text; TOML files are UTF-8"], fix="save the file as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = f"0x{raw[error.start]:02x}"
        raise SpecError(
            [f"{label}:{line}: byte {byte} is not UTF-8; TOML files are UTF-8"], fix="save the file as UTF-8"
        ) from None


def _syntax_problem(label: str, error: tomli.TOMLDecodeError, text: str) -> str:
    line = min(error.lineno, text.count("\n") + 1)
    lines = text.splitlines()
    while line > 1 and (line > len(lines) or not lines[line - 1].strip()):
        line -= 1
    shown = visible(lines[line - 1].strip()[:60]) if lines else ""
    if error.msg.startswith(("Cannot overwrite a value", "Cannot declare")):
        return f"{label}:{line}: a key or table that is already in the file: {shown}"
    return f"{label}:{line}: not TOML: {visible(error.msg)} at column {error.colno}: {shown}"


def key_text(place: Place, data: Any) -> str:
    """A place as a dotted key, such as `data.sources.main.path`; a list entry by its name, else its index."""
    words: list[str] = []
    node = data
    for part in place:
        node = _child(node, part)
        if isinstance(part, int):
            name = node.get("name") if isinstance(node, dict) else None
            words.append(visible(name) if isinstance(name, str) and name else str(part))
        else:
            words.append(visible(part) if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{visible(part)}"')
    return ".".join(words) or "file"


def _child(node: Any, part: str | int) -> Any:
    if isinstance(part, str):
        return node.get(part) if isinstance(node, dict) else None
    return node[part] if isinstance(node, list) and 0 <= part < len(node) else None


def value_at(data: Any, place: Place) -> Any:
    """None if nothing is at the place."""
    for part in place:
        data = _child(data, part)
    return data


def merge_tables(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """A copy of `base` with `extra` written over it: tables are merged, all other values replaced."""
    merged = dict(base)
    for key, value in extra.items():
        below = merged.get(key)
        merged[key] = merge_tables(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
