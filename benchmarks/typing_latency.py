"""What a letter typed into a field of the Launch screen costs beside one typed into a bare Textual Input.

Both are measured in one process, in turn, letter by letter, so that whatever else the machine does hits both alike. A
letter's cost is the CPU time of all that follows from its key until the screen has been still for a while, the last
repaint included. Textual's own `pilot.press` is not used for it: it sends every widget two messages a key, which the
screen with more widgets would be charged for. The console promises at most three times a bare Input.

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
MICRO_BATCH_ROW = 4
STILL_SECONDS = 0.06
"""Several frames at Textual's sixty a second, and less than the pause after which the console works out advice."""


class BareInput(App[None]):
    """One Input and nothing else."""

    def compose(self) -> ComposeResult:
        """The field."""
        yield Input()


async def cost(app: App[None], key: str) -> float:
    """CPU milliseconds that a key costs."""
    before = time.process_time()
    app.post_message(events.Key(key, key if len(key) == 1 else None))
    await asyncio.sleep(STILL_SECONDS)
    return 1e3 * (time.process_time() - before)


async def measure() -> dict[str, float]:
    """Medians of both, and their ratio."""
    bare, launch = [], []
    with tempfile.TemporaryDirectory() as runs:
        console = TunedeckApp(Flags(runs=runs, profile="demo", recipe="demo"))
        one = BareInput()
        async with one.run_test(size=SIZE), console.run_test(size=SIZE) as two:
            await two.pause(1.0)
            await two.press(*["j"] * MICRO_BATCH_ROW, "enter", "end", "backspace")
            for index in range(LETTERS):
                key = "2" if index % 2 == 0 else "backspace"
                bare.append(await cost(one, key))
                launch.append(await cost(console, key))
    alone, here = statistics.median(bare), statistics.median(launch)
    return {"input_cpu_ms": round(alone, 2), "launch_cpu_ms": round(here, 2), "ratio": round(here / alone, 2)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(measure()), indent=2) + "\n")
