"""Measures the CPU time of a letter typed into a field of the Launch screen, and into a plain Textual Input.

Both are measured in one process, letter by letter in turn, so that other load on the machine affects both alike. The
time counts everything from the key until the screen has not changed for a while, the last repaint included. Textual's
`pilot.press` is not used: it sends two messages to every widget for each key, which would be counted against the screen
with more widgets. The aim is at most three times the plain Input.

Run: `python -m benchmarks.typing_latency`
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time

from textual import events
from textual.app import App, ComposeResult
from textual.widgets import Input

from tui.app import TunedeckApp
from tui.arguments import Flags

LETTERS = 60
SIZE = (120, 36)
MICRO_BATCH_ROW = 6
STILL_SECONDS = 0.06
"""Time measured per key: several frames at 60 per second, and less than the pause before advice is computed."""


class BareInput(App[None]):
    """A Textual application that consists of one Input."""

    def compose(self) -> ComposeResult:
        """Yield the Input."""
        yield Input()


async def cpu_milliseconds(app: App[None], key: str) -> float:
    """Press a key, and return the CPU milliseconds that this process used in the next STILL_SECONDS."""
    before = time.process_time()
    app.post_message(events.Key(key, key if len(key) == 1 else None))
    await asyncio.sleep(STILL_SECONDS)
    return 1e3 * (time.process_time() - before)


async def measure() -> dict[str, float]:
    """The median CPU milliseconds per letter in a field of the Launch screen and in the plain Input, and the ratio of
    the two."""
    bare, launch = [], []
    with tempfile.TemporaryDirectory() as runs:
        console = TunedeckApp(Flags(runs=runs, profile="demo", recipe="demo"))
        one = BareInput()
        async with one.run_test(size=SIZE), console.run_test(size=SIZE) as two:
            await two.pause(1.0)
            await two.press("g", *["j"] * MICRO_BATCH_ROW, "enter", "end", "backspace")
            for index in range(LETTERS):
                key = "2" if index % 2 == 0 else "backspace"
                bare.append(await cpu_milliseconds(one, key))
                launch.append(await cpu_milliseconds(console, key))
    alone, here = statistics.median(bare), statistics.median(launch)
    return {"input_cpu_ms": round(alone, 2), "launch_cpu_ms": round(here, 2), "ratio": round(here / alone, 2)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(measure()), indent=2) + "\n")
