"""A pane of the Run screen that is scrolled from its top: scores and generated answers, which take the place of all
others while they are open, and on a wide screen the answers alone.

Try: `b` on the Run screen of a run that was scored
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from tui.widgets.text_lines import TextLines


class ScoresPane(TextLines):
    """A pane of lines that is scrolled from its top; closed at first."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self.is_open = False
        self._top = 0
        """Number of the first visible line."""
        self._all: list[Content] = []

    def toggle(self) -> None:
        """Open the pane at its first line, or close it."""
        self.is_open, self._top = not self.is_open, 0
        self.display = self.is_open

    def set_lines(self, lines: Sequence[Content]) -> None:
        """Replace all lines. The number of the first visible line stays as it was, unless there are too few lines."""
        self._all = list(lines)
        self.scroll_lines(0)

    def scroll_lines(self, lines: int) -> None:
        """Scroll up by this many lines, or down if the number is negative."""
        room = max(1, self.size.height)
        self._top = max(0, min(self._top - lines, len(self._all) - room))
        shown = self._all[self._top : self._top + room]
        below = len(self._all) - self._top - room
        if below > 0:
            shown[-1] = Content.styled(f" {below + 1} more below; down or j scrolls", "$caution")
        self.show(shown)

    def on_resize(self) -> None:
        """Show as many lines as the new height has room for."""
        super().on_resize()
        self.scroll_lines(0)

    @property
    def page(self) -> int:
        """The number of lines by which the page keys scroll."""
        return max(1, self.size.height - 1)
