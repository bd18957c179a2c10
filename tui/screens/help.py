"""Help: the key table, the present screen's keys first.

Try: `?`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.content import Content

from tui import keys
from tui.keys import Key, bindings
from tui.screens.table import SCREENS
from tui.screens.text_screen import TextScreen

KEY_WIDTH = 20

LISTS = (("up k, down j", "one row"), ("pageup, pagedown", "one page"), ("home g, end G", "first or last row"))
"""Keys that move the cursor in every list; they are bound by the list widget and not in the key table."""


class HelpScreen(TextScreen):
    """The screen that lists the keys of every screen."""

    screen_name = "help"
    BINDINGS = bindings("help")

    def set_argument(self, argument: object) -> None:
        """Take the name of the screen from which help was opened."""
        self._opened_from = str(argument or "")

    def text_lines(self, width: int) -> Sequence[Content]:
        """A section with the keys of each screen, the screen from which help was opened first."""
        order = sorted(SCREENS, key=lambda row: row.name != self._opened_from)
        lines = [line for row in order for line in self._section(row.title, keys.of_screen(row.name), width)]
        digits = [Key("", row.key, "", "", f"the screen {row.title}") for row in SCREENS if row.key]
        lines[0:0] = [] if self._opened_from else [Content("")]
        lines += self._section("Everywhere", [*keys.of_screen(keys.EVERYWHERE), *digits], width)
        lines += self._section("Lists", [Key("", shown, "", "", what) for shown, what in LISTS], width)
        return lines

    @staticmethod
    def _section(title: str, rows: Sequence[Key], width: int) -> Iterable[Content]:
        if not rows:
            return
        yield Content.styled(f" {title}", "bold $info")
        for row in rows:
            wrapped = Content(row.help).wrap(max(20, width - KEY_WIDTH - 4))
            shown = keys.all_key_labels(row.keys) if row.action else row.keys
            for index, part in enumerate(wrapped):
                yield Content.assemble((f"   {shown if index == 0 else '':<{KEY_WIDTH}}", "bold"), part)
        yield Content("")
