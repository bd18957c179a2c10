"""Tabs of text: a heading with the tabs' names, and under it the lines of the open tab, scrolled by a cursor.

A single list serves all tabs, so changing the tab needs no layout pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content

from tui.widgets.row_list import RowList
from tui.widgets.text_lines import TextLines, clickable


class TabPanel(Vertical):
    """A widget that shows the names of all tabs and the lines of the open tab. A click on a name calls the screen's
    `action_open_tab` with it."""

    def __init__(self, tabs: Sequence[str], *, id: str, classes: str) -> None:
        super().__init__(id=id, classes=classes)
        self.tabs = tuple(tabs)
        self.tab = self.tabs[0]
        """The tab that is open."""

    def compose(self) -> ComposeResult:
        """Yield the line with the tabs' names and the list of the open tab's lines."""
        yield TextLines(classes="heading")
        yield RowList(id=f"{self.id}-rows")

    def next_tab(self, by: int) -> None:
        """Open the tab `by` places after the open tab, or before it if `by` is negative."""
        self.tab = self.tabs[(self.tabs.index(self.tab) + by) % len(self.tabs)]
        self.query_one(RowList).move_to(0)

    def show(self, lines: Sequence[Content], mark: str) -> None:
        """Show the lines of the open tab; `mark` is drawn at the start of the heading, such as the mark of the pane in
        front."""
        styles = {tab: "bold reverse" if tab == self.tab else "$muted" for tab in self.tabs}
        parts = [
            clickable(Content.styled(f" {tab} ", style), f"screen.open_tab({tab!r})") for tab, style in styles.items()
        ]
        self.query_one(TextLines).show([Content.assemble((mark, "bold $info"), *parts)])
        self.query_one(RowList).show(lines)

    @property
    def line(self) -> int:
        """Index of the line under the cursor."""
        return self.query_one(RowList).cursor
