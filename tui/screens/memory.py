"""Memory by phase: where the peak of a plan lies, why, what lowers it, and the bytes of each phase by component.

Try: `f` on the Launch screen, or on a run; headless: `tunedeck plan -p demo -r demo`.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from tui.keys import bindings
from tui.screens.text_screen import TextScreen
from tui.widgets.memory_bar import Look
from tui.widgets.memory_phases import PlannedMemory, phase_lines


class MemoryScreen(TextScreen):
    """The screen with the phases of one plan."""

    screen_name = "memory"
    BINDINGS = bindings("memory")

    def set_argument(self, argument: object) -> None:
        """Take the plan's figures."""
        assert isinstance(argument, PlannedMemory)
        self._planned = argument

    def title_detail(self) -> str:
        """What the plan is of, for the title bar."""
        return self._planned.title

    def text_lines(self, width: int) -> Sequence[Content]:
        """The words about the peak, a bar for each phase, and the table of all phases."""
        look = Look(letters=self.console.ascii_only or self.app.no_color, ascii_only=self.console.ascii_only)
        lines = phase_lines(self._planned, max(40, width - 2), look)
        return [Content.assemble(" ", line) for line in lines]
