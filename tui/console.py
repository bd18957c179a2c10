"""The part of the application that screens use, as a protocol.

`tui.app` implements it and imports the screens; because screens import only the protocol, there is no import ring.

Try: `BaseScreen.console` in `tui/screens/base.py` is of this type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from engine.journal.directory import RunDirectory
from tui.arguments import Flags


class Console(Protocol):
    """The methods of the application that screens may call."""

    flags: Flags
    runs_dir: Path
    ascii_only: bool

    @property
    def front_screen(self) -> object:
        """The screen that is shown."""

    def open_screen(self, name: str, argument: object = None) -> None:
        """Show the screen `name` of `tui.screens.table`; `argument` is passed to its `set_argument`."""

    def start_engine(self, directory: RunDirectory, *, resume: bool) -> bool:
        """Start an engine process on a run and show a message in the footer. Returns False if the process cannot be
        started; the message then says why. `resume`: continue the run instead of beginning it."""

    def run_command(self, directory: RunDirectory, command: str, *words: str) -> None:
        """Run `tunedeck COMMAND RUN WORDS` in a process of its own, and show a message when it ends."""

    def set_terminal_title(self, text: str) -> None:
        """Set the title of the terminal's window to `text`."""

    def show_message(self, text: str, style: str = "") -> None:
        """Show a message for a few seconds in the footer of the current screen, in the Textual style `style`."""

    def do_back(self) -> None:
        """Go to the previous screen; without one, to the Runs screen."""
