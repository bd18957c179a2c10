"""Finds the line of each key in a TOML text.

Neither tomli nor pydantic reports lines. This scanner reads a text that tomli has already accepted, so it does not
validate: it only tracks tables, arrays of tables, dotted and quoted keys, inline tables, arrays and long strings.

Try: `python -c "from engine.spec.files.lines import key_lines; print(key_lines('[a]\\nb.c = 1'))"`
"""

from __future__ import annotations

import re

import tomli

Place = tuple[str | int, ...]
"""The path of a value in a document: keys, and indices of list entries, outermost first."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'",
    re.DOTALL,
)
_PLAIN = re.compile(r"[^,\]}\n#]*")


def key_lines(text: str) -> dict[Place, int]:
    """Maps the place of every table, key and list entry of a valid TOML text to its line, counted from 1."""
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
        """Scan `a.b = value` inside `table` and record the lines of its keys."""
        line = self._line_here()
        place = self._walk(self._key(), table, line)
        self._skip(_SPACE)
        self._take("=")
        self._skip(_SPACE)
        self._value(place)

    def _entry(self, keys: list[str]) -> Place:
        """Record a `[[a.b]]` header; returns the place of the new list entry."""
        place = (*self._walk(keys[:-1]), keys[-1])
        self.lines.setdefault(place, self._line_here())
        self.entries[place] = self.entries.get(place, -1) + 1
        entry = (*place, self.entries[place])
        self.lines[entry] = self._line_here()
        return entry

    def _walk(self, keys: list[str], start: Place = (), line: int | None = None) -> Place:
        """Record the line of each of the nested `keys` below `start`; returns the place of the last. A key that
        names an array of tables refers to its newest entry."""
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
