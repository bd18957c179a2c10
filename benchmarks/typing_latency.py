"""What a letter typed into a field of the Launch screen costs beside one typed into a bare Textual Input.

Both are measured in one process, in turn, letter by letter, so that whatever else the machine does hits both alike; the
figures are medians of CPU time and of wall time from the key to a settled screen. The issue allows three times.

Run: `python -m benchmarks.typing_latency`
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from typing import Any

from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widgets import Input

from tui.app import TunedeckApp
from tui.arguments import Flags

LETTERS = 60
SIZE = (120, 36)
MICRO_BATCH_ROW = 4


class BareInput(App[None]):
    """One Input and nothing else."""

    def compose(self) -> ComposeResult:
        """The field."""
        yield Input()


async def timed(pilot: Pilot[Any], key: str) -> tuple[float, float]:
    """CPU and wall milliseconds of one key."""
    cpu, wall = time.process_time(), time.perf_counter()
    await pilot.press(key)
    return 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)


async def measure() -> dict[str, float]:
    """Medians of both, and their ratios."""
    bare, launch = [], []
    with tempfile.TemporaryDirectory() as runs:
        console = TunedeckApp(Flags(runs=runs, profile="demo", recipe="demo"))
        async with BareInput().run_test(size=SIZE) as one, console.run_test(size=SIZE) as two:
            await two.pause(1.0)
            await two.press(*["j"] * MICRO_BATCH_ROW, "enter", "end", "backspace")
            for index in range(LETTERS):
                key = "2" if index % 2 == 0 else "backspace"
                bare.append(await timed(one, key))
                launch.append(await timed(two, key))
    figures = {}
    for column, name in enumerate(("cpu", "wall")):
        alone, here = (statistics.median(sample[column] for sample in samples) for samples in (bare, launch))
        figures |= {f"input_{name}_ms": alone, f"launch_{name}_ms": here, f"{name}_ratio": here / alone}
    return {name: round(figure, 2) for name, figure in figures.items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(measure()), indent=2) + "\n")
