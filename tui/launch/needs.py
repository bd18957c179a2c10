"""What a run needs beside memory: disk for its checkpoints and its result, and time, from the pace of an earlier run.

The time is that of the newest earlier run with the same model, batch and device; without one it is the plan's, where
that has one, and said to be predicted.

Try: `tunedeck -p demo -r demo` after a run of the demo
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from textual.content import Content

from engine.architecture.lookup import find_architecture
from engine.budget.advise.plan_time import PlanTime
from engine.budget.advise.staged_plan import disk_bytes_of_training
from engine.config.schema.run import RunSpec
from engine.errors import TunedeckError
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean, format_duration, ready_at
from engine.journal.events import EventTail, end_of_events
from engine.journal.index import list_runs
from tui.widgets.memory_bar import size_text

PACE_KEYS = (
    "recipe.model.id", "recipe.model.dtype", "recipe.model.quantize", "recipe.method.kind", "recipe.train.batch_size",
    "recipe.train.gradient_checkpointing", "recipe.data.max_length", "recipe.data.packing", "profile.device.kind",
    "profile.device.count", "profile.device.memory_gib",
)  # fmt: skip
"""Settings that must be equal for a run to take as long a step as an earlier one."""

MOST_RUNS = 40
"""Earlier runs that are searched, newest first: reading one takes about a millisecond."""

TAIL_BYTES = 64 * 1024
"""How much of the end of a run's journal is read: some hundred steps."""

LEAST_STEPS = 3
"""Steps below which a run tells nothing about the pace."""

UNKNOWN_TIME = "time: unknown, no earlier run with this model, batch and device"


class Pace(NamedTuple):
    """How long a step of an earlier run took."""

    run: str
    step_seconds: float


class Needs(NamedTuple):
    """What a run needs beside memory."""

    disk_bytes: int | None = None
    """Most bytes of disk for its checkpoints and its result; None if unknown."""
    free_bytes: int | None = None
    """Free bytes of the disk on which runs are kept; None if unknown."""
    time: str = ""
    """How long it takes, in words; empty while that is looked up."""


def needed_disk(spec: RunSpec) -> int | None:
    """Most bytes of disk that a run without stages takes for its checkpoints and its result; None where the model's
    architecture is unknown."""
    try:
        return disk_bytes_of_training(find_architecture(spec), spec)
    except TunedeckError:
        return None


def find_pace(spec: RunSpec, runs_dir: Path) -> Pace | None:
    """The pace of the newest run in `runs_dir` with the same PACE_KEYS; None if there is none."""
    from engine.journal.directory import read_spec  # slow to import: not before the first paint

    try:
        runs = list_runs(runs_dir)[:MOST_RUNS]
    except OSError:
        return None
    for directory in runs:
        if _is_alike(read_spec(directory), spec) and (seconds := _step_seconds(directory)) is not None:
            return Pace(directory.name, seconds)
    return None


def _is_alike(table: Mapping[str, Any], spec: RunSpec) -> bool:
    """Whether the run spec of an earlier run, as the tables of its file, has the same PACE_KEYS."""
    return bool(table) and all(
        _in_tables(table, key.split(".")) == reduce(getattr, key.split("."), spec) for key in PACE_KEYS
    )


def _in_tables(table: Any, path: list[str]) -> Any:
    for name in path:
        table = table.get(name) if isinstance(table, Mapping) else None
    return table


def _step_seconds(directory: RunDirectory) -> float | None:
    """The mean duration of the latest steps of a run; None if too few are recorded."""
    try:
        tail = EventTail(directory.events, offset=max(0, end_of_events(directory.events) - TAIL_BYTES))
        found = [event.get("step_seconds") for event in tail.poll() if event["kind"] == "step"]
    except OSError:
        return None
    seconds = [float(each) for each in found if isinstance(each, int | float)]
    return sum(seconds) / len(seconds) if len(seconds) >= LEAST_STEPS else None


def time_words(spec: RunSpec, pace: Pace | None, predicted: PlanTime | None = None) -> str:
    """How long a run takes at this pace, in words; without one, as predicted."""
    if pace is None:
        return UNKNOWN_TIME if predicted is None else _predicted_words(spec, predicted)
    step = _step_text(pace.step_seconds)
    steps = spec.recipe.train.max_steps
    total = f"about {format_duration(steps * pace.step_seconds)} for {steps:,} steps" if steps else f"{step} per step"
    total += f" ({ready_at(steps * pace.step_seconds)})" if steps else ""
    return f"time: {total}, at the measured speed of {clean(pace.run)}" + (f" ({step} per step)" if steps else "")


def _step_text(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else format_duration(seconds)


def _predicted_words(spec: RunSpec, predicted: PlanTime) -> str:
    """The words before the first comma are what is left of them in a narrow line."""
    steps, speed = spec.recipe.train.max_steps, f"{predicted.tokens_per_second:,.0f}"
    if predicted.hours is None:
        return f"time: {speed} tokens/s predicted, {_step_text(predicted.step_seconds)} per step"
    cost = "" if predicted.cost is None else f", {predicted.cost:.2f} at price_per_hour"
    return (
        f"time: about {format_duration(3600 * predicted.hours)} for {steps:,} steps predicted, {speed} tokens/s{cost}"
    )


def needs_line(needs: Needs, width: int) -> Content:
    """A line with the disk that a run needs and its time. The free disk is named where it is too small. What has no
    room in `width` cells is left out: details of the time, then what the disk is for, then the time."""
    disk_bytes, free_bytes, time = needs
    full = disk_bytes is not None and free_bytes is not None and free_bytes < disk_bytes
    size = "unknown" if disk_bytes is None else f"up to {size_text(disk_bytes)}"
    free = f", only {size_text(free_bytes or 0)} free" if full else ""
    purpose = "" if disk_bytes is None else " for checkpoints and result"
    texts = [f"disk: {size}{each}{free}" for each in (purpose, "")]
    times = [f"   {each}" for each in (time, time.partition(", ")[0]) if each]
    pairs = [*((disk, each) for disk in texts for each in times), *((disk, "") for disk in texts)]
    disk, time = next((pair for pair in pairs if sum(map(len, pair)) <= width), pairs[-1])
    return Content.assemble((disk, "$caution" if full else "$muted"), (time, "$muted"))
