"""A file's text with what the checker says beside its lines. Pure functions; texts are strangers' and are cleaned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from textual.content import Content

from engine.spec.files.text import visible
from tui.theme import draw

LABEL = "line"
"""What problems are labelled with instead of a file, so that they read `line:12: key: found; allowed`."""


class Note(NamedTuple):
    """A problem and the line it belongs to, counted from 1."""

    line: int
    text: str


def notes_of(problems: Sequence[str]) -> list[Note]:
    """Problems labelled with LABEL as notes, in the order of their lines."""
    notes = []
    for problem in problems:
        match = re.match(rf"{LABEL}:(\d+): (.*)", problem, re.DOTALL)
        notes.append(Note(int(match[1]), visible(match[2])) if match else Note(1, visible(problem)))
    return sorted(notes)


def annotated_lines(text: str, notes: Sequence[Note], width: int, *, ascii_only: bool) -> list[Content]:
    """The numbered lines; below each line that something is wrong with, what."""
    lines = text.splitlines() or [""]
    digits = len(str(len(lines)))
    shown: list[Content] = []
    for number, line in enumerate(lines, 1):
        shown.append(Content.assemble((f"{number:>{digits}} ", "$muted"), _coloured(visible(line, keep="\t"))))
        for note in notes:
            if note.line == number:
                shown += _note(note.text, digits + 1, width, ascii_only=ascii_only)
    return shown


def _note(text: str, indent: int, width: int, *, ascii_only: bool) -> Iterator[Content]:
    glyph = draw("✗", ascii_only=ascii_only)
    for part in Content.styled(f"{glyph} {text}", "$bad").wrap(max(16, width - indent - 1)):
        yield Content.assemble(" " * indent, part)


def _coloured(line: str) -> Content:
    """Comments and headers of tables stand back or out; a key is told from its value by its place alone."""
    bare = line.strip()
    style = "$muted" if bare.startswith("#") else "bold $info" if bare.startswith("[") else ""
    return Content.styled(line, style)


def beside_lines(notes: Sequence[Note], top: int, width: int, height: int, *, ascii_only: bool) -> list[Content]:
    """For an editor that shows `height` lines from line `top` (counted from 0): each note on the line it belongs to,
    its rest on the lines after it as far as they are free."""
    glyph = draw("✗", ascii_only=ascii_only)
    texts = {line: "; ".join(note.text for note in notes if note.line == line) for line, _ in notes}
    lines: list[Content] = []
    rest: list[Content] = []
    for line in range(top + 1, top + height + 1):
        if line in texts:
            rest = list(Content.styled(f"{glyph} {texts[line]}", "$bad").wrap(max(16, width - 1)))
        lines.append(rest.pop(0) if rest else Content(""))
    hidden = sum(not top < note.line < top + height for note in notes)
    if hidden and lines:
        lines[-1] = Content.styled(f"{glyph} {hidden} out of sight: f3 goes there", "$bad")
    return lines


def below_lines(notes: Sequence[Note], cursor: int, width: int, height: int, *, ascii_only: bool) -> list[Content]:
    """For an editor without room beside it: what is wrong with the cursor's line first, then the others with theirs."""
    glyph = draw("✗", ascii_only=ascii_only)
    ordered = sorted(notes, key=lambda note: (note.line != cursor + 1, note.line))
    lines = [
        part
        for note in ordered
        for part in Content.styled(f"{glyph} line {note.line}: {note.text}", "$bad").wrap(max(16, width))
    ]
    return lines[:height] or [Content.styled("nothing is wrong with it", "$muted")]
