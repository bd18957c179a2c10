"""`make_run` writes the run directory of a run in any state, without an engine."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventWriter
from engine.journal.liveness import ProcessIdentity, record_engine
from tests.journal.event_fields import backoff_fields, step_fields

SPEC = """schema = 1
kind = "run"
name = "{name}"

[profile]
name = "demo"
[profile.device]
kind = "{kind}"

[recipe]
name = "demo"
[recipe.model]
id = "{model}"
[recipe.train]
batch_size = 64

[provenance]
profile_file = "shipped:demo"
recipe_file = "shipped:demo"
set = ["train.max_steps=100"]
"""

COMPONENTS = {"weights": 3 << 20, "optimizer": 6 << 20, "activations": 120 << 20}
PLAN = {"verdict": "fits_smaller", "peak_bytes": 129 << 20, "capacity_bytes": 64 << 20, "components": COMPONENTS}


def make_run(
    runs: Path, name: str = "demo", *, status: str = "done", steps: int = 30, model: str = "builtin:tiny",
    kind: str = "metered", error: str | None = None,
) -> RunDirectory:  # fmt: skip
    """A run with this status: some steps, a backoff, an evaluation, a checkpoint."""
    run = create_run_directory(runs, name, SPEC.format(name=name, model=model, kind=kind), PLAN)
    if status != "queued":
        with EventWriter(run) as writer:
            _history(run, writer, steps)
            _end(run, writer, status, error)
    return run


def _history(run: RunDirectory, writer: EventWriter, steps: int) -> None:
    writer.write("run_started", run=run.name, pid=1, world_size=1, versions={}, device_name="a device")
    writer.write("plan", predicted={"peak_bytes": 129 << 20, "components": COMPONENTS}, verdict="fits_smaller",
                 capacity_bytes=64 << 20)  # fmt: skip
    writer.write("stage_started", max_steps=100)
    held = {"capacity_bytes": 64 << 20, "allocated_bytes": 63 << 20, "requested_bytes": 1 << 20}
    writer.write("backoff", **backoff_fields(1, sequences_before=64, sequences_after=25, **held))
    for step in range(1, steps + 1):
        writer.write("step", **step_fields(step, peak_bytes=(58 << 20) + step, largest_micro_batch=25, loss=4 / step))
    writer.write("eval", step=steps, metrics={"loss": 0.25, "exact_match": 0.082})
    saved = {"save_seconds": 0.1, "size_bytes": 9 << 20}
    writer.write("checkpoint_saved", step=steps, path=f"checkpoints/step-{steps:08d}", **saved)


def _end(run: RunDirectory, writer: EventWriter, status: str, error: str | None) -> None:
    if status == "stale":
        record_engine(run, ProcessIdentity(2**22 + 1, "gone", platform.node()))
        an_hour_ago = time.time() - 3600
        for path in (run.events, run.engine):
            os.utime(path, (an_hour_ago, an_hour_ago))
        return
    if status == "paused":
        writer.write("paused", step=30)
    codes = {"done": 0, "failed": 5, "oom": 4}
    measured = {"peak_bytes": 58 << 20, "components": {**COMPONENTS, "activations": 49 << 20}}
    writer.write("run_finished", status=status, exit_code=codes.get(status, 130), result="model", error=error,
                 measured=measured, samples_lost=0)  # fmt: skip


def add(run: RunDirectory, write: Callable[[EventWriter], Any]) -> None:
    """Append events to a run's journal, as an engine would."""
    with EventWriter(run) as writer:
        write(writer)
