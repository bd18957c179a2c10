"""The base class of all screens: a title bar, a body, a footer with the keys from the key table, and messages.

A screen defines `screen_name`, by which the key table knows it, and `compose_body`. A key's action calls `do_ACTION`,
unless `disabled_reason` returns why it has no effect now: then the key is grey in the footer, and pressing it shows the
reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Input
from textual.worker import Worker
from textual.worker_manager import WorkerManager

from engine.config.files.text import visible
from engine.errors import TunedeckError
from tui import keys
from tui.console import Console
from tui.files.new_file import write_new
from tui.screens.table import SCREENS
from tui.theme import glyphs
from tui.widgets.input_prompt import InputPrompt
from tui.widgets.text_lines import clickable
from tui.widgets.title_and_footer import FooterBar, TitleBar

SMALLEST = (80, 24)
"""Columns and rows below which only one pane is shown at a time."""

ROOMY = (110, 32)
"""Columns and rows from which on there is room for all panes at once."""

WIDE = (160, 44)
"""Columns and rows from which on more panes stand beside each other."""

CREATION = "creation"
"""The group of the workers that create a run, each in a thread; the result says whether the run was created."""


def creations(workers: WorkerManager) -> list[Worker[object]]:
    """Return those of a screen's workers that are creating a run."""
    return [worker for worker in workers if worker.group == CREATION and not worker.is_finished]


@cache
def _screen_tabs(front: str) -> tuple[Content, ...]:
    """Digit and title of each screen that a digit key opens, for the title bar of the screen `front`; then titles of
    four letters, then digits alone."""
    tabs: tuple[list[Content], ...] = ([], [], [])
    for row in SCREENS:
        if row.key:
            digit = (f" {row.key}", "bold $info")
            shown = Content.assemble(digit, (f" {row.title} ", "bold" if row.name == front else "$muted"))
            tabs[0].append(clickable(shown, f"app.open_screen({row.name!r})"))
            short = Content.assemble(digit, (f" {row.title[:4]}", "bold" if row.name == front else "$muted"))
            tabs[1].append(clickable(short, f"app.open_screen({row.name!r})"))
            tabs[2].append(clickable(Content.assemble(digit), f"app.open_screen({row.name!r})"))
    return tuple(Content.assemble(*parts) for parts in tabs)


class BaseScreen(Screen[None]):
    """Base class of all screens. Below 80x24, and while a pane is enlarged, a screen has the CSS class `-one-pane`;
    from 110x32 on, `-roomy`, and from 160x44 on also `-wide`."""

    screen_name: ClassVar[str] = ""
    """The screen's name in the tables of screens and keys."""
    AUTO_FOCUS = "RowList"

    def __init__(self) -> None:
        super().__init__()
        self._poll_timer: Timer | None = None
        self.enlarged = False
        """Whether the pane in front has the room of all panes, at the user's wish."""

    @property
    def console(self) -> Console:
        """The application, as the protocol that screens may use."""
        return cast(Console, self.app)

    def compose(self) -> ComposeResult:
        """Yield title bar, body and footer."""
        # Before there are widgets: each class that changes later has the styles of all of them computed again.
        self._set_size_classes(*self.app.size)
        yield TitleBar()
        yield from self.compose_body()
        yield FooterBar()

    def compose_body(self) -> ComposeResult:
        """Yield the widgets between title bar and footer."""
        raise NotImplementedError

    def set_argument(self, argument: object) -> None:
        """Store the argument with which the screen is opened, if any. Called each time before the screen is shown. The
        first time the screen has no widgets yet, so subclasses store the argument and show it in `on_screen_resume`."""

    def disabled_reason(self, action: str) -> str | None:
        """Why the key of this action has no effect now, as a sentence without a full stop; None if the key has an
        effect."""
        return None

    def title_detail(self) -> str:
        """Plain text to show after the screen's name in the title bar."""
        return ""

    def terminal_title(self) -> str:
        """Plain text for the title of the terminal's window."""
        return "Tunedeck"

    def action_press(self, action: str) -> None:
        """Perform the action of one of this screen's keys, or show why the key is disabled."""
        refusal = self.disabled_reason(action)
        if refusal is not None:
            self.show_message(refusal, "$caution")
        else:
            getattr(self, f"do_{action}")()

    def show_message(self, text: str, style: str = "", holds: Callable[[], bool] | None = None) -> None:
        """Show a message for a few seconds in the footer, in the Textual style `style`; it is withdrawn earlier when
        `holds` returns False at an update of the footer, or the screen is left."""
        self.query_one(FooterBar).show_message(visible(text, keep="\n"), style, holds)

    def write_plot(self, folder: Path, label: str, svg: str) -> None:
        """Write the picture of a plot into `folder` under a name made of `label`, and say its path, or why it cannot be
        written. A picture that is there already is kept. `svg` is empty if there is nothing to draw."""
        name = "plot-" + "-".join(re.findall(r"[a-z0-9]+", label.lower()))
        try:
            path = svg and write_new(folder, name, ".svg", svg)
        except OSError as error:
            self.show_message(f"the picture cannot be written into {folder}: {error.strerror or error}", "bold $bad")
            return
        self.show_message(f"written: {path}" if path else "no points to draw yet")

    def show_error(self, error: TunedeckError) -> None:
        """Show an error in the footer, which has few lines: the first problem, the expected value, and the fix."""
        first, *more = error.found.splitlines()
        found = f"{first} (and {len(more)} more)" if more else first
        parts = [
            found,
            f"expected: {error.expected}" if error.expected else "",
            f"fix: {error.fix}" if error.fix else "",
        ]
        self.show_message("\n".join(visible(part) for part in parts if part), "$bad")

    def key_rows(self) -> list[keys.Key]:
        """The rows of the key table for this screen, and those for every screen."""
        return [*keys.of_screen(self.screen_name), *keys.of_screen(keys.EVERYWHERE)]

    def footer_rows(self) -> list[keys.Key]:
        """The rows of the keys to show in the footer: while text is typed, those that end it. "Back" is left out on
        screens that are kept in memory: a digit key opens each of them."""
        if isinstance(self.focused, Input):
            prompt = self.focused.parent
            return keys.while_typing(prompt.enter if isinstance(prompt, InputPrompt) else "keep")
        kept = any(row.kept for row in SCREENS if row.name == self.screen_name)
        return [key for key in self.key_rows() if not (kept and key.action == "back")]

    def refresh_title_and_footer(self) -> None:
        """Update title bar and footer. To be called when the result of `title_detail` or `disabled_reason` may have
        changed. Does nothing on a screen that was removed after it asked for this."""
        if not self.query(TitleBar):
            return
        name = next((row.title for row in SCREENS if row.name == self.screen_name), self.screen_name)
        self.query_one(TitleBar).set_title(name, self.title_detail(), _screen_tabs(self.screen_name))
        self.console.set_terminal_title(self.terminal_title())
        self.query_one(FooterBar).set_keys([(key, self._is_enabled(key)) for key in self.footer_rows() if key.label])

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Show the keys that end the typing when a field gets the focus."""
        if isinstance(event.widget, Input):
            self.refresh_title_and_footer()

    def on_descendant_blur(self, event: events.DescendantBlur) -> None:
        """Show the screen's keys again when a field loses the focus."""
        if isinstance(event.widget, Input):
            self.call_after_refresh(self.refresh_title_and_footer)

    def _is_enabled(self, key: keys.Key) -> bool:
        return key.screen == keys.EVERYWHERE or self.disabled_reason(key.action) is None

    def glyphs(self, text: str) -> str:
        """Replace the console's glyphs in `text` by ASCII characters under --ascii."""
        return glyphs(text, ascii_only=self.console.ascii_only)

    def on_resize(self, event: events.Resize) -> None:
        """Set the CSS classes for the new size, and redraw title bar and footer."""
        self._set_size_classes(*event.size)
        self.call_after_refresh(self.refresh_title_and_footer)

    def _set_size_classes(self, width: int, height: int) -> None:
        self.set_class(self.enlarged or width < SMALLEST[0] or height < SMALLEST[1], "-one-pane")
        self.set_class(width >= ROOMY[0] and height >= ROOMY[1], "-roomy")
        self.set_class(width >= WIDE[0] and height >= WIDE[1], "-wide")
        self.set_class(self.enlarged, "-enlarged")

    def do_enlarge(self) -> None:
        """Give the pane in front the room of all panes; if it has it already, show all panes again."""
        self.enlarged = not self.enlarged
        self._set_size_classes(*self.size)
        self.call_after_refresh(self.repaint_panes)

    def repaint_panes(self) -> None:
        """Paint what the panes show again, after their sizes have changed."""
        self.refresh_title_and_footer()

    def step_back(self) -> bool:
        """Undo the latest thing that "back" undoes inside this screen, by its key or by a click: show all panes again
        while one is enlarged. Returns False if there is nothing to undo, so that "back" leaves the screen."""
        if self.enlarged:
            self.do_enlarge()
            return True
        return False

    def on_screen_resume(self) -> None:
        """Update title bar and footer, and poll, whenever the screen is shown."""
        self.call_after_refresh(self.refresh_title_and_footer)
        self._stop_polling()
        self._poll_again()

    def on_screen_suspend(self) -> None:
        """Stop polling while another screen is in front. Textual repaints the whole front screen whenever a timer of
        the screen behind it fires. Over SSH that cost 15 KB/s, although the run had ended."""
        self._stop_polling()
        for footer in self.query(FooterBar):
            footer.clear()  # what was said here is old when the screen is opened again

    def poll(self) -> float | None:
        """Read what the screen shows from files; returns the seconds until it should be called again. A screen that
        shows nothing that can change returns None."""
        return None

    def _poll_again(self) -> None:
        seconds = self.poll()
        self._poll_timer = self.set_timer(seconds, self._poll_again) if seconds is not None else None

    def _stop_polling(self) -> None:
        if self._poll_timer is not None:
            self._poll_timer.stop()
            self._poll_timer = None
