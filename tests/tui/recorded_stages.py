"""`make_staged_run` writes the run directory of a staged run in the middle of its stages, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.journal.directory import RunDirectory, create_run_directory, create_stage_directory
from engine.journal.events import EventWriter
from engine.journal.stages import stage_directory
from tests.journal.event_fields import step_fields
from tests.tui.recorded_runs import PLAN, SPEC

NAMES = ("expert-truthfulqa", "expert-qmsum", "mixture", "router", "full")
"""The stages of the recipe expert-merge."""


def make_staged_run(
    runs: Path, name: str = "expert-merge", *, names: tuple[str, ...] = NAMES, done: int = 2,
    skipped: tuple[str, ...] = (),
) -> RunDirectory:  # fmt: skip
    """A staged run of which `done` stages are done, those `skipped` were skipped, and the one after has begun."""
    stages = "".join(f'[[recipe.stages]]\nname = "{stage}"\n' for stage in names)
    spec = SPEC.format(name=name, model="builtin:tiny", kind="metered")
    run = create_run_directory(runs, name, spec.replace("[provenance]", f"{stages}[provenance]"), PLAN)
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={}, device="metered", simulated=True)
        for number, stage in enumerate(names[: done + 1], 1):
            _tell_stage(run, writer, number, stage, of=len(names), is_done=number <= done)
        for stage in skipped:
            writer.write("stage_finished", name=stage, number=names.index(stage) + 1, status="skipped", exit_code=0,
                         reason="it depends on stage x (failed)")  # fmt: skip
        if done == len(names):
            writer.write("run_finished", status="done", exit_code=0, result="model", samples_lost=0)
    return run


def _tell_stage(run: RunDirectory, writer: EventWriter, number: int, name: str, *, of: int, is_done: bool) -> None:
    """Write a stage's own journal, and the events about the stage in the run's journal."""
    own = stage_directory(run, number, name)
    create_stage_directory(own, SPEC.format(name=f"{run.name}/{name}", model="builtin:tiny", kind="metered"), PLAN)
    writer.write("stage_started", name=name, number=number, of=of, path=f"stages/{own.name}", from_start=True,
                 stage_kind="train")  # fmt: skip
    with EventWriter(own) as stage_writer:
        stage_writer.write("run_started", run=own.name, pid=1, world_size=1, versions={}, device_name="a device")
        for kind, fields in _events(number):
            writer.copy(stage_writer.write(kind, **fields), name)
        if is_done:
            stage_writer.write("run_finished", status="done", exit_code=0, result="model", samples_lost=0)
    if is_done:
        writer.write("stage_finished", name=name, number=number, status="done", exit_code=0, steps=20, seconds=12.5,
                     peak_bytes=58 << 20, device_used_bytes=0, result="model", reason="")  # fmt: skip


def _events(number: int) -> list[tuple[str, dict[str, Any]]]:
    steps = [("step", step_fields(step, loss=number + 4 / step, peak_bytes=58 << 20)) for step in range(1, 21)]
    return [("stage_started", {"max_steps": 40}), *steps, ("eval", {"step": 20, "metrics": {"loss": 0.25 + number}})]
