"""What the console tells the terminal beside its picture: the title of the window, and that a run has ended.

The title is saved when the console opens and put back when it closes. A run that ended rings the bell and sends a
notification (OSC 9, which iTerm2, kitty, WezTerm, Ghostty, Windows Terminal and others show; the rest ignore it).

Try: `tunedeck`, then look at the title of the terminal's window while a run trains.
"""

from __future__ import annotations

import errno
import os
import signal
import termios
import threading
import time
from collections.abc import Callable, Mapping

from engine.config.files.text import visible

SAVE_TITLE, RESTORE_TITLE = "\x1b[22;2t", "\x1b[23;2t"

LONGEST = 120
"""Characters of a title or a notification; terminals cut longer ones in different ways."""


class Terminal:
    """Writes escape sequences to the terminal with `write`; `environment` tells whether tmux is in between."""

    def __init__(self, write: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> None:
        self._write, self._in_tmux = write, "TMUX" in environment
        self._title = ""

    def set_title(self, text: str) -> None:
        """Set the title of the terminal's window to `text`, unless it has this title already."""
        title = visible(text)[:LONGEST]
        if title != self._title:
            if not self._title:
                self._write(SAVE_TITLE)
            self._title = title
            self._write(f"\x1b]2;{title}\x07")

    def notify(self, text: str) -> None:
        """Ring the bell and show `text` as a notification of the terminal."""
        sequence = f"\x1b]9;Tunedeck: {visible(text)[:LONGEST]}\x07"
        if self._in_tmux:  # tmux hands on what is wrapped like this, if its option allow-passthrough is on
            sequence = "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"
        self._write(sequence + "\x07")

    def restore_title(self) -> None:
        """Put back the title that the window had before."""
        if self._title:
            self._write(RESTORE_TITLE)
            self._title = ""


HANGUP_CODE = 128 + signal.SIGHUP
"""As shells report a process that HUP ended."""

LOOK_SECONDS = 1.0


def watch_for_hangup() -> None:
    """End the console as HUP would, if its terminal is gone and HUP was ignored: the thread that reads keys would find
    the end of input again and again, and the one that draws has ended."""
    threading.Thread(target=_end_without_terminal, name="terminal", daemon=True).start()


def _end_without_terminal() -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        try:
            termios.tcgetattr(0)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os._exit(HANGUP_CODE)
            return  # no terminal: the console is served to a browser
