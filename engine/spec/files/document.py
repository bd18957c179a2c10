"""A TOML file read and laid in layers: the data, and for every key where it was written, so that each problem says so.

Reading, merging and the wording of a problem's place live here. What is allowed is `engine.spec.check.check`; which
file is meant is `engine.spec.files.find`.

Try: `python -c "from engine.spec.files.document import read_document; print(read_document('my.toml').data)"`
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli

from engine.errors import SpecError
from engine.spec.files.lines import Place, key_lines
from engine.spec.files.text import visible

MAX_FILE_BYTES = 1 << 20
"""A profile or recipe is a page of text; anything larger is not one."""

MAX_DEPTH = 100
"""Levels of tables and lists; a spec has five."""

INTEGER_RANGE = "TOML's whole numbers have 64 bits, at most 9223372036854775807"

FROM_COMMAND_LINE = "--set"
"""Label of values that came from the command line."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong: where, what was found, what is allowed; `beside` are the other places that take part in it."""

    place: Place
    found: str
    allowed: str
    beside: tuple[Place, ...] = ()

    def under(self, prefix: Place) -> Problem:
        """The same problem in a document where this one's tables stand under `prefix`."""
        beside = tuple((*prefix, *place) for place in self.beside)
        return Problem((*prefix, *self.place), self.found, self.allowed, beside)


@dataclass
class Document:
    """Data in layers. `where` gives the label of each written place: "file:line", or "--set"."""

    label: str
    data: dict[str, Any]
    where: dict[Place, str] = field(default_factory=dict)
    sha256: str = ""

    def written_at(self, place: Place) -> str:
        """Label of the nearest written place on the way up."""
        for length in range(len(place), 0, -1):
            if place[:length] in self.where:
                return self.where[place[:length]]
        return f"{self.label}:1"

    def render(self, problem: Problem) -> str:
        """`file:line: key: found; allowed`, or `--set key: found; allowed` where the command line is to blame."""
        to_blame = [place for place in (problem.place, *problem.beside) if self.written_at(place) == FROM_COMMAND_LINE]
        place = to_blame[0] if to_blame else problem.place
        label, key = self.written_at(place), key_text(place, self.data)
        head = f"{label} {key}" if label == FROM_COMMAND_LINE else f"{label}: {key}"
        return f"{head}: {problem.found}; {problem.allowed}"

    def refuse(self, problems: Iterable[Problem]) -> list[str]:
        """The rendered problems, in the order of the file, each once."""
        return sorted(dict.fromkeys(self.render(problem) for problem in problems), key=_line_of)


def _line_of(rendered: str) -> int:
    match = re.match(r".*?:(\d+): ", rendered)
    return int(match[1]) if match else 0


def read_document(path: str | Path) -> Document:
    """Read and parse one TOML file. Raises SpecError with file and line for anything that cannot be read as TOML."""
    label = visible(str(path))
    raw = _read_bytes(Path(path), label)
    document = _parsed(raw, label)
    return replace(document, data=_copied(document.data), where=dict(document.where))


@lru_cache(maxsize=64)
def _parsed(raw: bytes, label: str) -> Document:
    """A file's document. The console asks for the same files at every letter typed over them, and parsing is dearer
    than planning; being kept by content, no change of a file is ever missed. Not to be changed by the caller."""
    return parse_document(_decode(raw, label), label, hashlib.sha256(raw).hexdigest())


def _copied(node: Any, room: int = MAX_DEPTH) -> Any:
    """Nested tables and lists anew; what TOML has besides cannot be changed. Raises RecursionError if they are nested
    deeper than `room`."""
    if not isinstance(node, (dict, list)):
        return node
    if not room:
        raise RecursionError
    if isinstance(node, dict):
        return {key: _copied(value, room - 1) for key, value in node.items()}
    return [_copied(value, room - 1) for value in node]


def parse_document(text: str, label: str, sha256: str = "") -> Document:
    """Parse the text of a TOML file that is called `label`. Raises SpecError as `read_document` does."""
    try:
        data = _copied(tomli.loads(text))
    except tomli.TOMLDecodeError as error:
        raise SpecError([_syntax_problem(label, error, text)], fix="see https://toml.io for the format") from None
    except ValueError:
        # The only one tomli passes on: Python refuses to read whole numbers of thousands of digits.
        raise SpecError([f"{label}: a whole number too long to read; {INTEGER_RANGE}"]) from None
    except RecursionError:
        raise SpecError([f"{label}:1: tables or lists nested too deeply; no key of Tunedeck needs that"]) from None
    where = {place: f"{label}:{line}" for place, line in key_lines(text.replace("\r\n", "\n")).items()}
    return Document(label, data, where, sha256)


def _read_bytes(path: Path, label: str) -> bytes:
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SpecError([f"{label}: not a regular file; a TOML file is needed"])
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SpecError([f"{label}: cannot be read: {reason}"], fix="check the path and its permissions") from None
    if len(raw) > MAX_FILE_BYTES:
        raise SpecError([f"{label}: larger than {MAX_FILE_BYTES // 1024} KiB; a profile or recipe is a page of text"])
    return raw


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a FIFO without hanging until someone writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _decode(raw: bytes, label: str) -> str:
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
        return f"{label}:{line}: a key or table that the file already has: {shown}"
    return f"{label}:{line}: not TOML: {visible(error.msg)} at column {error.colno}: {shown}"


def key_text(place: Place, data: Any) -> str:
    """A place as people write it: `data.sources.main.path`, list entries by name where they have one."""
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
    """The value at a place, or None where nothing is written."""
    for part in place:
        data = _child(data, part)
    return data


def merge_tables(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`extra` laid over `base`: tables are merged, everything else is replaced. Neither is changed."""
    merged = dict(base)
    for key, value in extra.items():
        below = merged.get(key)
        merged[key] = merge_tables(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
