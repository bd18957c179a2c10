"""Measures how long lists take with 500 runs, of which 200 wait in the queue and 50 are a sweep.

The runs are written as engines write them, with 300 steps and 6 evaluations each. Every command runs in a process of
its own; its processor time is given beside that of `tunedeck --help`, because the time by the clock depends on what
else the machine does. Then the console is opened on them, and the time from a key to the first byte is taken beside
that of an application of one input field, in turn.

Run: `python -m benchmarks.many_runs`
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.screen_traffic import ROOT, SPEC, Pane, latency
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventWriter
from engine.journal.queue import Queue
from tests.journal.event_fields import step_fields

STEPS, EVALUATIONS = 300, 6
SWEEP = "20261125T000000Z-grid"
OPENING_SECONDS = 20.0


def make(folder: Path, runs: int, queued: int, swept: int) -> None:
    """Write the runs: done ones, those of the sweep among them, and waiting ones, which are queued."""
    for number in range(runs - queued):
        spec = SPEC.format(name=f"run-{number}", rate=1e-6 * (number + 1))
        if number < swept:
            spec += f'[provenance.sweep]\nid = "{SWEEP}"\n[provenance.sweep.point]\n"train.seed" = {number}\n'
        _write(create_run_directory(folder, f"run-{number}", spec, {}), number)
    waiting = [create_run_directory(folder, f"wait-{number}", SPEC.format(name=f"wait-{number}", rate=1e-4), {})
               for number in range(queued)]  # fmt: skip
    Queue(folder).add(*waiting)


def _write(run: RunDirectory, number: int) -> None:
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=os.getpid(), world_size=1, versions={})
        writer.write("stage_started", max_steps=STEPS)
        for step in range(1, STEPS + 1):
            writer.write("step", **step_fields(step, loss=4 / step**0.3 + number / 1e4))
            if step % (STEPS // EVALUATIONS) == 0:
                writer.write("eval", step=step, metrics={"loss": 0.5 + number / 1e4})
        writer.write("run_finished", status="done", exit_code=0, result="model")


def cpu_seconds(words: Sequence[str], folder: Path) -> float:
    """Processor seconds of one command."""
    own = {f"TUNEDECK_{name}": str(folder / name.lower()) for name in ("STATE", "CONFIG", "CACHE", "RUNS")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-P", str(ROOT / "tunedeck.py"), *words], cwd=folder, env={**os.environ, **own}, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--queued", type=int, default=200)
    parser.add_argument("--swept", type=int, default=50)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tunedeck-many-") as name:
        folder = Path(name).resolve()
        (folder / "runs").mkdir()
        make(folder / "runs", asked.runs, asked.queued, asked.swept)
        commands = {"--help": ["--help"], "runs, the first time": ["runs"], "runs": ["runs"],
                    "queue list": ["queue", "list"],
                    "compare sweep": ["compare", f"sweep:{SWEEP}"], "show last": ["show", "last"]}  # fmt: skip
        figures: dict[str, object] = {
            f"{label}, CPU seconds": round(cpu_seconds(words, folder), 2) for label, words in commands.items()
        }
        console, bare = Pane(ROOT, folder), Pane(None, folder)
        try:
            console.read(OPENING_SECONDS)
            figures["console, CPU seconds to rest"] = round(console.cpu_seconds, 2)
            figures["key to screen"] = latency(console, bare)
        finally:
            console.close()
            bare.close()
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
