"""The list of completions under the cursor of the editor: one row for each key, value or table that can be written."""

from __future__ import annotations

from textual.content import Content
from textual.geometry import Offset

from tui.theme import glyphs
from tui.toml.completion import Candidate, Completion
from tui.widgets.row_list import RowList

MAX_ROWS = 8
"""Rows of the list; it scrolls if there are more candidates."""

NAME_CELLS = 28
"""Most cells for a name."""

ALLOWED_SHARE = 0.4
"""Most of the cells beside the names that are used for what a key allows; its meaning has the others."""


class CompletionList(RowList):
    """A list that floats above the text, below the cursor or where there is no room above it. It never has the focus:
    the text area calls its methods."""

    can_focus = False
    DEFAULT_CSS = """
    CompletionList { position: absolute; layer: above; display: none; background: $panel; border-left: solid $info; }
    """

    def __init__(self) -> None:
        super().__init__(id="completions")
        self._completion: Completion | None = None
        self.moved = False
        """Whether the user has moved in the list since it was opened."""

    @property
    def completion(self) -> Completion | None:
        """What the list offers; None while it is closed."""
        return self._completion

    @property
    def chosen(self) -> Candidate | None:
        """The candidate under the list's cursor; None while the list is closed."""
        return self._completion.candidates[self.cursor] if self._completion else None

    def open(self, completion: Completion, cursor: Offset) -> None:
        """Show the candidates beside the text cursor, which is at `cursor` of the screen."""
        self._completion, self.moved = completion, False
        screen = self.screen.size
        cut = glyphs("…", ascii_only=getattr(self.app, "ascii_only", False))
        rows = [_row(each) for each in _aligned(completion.candidates, screen.width, cut)]
        width = min(screen.width, max(row.cell_length for row in rows) + 2)
        height = min(len(rows), MAX_ROWS, max(1, screen.height - 4))
        below = cursor.y + 1 + height < screen.height
        left = min(cursor.x - len(completion.typed) - 2, screen.width - width)
        self.styles.width, self.styles.height = width, height
        self.styles.offset = (max(0, left), cursor.y + 1 if below else max(1, cursor.y - height))
        self.display = True
        self.cursor = self.top = 0
        self.show(rows)
        self.redraw_all()

    def close(self) -> None:
        """Hide the list."""
        self._completion, self.display = None, False

    def action_move(self, rows: int) -> None:
        """Move the list's cursor by this many rows; beyond the last row follows the first."""
        if self._completion:
            self.moved = True
            self.move_to((self.cursor + rows) % len(self._completion.candidates))


def _aligned(candidates: list[Candidate], width: int, cut: str) -> list[Candidate]:
    """The candidates with names and what they allow padded to the longest; what is too long ends with `cut`."""
    names = min(NAME_CELLS, max(len(each.name) for each in candidates))
    allowed = min(int((width - names) * ALLOWED_SHARE), max(len(each.allowed) for each in candidates))
    return [
        each._replace(name=_cell(each.name, names, cut), allowed=_cell(each.allowed, allowed, cut))
        for each in candidates
    ]


def _cell(text: str, cells: int, cut: str) -> str:
    return text.ljust(cells) if len(text) <= cells else text[: cells - 1] + cut


def _row(candidate: Candidate) -> Content:
    allowed = (f" {candidate.allowed} ", "$info") if candidate.allowed.strip() else ""
    return Content.assemble(f" {candidate.name} ", allowed, (f" {candidate.help}", "$muted") if candidate.help else "")
