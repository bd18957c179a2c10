"""Finds comments, tables, keys, strings and numbers in TOML, line by line, for highlighting.

tomli and tomlkit refuse a text that is half typed; this scanner accepts any text. It carries one `LineState` from line
to line, because strings and arrays may continue over several lines. Pure functions.

Try: `python -c "from tui.toml.syntax import scan; print(scan(['a = 1  # one']))"`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

SyntaxKind = Literal["comment", "table", "key", "string", "number"]


KINDS: dict[str | None, SyntaxKind] = {"comment": "comment", "key": "key", "string": "string", "number": "number"}
"""The groups of the token pattern that are highlighted."""


class Span(NamedTuple):
    """The characters `start` to `end` (excluded) of a line, and what they are."""

    start: int
    end: int
    kind: SyntaxKind


class LineState(NamedTuple):
    """What is open where a line begins."""

    quotes: str = ""
    """The three quotes, single or double, that opened a string; empty outside such strings."""
    depth: int = 0
    """How many brackets and braces are open."""


class ScannedLine(NamedTuple):
    """The state in which a line begins, and its spans from left to right."""

    state: LineState
    spans: tuple[Span, ...]


OUTSIDE = LineState()

_HEADER = re.compile(r"\s*\[\[?\s*[A-Za-z_\"'][^\]#]*\]\]?\s*(?=#|$)|\s*\[\[?[^\]#=]*$")
_PLAIN_HEADER = re.compile(r"\s*\[\[?\s*[A-Za-z_][\w.-]*\s*\]\]?\s*(?:#.*)?$")
_END = {'"""': re.compile(r'(?:[^\\]|\\.)*?"{3,5}'), "'''": re.compile(r".*?'{3,5}")}
_TOKEN = re.compile(
    r"""(?P<comment>\#.*)
    | (?P<long>\"{3}|'{3})
    | (?P<key>(?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*(?=\s*=))
    | (?P<string>"(?:[^"\\]|\\.)*"?|'[^']*'?)
    | (?P<number>[+-]?(?:\d[\w.:+-]*|inf\b|nan\b)|true\b|false\b)
    | (?P<open>[\[{]) | (?P<close>[\]}])
    | [^\s"'\#\[\]{},=]+ | .""",
    re.VERBOSE,
)


def scan(lines: Sequence[str]) -> list[ScannedLine]:
    """Scan a text, given as lines without their ends."""
    state, found = OUTSIDE, []
    for line in lines:
        if state.depth and _PLAIN_HEADER.match(line):
            state = OUTSIDE  # an array that is still being typed: the tables below it are highlighted all the same
        spans, after = _scan_line(line, state)
        found.append(ScannedLine(state, spans))
        state = after
    return found


@lru_cache(maxsize=4096)
def _scan_line(line: str, state: LineState) -> tuple[tuple[Span, ...], LineState]:
    """Return the spans of one line, and the state after it."""
    spans: list[Span] = []
    (quotes, depth), at = state, 0
    if state == OUTSIDE and (header := _HEADER.match(line)):
        spans.append(Span(0, header.end(), "table"))
        at = header.end()
    while at < len(line) or quotes:
        if quotes:
            end = _END[quotes].match(line, at)
            start, at = at - 3 if at else 0, end.end() if end else len(line)
            spans.append(Span(start, at, "string"))
            if end is None:
                break
            quotes = ""
        elif token := _TOKEN.match(line, at):
            at, kind = token.end(), token.lastgroup
            depth = max(0, depth + (kind == "open") - (kind == "close"))
            quotes = token[0] if kind == "long" else ""
            if kind in KINDS:
                spans.append(Span(token.start(), at, KINDS[kind]))
    return tuple(spans), LineState(quotes, depth)
