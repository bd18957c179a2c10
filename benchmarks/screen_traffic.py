"""Measures what the console sends over SSH, the CPU it uses, and how long a key takes to the screen.

The console is opened in a pseudo-terminal of 120x36 on a folder with runs: one that is written to ten times a second by
this process, as by an engine, and two that have ended. On each screen the bytes that arrive and the CPU time of the
console's process are counted, after the screen has come to rest. Then keys are pressed on the Runs screen, and in turn
in an application of one Textual Input, and the time until the first byte of the answer is taken; other load on the
machine affects both alike, so the ratio of the two is what counts.

Run: `python -m benchmarks.screen_traffic`, `python -m benchmarks.screen_traffic --checkout ../before --seconds 20`
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
import threading
import time
from pathlib import Path
from typing import Any

from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventWriter
from engine.journal.liveness import identify_self, record_engine
from tests.journal.event_fields import step_fields

ROOT = Path(__file__).resolve().parent.parent
SIZE = (36, 120)
SETTLE_SECONDS = 4.0
LAUNCH_SECONDS = 20.0
"""Launch comes to rest when the data are read, their fixes are found and the message about that is gone."""
STEPS_PER_SECOND = 10
LATENCY_KEYS = 30
PATIENCE_SECONDS = 60.0

SPEC = """schema = 1
kind = "run"
name = "{name}"
[profile]
name = "demo"
[profile.device]
kind = "cuda"
[recipe]
name = "demo"
[recipe.model]
id = "builtin:tiny"
[recipe.train]
batch_size = 64
learning_rate = {rate}
"""

SCREENS: dict[str, tuple[str, ...]] = {
    "Runs, one running": ("1", "g"),
    "Run, ended": ("G", "\r"),
    "Run, running": ("\x1b", "g", "\r"),
    "Run, running, another metric": ("v",),
    "Compare, one running": ("1", "g", " ", " ", "c"),
    "Launch": ("2",),
    "Library": ("3",),
    "Queue": ("4",),
}
"""The screens, each with the keys that lead to it from the one before. All but those with a running run are idle."""

BARE = """
from textual.app import App
from textual.widgets import Input

class Bare(App):
    def compose(self):
        yield Input()

Bare().run()
"""


class Pane:
    """A program in a pseudo-terminal."""

    def __init__(self, checkout: Path | None, folder: Path) -> None:
        """Open the console of a checkout on `folder`/runs, or BARE if `checkout` is None."""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            _become(checkout, folder)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))

    def press(self, key: str) -> None:
        """Press one key."""
        os.write(self._terminal, key.encode())

    def read(self, seconds: float) -> int:
        """Read for so long; returns the number of bytes."""
        count, deadline = 0, time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                count += len(os.read(self._terminal, 65536))
        return count

    def answer_seconds(self, key: str) -> float:
        """Press a key, and return the seconds until the first byte of the answer."""
        begin = time.perf_counter()
        self.press(key)
        if not select.select([self._terminal], [], [], PATIENCE_SECONDS)[0]:
            raise RuntimeError(f"no answer to {key!r}")
        return time.perf_counter() - begin

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all threads of the program so far, from Linux's /proc."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def close(self) -> None:
        """End the program."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._terminal)


def _become(checkout: Path | None, folder: Path) -> None:
    """Replace this process by the program. Does not return."""
    own = {f"TUNEDECK_{name}": str(folder / name.lower()) for name in ("STATE", "CONFIG", "CACHE", "RUNS")}
    kept = {key: text for key, text in os.environ.items() if key not in ("PYTHONDONTWRITEBYTECODE", "NO_COLOR")}
    terminal = {"PYTHONPATH": str(checkout or ""), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    os.chdir(folder)
    program = ["-c", BARE] if checkout is None else [str(checkout / "tunedeck.py")]
    os.execve(sys.executable, [sys.executable, "-P", *program], {**kept, **own, **terminal})


def make_runs(folder: Path) -> RunDirectory:
    """Two runs that have ended and, newest of all, one of this process; returns that one."""
    for number, name in enumerate(("first", "second", "live")):
        run = create_run_directory(folder / "runs", name, SPEC.format(name=name, rate=1e-4 * (number + 1)), {})
        with EventWriter(run) as writer:
            writer.write("run_started", run=run.name, pid=os.getpid(), world_size=1, versions={})
            writer.write("stage_started", max_steps=100_000)
            for step in range(1, 501):
                writer.write("step", **step_fields(step, loss=4 / step**0.3))
            writer.write("eval", step=500, metrics={"loss": 0.5, "exact_match": 0.5})
            if name != "live":
                writer.write("run_finished", status="done", exit_code=0, result="model")
    record_engine(run, identify_self())
    return run


def train(run: RunDirectory, ended: threading.Event) -> None:
    """Append steps, log lines and readings of a GPU to a run, as an engine does, until `ended` is set."""
    step = 500
    with EventWriter(run) as writer, run.log.open("a") as log:
        while not ended.wait(1 / STEPS_PER_SECOND):
            step += 1
            writer.write("step", **step_fields(step, loss=4 / step**0.3 + (step % 7) / 100))
            if step % (10 * STEPS_PER_SECOND) == 0:
                writer.write("gpu", index=0, used_bytes=step << 20, utilisation_percent=step % 100,
                             temperature_celsius=60, power_watts=300.0, total_bytes=80 << 30)  # fmt: skip
                log.write(f"step {step}\n")
                log.flush()


def measure(checkout: Path, seconds: float) -> dict[str, Any]:
    """Bytes a second and CPU of each screen, and the medians of the times to the first byte."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, ended = Path(name), threading.Event()
        live = make_runs(folder)
        engine = threading.Thread(target=train, args=(live, ended))
        engine.start()
        console, bare = Pane(checkout, folder), Pane(None, folder)
        try:
            console.read(2 * SETTLE_SECONDS)
            for screen, keys in SCREENS.items():
                for key in keys:
                    console.press(key)
                    console.read(0.5)
                console.read(LAUNCH_SECONDS if screen == "Launch" else SETTLE_SECONDS)
                before = console.cpu_seconds
                count = console.read(seconds)
                cpu = 100 * (console.cpu_seconds - before) / seconds
                figures[screen] = {"bytes_per_second": round(count / seconds), "cpu_percent": round(cpu, 2)}
            figures["key to screen"] = latency(console, bare)
        finally:
            ended.set()
            engine.join()
            console.close()
            bare.close()
    return figures


def latency(console: Pane, bare: Pane) -> dict[str, Any]:
    """Median milliseconds from a key to the first byte: of the cursor of the Runs screen and of a letter in its filter,
    each beside a letter in the Input."""
    bare.read(SETTLE_SECONDS)
    found = {}
    for name, way, keys in (("cursor", ("1", "g"), ("j", "k")), ("letter", ("/",), ("a", "\x7f"))):
        for key in way:
            console.press(key)
            console.read(1.0)
        found[name] = _beside(console, keys, bare)
    return found


def _beside(console: Pane, keys: tuple[str, str], bare: Pane) -> dict[str, float]:
    """The medians of the two programs, whose keys are pressed in turn, and their ratio."""
    own: list[float] = []
    plain: list[float] = []
    for number in range(LATENCY_KEYS):
        for pane, key, times in ((console, keys[number % 2], own), (bare, ("a", "\x7f")[number % 2], plain)):
            times.append(1e3 * pane.answer_seconds(key))
            pane.read(0.15)
    here, alone = statistics.median(own), statistics.median(plain)
    return {"console_ms": round(here, 1), "input_ms": round(alone, 1), "ratio": round(here / alone, 2)}


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout whose console is measured")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each screen is measured")
    asked = parser.parse_args()
    sys.stdout.write(json.dumps(measure(asked.checkout.resolve(), asked.seconds), indent=2) + "\n")


if __name__ == "__main__":
    main()
