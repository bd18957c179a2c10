"""Tabs of lines: a heading with the tabs' names, and under it the lines of the one that is open, scrolled by a cursor.

One list serves all tabs, so that changing the tab lays out nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content

from tui.widgets.row_list import Rows
from tui.widgets.text_lines import Lines


class Panel(Vertical):
    """The tabs and the lines of the open one."""

    def __init__(self, tabs: Sequence[str], *, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self.tabs = tuple(tabs)
        self.tab = self.tabs[0]
        """The tab that is open."""

    def compose(self) -> ComposeResult:
        """Heading and lines."""
        yield Lines(classes="heading")
        yield Rows(id=f"{self.id}-rows")

    def turn(self, by: int) -> None:
        """Open the next tab, or the one before."""
        self.tab = self.tabs[(self.tabs.index(self.tab) + by) % len(self.tabs)]
        self.query_one(Rows).move_to(0)

    def show(self, lines: Sequence[Content], mark: str) -> None:
        """The open tab's lines; `mark` stands before the heading."""
        parts = [(f" {tab} ", "bold reverse" if tab == self.tab else "$muted") for tab in self.tabs]
        self.query_one(Lines).show([Content.assemble((mark, "bold $info"), *parts)])
        self.query_one(Rows).show(lines)

    @property
    def line(self) -> int:
        """The line under the cursor."""
        return self.query_one(Rows).cursor
