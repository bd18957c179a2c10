"""Help: the key table, the present screen's keys first.

Try: `?`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.content import Content

from tui import keys
from tui.keys import Key, bindings
from tui.screens.table import SCREENS
from tui.screens.text_screen import ReadingScreen

KEY_WIDTH = 20

LISTS = (("up k, down j", "one row"), ("pageup, pagedown", "one page"), ("home g, end G", "first or last row"))
"""What moves in every list; these belong to the list itself and not to a screen."""


class HelpScreen(ReadingScreen):
    """What the keys do."""

    where = "help"
    BINDINGS = bindings("help")

    def receive(self, argument: object) -> None:
        """The screen that help was asked for on."""
        self._asked_on = str(argument or "")

    def lines(self, width: int) -> Sequence[Content]:
        """One section a screen."""
        order = sorted(SCREENS, key=lambda row: row.name != self._asked_on)
        lines = [line for row in order for line in self._section(row.title, keys.of(row.name), width)]
        around = [Key("", row.key, "", "", f"the screen {row.title}") for row in SCREENS if row.key]
        lines[0:0] = [] if self._asked_on else [Content("")]
        lines += self._section("Everywhere", [*keys.of(keys.EVERYWHERE), *around], width)
        lines += self._section("Lists", [Key("", shown, "", "", what) for shown, what in LISTS], width)
        return lines

    @staticmethod
    def _section(title: str, rows: Sequence[Key], width: int) -> Iterable[Content]:
        if not rows:
            return
        yield Content.styled(f" {title}", "bold $info")
        for row in rows:
            wrapped = Content(row.help).wrap(max(20, width - KEY_WIDTH - 4))
            shown = keys.all_shown(row.keys) if row.action else row.keys
            for index, part in enumerate(wrapped):
                yield Content.assemble((f"   {shown if index == 0 else '':<{KEY_WIDTH}}", "bold"), part)
        yield Content("")
