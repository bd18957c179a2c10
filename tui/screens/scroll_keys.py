"""The actions of the keys that scroll a pane.

Try: `j` and `k` on the Run screen
"""

from __future__ import annotations

from typing import Protocol

SCROLL_ACTIONS = ("older", "newer", "page_older", "page_newer", "newest")
"""The actions of `ScrollKeys`."""


class Scrollable(Protocol):
    """A pane of lines that scrolls."""

    @property
    def page(self) -> int:
        """The number of lines by which the page keys scroll."""

    def scroll_lines(self, lines: int) -> None:
        """Scroll up by this many lines, or down if the number is negative."""


class ScrollKeys:
    """A mixin for screens: the actions of the keys that scroll."""

    @property
    def scrolled(self) -> Scrollable:
        """The pane on which the keys act."""
        raise NotImplementedError

    def do_older(self) -> None:
        """Scroll up by a line."""
        self.scrolled.scroll_lines(1)

    def do_newer(self) -> None:
        """Scroll down by a line."""
        self.scrolled.scroll_lines(-1)

    def do_page_older(self) -> None:
        """Scroll up by a page."""
        self.scrolled.scroll_lines(self.scrolled.page)

    def do_page_newer(self) -> None:
        """Scroll down by a page."""
        self.scrolled.scroll_lines(-self.scrolled.page)

    def do_newest(self) -> None:
        """Scroll to the newest line, and show new lines as they arrive."""
        self.scrolled.scroll_lines(-(10**9))
