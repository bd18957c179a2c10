"""Measures the CPU seconds that the console takes until the Launch screen shows its memory bar.

The console is opened as a user opens it, in a pseudo-terminal of 120x36 and in an empty folder; the figure is the
kernel's own accounting of the process, read when the legend of the bar arrives, and the console is then ended. In turn
with it an application with one Textual widget is opened, and with `--beside` the console of another checkout, A B A B
..., so that other load on the machine affects all alike.

Run: `python -m benchmarks.first_paint`, `python -m benchmarks.first_paint --beside ../before --runs 15`
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZE = (36, 120)
LEGEND = b" weights "
"""Words of the bar's legend, which no other pane shows; the verdict above the bar is painted with it."""

BARE = """
from textual.app import App
from textual.widgets import Static

class Bare(App):
    def compose(self):
        yield Static(" weights ")

Bare().run()
"""
"""The least that an application with Textual can be."""

PATIENCE_SECONDS = 60.0


def first_paint(checkout: Path | None, arguments: list[str]) -> float:
    """Open the console of a checkout with these command-line arguments, or the application BARE if `checkout` is None.
    Returns the CPU seconds until the legend is painted; raises RuntimeError if it is not."""
    with tempfile.TemporaryDirectory() as folder:
        pid, terminal = pty.fork()
        if pid == 0:
            _open(checkout, arguments, folder)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
        try:
            _read_until_painted(terminal)
            return _cpu_seconds(pid)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(terminal)


def _open(checkout: Path | None, arguments: list[str], folder: str) -> None:
    """Replace this process by the console of a checkout, whose state, config, cache and runs folders are inside
    `folder`, or by BARE. Does not return."""
    own = {f"TUNEDECK_{name}": os.path.join(folder, name.lower()) for name in ("STATE", "CONFIG", "CACHE", "RUNS")}
    kept = {key: text for key, text in os.environ.items() if key not in ("PYTHONDONTWRITEBYTECODE", "NO_COLOR")}
    terminal = {"PYTHONPATH": str(checkout or ""), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    os.chdir(folder)
    program = ["-c", BARE] if checkout is None else [str(checkout / "tunedeck.py"), *arguments]
    command = [sys.executable, "-P", *program]
    os.execve(command[0], command, {**kept, **own, **terminal})


def _read_until_painted(terminal: int) -> None:
    painted, deadline = b"", time.monotonic() + PATIENCE_SECONDS
    while LEGEND not in painted:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"no bar after {PATIENCE_SECONDS:.0f} s; the last of the output: {painted[-500:]!r}")
        painted += os.read(terminal, 65536)


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process so far, from Linux's /proc; finer than the clock ticks of times(2)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def main() -> None:
    """Print the CPU seconds of each program, minimum, median and maximum, and the median ratio of this checkout's to
    those of each other one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout to compare with")
    parser.add_argument("--runs", type=int, default=9)
    asked, arguments = parser.parse_known_args()
    programs: dict[str, Path | None] = {ROOT.name: ROOT, "one Textual widget": None}
    if asked.beside:
        programs[str(asked.beside)] = asked.beside.resolve()
    arguments = arguments or ["-p", "demo", "-r", "demo"]
    rounds = [[first_paint(path, arguments) for path in programs.values()] for _ in range(asked.runs + 1)][1:]
    own = [seconds[0] for seconds in rounds]
    figures: dict[str, object] = {}
    for name, column in zip(programs, zip(*rounds, strict=True), strict=True):
        low, middle, high = min(column), statistics.median(column), max(column)
        figures[name] = {"min": round(low, 3), "median": round(middle, 3), "max": round(high, 3)}
        if programs[name] != ROOT:
            ratio = statistics.median(mine / other for mine, other in zip(own, column, strict=True))
            figures[f"times {name}"] = round(ratio, 3)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
