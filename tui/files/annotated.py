"""The text of a profile or recipe with the checker's problems below its lines.

Pure functions. The texts come from files, so control characters are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from textual.content import Content

from engine.config.files.text import visible
from tui.theme import glyphs
from tui.toml.syntax import Span, SyntaxKind, scan

LABEL = "line"
"""The label given to the checker instead of a file name, so that problems read `line:12: key: found; allowed`."""

STYLES: dict[SyntaxKind, str] = {
    "comment": "$muted", "table": "bold $info", "key": "", "string": "$good", "number": "$mark",
}  # fmt: skip
"""The styles of TOML. The editor's are the same, in console.tcss."""


class LineProblem(NamedTuple):
    """A problem found by the checker, and the number of its line in the file, counted from 1."""

    line: int
    text: str


def line_problems(problems: Sequence[str]) -> list[LineProblem]:
    """Parse the checker's problems, in which the constant LABEL stands for the file's name, and sort them by line; a
    problem without a line gets line 1."""
    found = []
    for problem in problems:
        match = re.match(rf"{LABEL}:(\d+): (.*)", problem, re.DOTALL)
        found.append(LineProblem(int(match[1]), visible(match[2])) if match else LineProblem(1, visible(problem)))
    return sorted(found)


def annotated_text(text: str, problems: Sequence[LineProblem], width: int, *, ascii_only: bool) -> list[Content]:
    """Return the numbered lines of the text, each followed by its problems, wrapped at `width` cells."""
    lines = text.splitlines() or [""]
    digits = len(str(len(lines)))
    shown: list[Content] = []
    for number, (line, scanned) in enumerate(zip(lines, scan(lines), strict=True), 1):
        shown.append(Content.assemble((f"{number:>{digits}} ", "$muted"), _coloured(line, scanned.spans)))
        for problem in problems:
            if problem.line == number:
                shown += _indented(problem.text, digits + 1, width, ascii_only=ascii_only)
    return shown


def _indented(text: str, indent: int, width: int, *, ascii_only: bool) -> Iterator[Content]:
    cross = glyphs("✗", ascii_only=ascii_only)
    for part in Content.styled(f"{cross} {text}", "$bad").wrap(max(16, width - indent - 1)):
        yield Content.assemble(" " * indent, part)


def _coloured(line: str, spans: Sequence[Span]) -> Content:
    """A line of TOML with colours. `visible` may lengthen what it escapes, so each part is made visible on its own."""
    parts: list[str | tuple[str, str]] = []
    at = 0
    for start, end, kind in spans:
        parts += [visible(line[at:start], keep="\t"), (visible(line[start:end], keep="\t"), STYLES[kind])]
        at = end
    return Content.assemble(*parts, visible(line[at:], keep="\t"))


def problems_below(
    problems: Sequence[LineProblem], cursor: int, width: int, height: int, *, ascii_only: bool
) -> list[Content]:
    """Return at most `height` lines to show below an editor: first the problems of the line with the cursor, then all
    others, with line numbers."""
    cross = glyphs("✗", ascii_only=ascii_only)
    ordered = sorted(problems, key=lambda problem: (problem.line != cursor + 1, problem.line))
    lines = [
        part
        for problem in ordered
        for part in Content.styled(f"{cross} line {problem.line}: {problem.text}", "$bad").wrap(max(16, width))
    ]
    return lines[:height] or [Content.styled("no problems", "$muted")]
