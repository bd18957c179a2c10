"""What a screen may ask of the application. `tui.app` provides it; screens know only this protocol, so that no screen
imports the application, which imports them.

Try: `BaseScreen.console` in `tui/screens/base.py` is of this type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from engine.journal.directory import RunDirectory
from tui.arguments import Flags


class Console(Protocol):
    """The application as its screens see it."""

    flags: Flags
    runs_dir: Path
    ascii_only: bool

    def open_screen(self, name: str, argument: object = None) -> None:
        """Show a screen of the table; `argument` is handed to it."""

    def start_engine(self, directory: RunDirectory, *, resume: bool) -> bool:
        """Start an engine process on a run and show a message; False when it cannot be started."""

    def say(self, text: str, style: str = "") -> None:
        """Show a message in the footer of the current screen."""

    def do_back(self) -> None:
        """Go to the previous screen."""
