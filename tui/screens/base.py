"""What every screen has: a title line, a body, a footer made from the key table, messages, and keys that say why not.

A screen gives `where` (its name in the key table) and `body`. A key's action calls `do_ACTION`; before, `why_not` may
refuse it with a sentence, which the footer shows as a grey key and a press of the key spells out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.content import Content
from textual.screen import Screen

from engine.errors import TunedeckError
from engine.spec.files.text import visible
from tui import keys
from tui.console import Console
from tui.screens.table import SCREENS
from tui.theme import draw
from tui.widgets.title_and_footer import FooterLine, TitleLine

SMALLEST = (80, 24)
"""Below this, in either direction, one pane is shown at a time."""

ROOMY = (110, 32)
"""From this on, in both directions, there is room for everything at once."""


class BaseScreen(Screen[None]):
    """A screen of the console. Below 80x24 it has the class `-one-pane`; from 110x32 on, `-roomy`."""

    where: ClassVar[str] = ""
    """Its name in the tables of screens and keys."""
    AUTO_FOCUS = "Rows"

    @property
    def console(self) -> Console:
        """The application."""
        return cast(Console, self.app)

    def compose(self) -> ComposeResult:
        """Title, body, footer."""
        yield TitleLine()
        yield from self.body()
        yield FooterLine()

    def body(self) -> ComposeResult:
        """The widgets between title and footer."""
        raise NotImplementedError

    def receive(self, argument: object) -> None:
        """Take what the screen was opened with, if anything. Called each time it is opened, before it is shown: the
        first time its widgets are not there yet, so keep it for `on_screen_resume`."""

    def why_not(self, action: str) -> str | None:
        """Why the key of this action can do nothing now; None when it can. A sentence without a full stop."""
        return None

    def about(self) -> str:
        """What stands beside the screen's name in the title line. Plain text."""
        return ""

    def action_press(self, action: str) -> None:
        """A key of this screen was pressed."""
        refusal = self.why_not(action)
        if refusal is not None:
            self.say(refusal, "$caution")
        else:
            getattr(self, f"do_{action}")()

    def say(self, text: str, style: str = "") -> None:
        """A message in place of the keys, for a few seconds."""
        self.query_one(FooterLine).say(visible(text, keep="\n"), style)

    def refuse(self, error: TunedeckError) -> None:
        """Say why something could not be done, in the lines there are: the first thing found, and the fix."""
        first, *more = error.found.splitlines()
        found = f"{first} (and {len(more)} more)" if more else first
        parts = [
            found,
            f"expected: {error.expected}" if error.expected else "",
            f"fix: {error.fix}" if error.fix else "",
        ]
        self.say("\n".join(visible(part) for part in parts if part), "$bad")

    def key_rows(self) -> list[keys.Key]:
        """The rows of the key table that hold here."""
        return [*keys.of(self.where), *keys.of(keys.EVERYWHERE)]

    def footer_rows(self) -> list[keys.Key]:
        """Those that the footer has a place for: the way back only where a digit does not lead there as well."""
        kept = any(row.kept for row in SCREENS if row.name == self.where)
        return [key for key in self.key_rows() if not (kept and key.action == "back")]

    def refresh_bars(self) -> None:
        """Write title and footer anew: call it when what `about` or `why_not` answers may have changed."""
        self.query_one(TitleLine).put([self._left(named=True), self._left(named=False)], self._right())
        self.query_one(FooterLine).put([(key, self._usable(key)) for key in self.footer_rows()])

    def _usable(self, key: keys.Key) -> bool:
        return key.where == keys.EVERYWHERE or self.why_not(key.action) is None

    def draw(self, text: str) -> str:
        """Our own glyphs, in ASCII where that was asked for."""
        return draw(text, ascii_only=self.console.ascii_only)

    def on_resize(self, event: events.Resize) -> None:
        """Choose between one pane and all, and fill the bars for the new width."""
        width, height = event.size
        self.set_class(width < SMALLEST[0] or height < SMALLEST[1], "-one-pane")
        self.set_class(width >= ROOMY[0] and height >= ROOMY[1], "-roomy")
        self.call_after_refresh(self.refresh_bars)

    def on_screen_resume(self) -> None:
        """Shown again: what the bars say may have changed meanwhile."""
        self.call_after_refresh(self.refresh_bars)

    def _left(self, *, named: bool) -> Content:
        name = next((row.title for row in SCREENS if row.name == self.where), self.where)
        about = self.about()
        program = " Tunedeck " if named else " "
        return Content.assemble((program, "bold $info"), (name, "bold"), ("  " + about if about else "", "$muted"))

    def _right(self) -> Content:
        return Content.assemble(*self._tabs())

    def _tabs(self) -> Iterable[Content]:
        for row in SCREENS:
            if row.key:
                here = row.name == self.where
                yield Content.assemble((f" {row.key}", "bold $info"), (f" {row.title} ", "bold" if here else "$muted"))
