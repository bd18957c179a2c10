"""`Terminal` opens the console in a real terminal (a window of tmux), presses keys and reads the screen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUNEDECK = [sys.executable, "-P", str(ROOT / "tunedeck.py")]
PATIENCE_SECONDS = 120.0

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """A tmux server of its own, with one window of 120x36."""

    def __init__(self, runs: Path, socket: Path) -> None:
        self._runs, self._socket = runs, socket

    def tmux(self, *arguments: str) -> str:
        """Run a tmux command."""
        command = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    def open_console(self, *flags: str, under: Sequence[str] = (), cwd: Path = ROOT) -> None:
        """Open the console in a new session, `under` a command such as prlimit."""
        environment = [f"-e{name}={os.environ[name]}" for name in os.environ if name.startswith("TUNEDECK_")]
        console = [*under, *TUNEDECK, "--runs", str(self._runs), *flags]
        self.tmux("new-session", "-d", "-x120", "-y36", f"-c{cwd}", *environment, *console)

    @property
    def console_pid(self) -> int:
        """Pid of the console."""
        return int(self.tmux("list-panes", "-F#{pane_pid}"))

    @property
    def is_open(self) -> bool:
        """Whether the console is still open: tmux ends its server with the last window."""
        command = ["tmux", "-S", str(self._socket), "list-panes"]
        return subprocess.run(command, check=False, capture_output=True, timeout=30).returncode == 0

    @property
    def text(self) -> str:
        """The text on the screen."""
        return self.tmux("capture-pane", "-p")

    def press(self, key: str) -> None:
        """Press one key."""
        self.tmux("send-keys", key)

    def sees(self, *texts: str) -> str:
        """Wait until all of these texts are on the screen, also where lines break them; returns the screen's text."""

        def seen() -> bool:
            screen = self.text
            unbroken = " ".join(screen.split())
            return all(text in screen or text in unbroken for text in texts)

        until(seen, lambda: f"{texts} on\n{self.text}")
        return self.text

    def close(self) -> None:
        """End the server, if it still runs."""
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], check=False, capture_output=True)


def until(holds: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"never came: {what()}"
        time.sleep(0.2)


@pytest.fixture
def terminal(runs: Path, tmp_path: Path) -> Iterator[Terminal]:
    # A socket's path may have no more than about a hundred characters.
    socket = Path(f"/tmp/tunedeck-test-{os.getpid()}.tmux")
    opened = Terminal(runs, socket)
    yield opened
    opened.close()
    socket.unlink(missing_ok=True)
