"""A report for each time memory ran out: who held what, what was done, what would have avoided it.

Written to `oom/` of the run after recovery, from plain values taken at the moment of failure. It must never cost a run:
reports are few, and a full disk leaves them out. The page that people read is made in `engine.journal.oom_page`.

Try: `tunedeck train -p demo -r demo`, then `tunedeck show last --oom`
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.batching.micro_batches import MicroBatch
from engine.budget.advice import Suggestion, advise, with_changes
from engine.device.base import Device
from engine.device.oom import OutOfMemory
from engine.errors import ConfigNotHereError, UnknownArchitectureError
from engine.journal.directory import RunDirectory
from engine.journal.events import utc_now
from engine.journal.files import write_atomically
from engine.model.loaded import LoadedModel
from engine.model.loss import LossFunction
from engine.spec.schema.run import RunSpec
from engine.train.step.optimizer import StepGuard

MOST_REPORTS = 20
"""Of one engine process: a neighbour that comes and goes all night must not fill the disk."""

MOST_SNAPSHOTS = 3
"""Of the allocator, which are megabytes each."""


class OomReports:
    """The writer of one engine process."""

    def __init__(self, directory: RunDirectory, device: Device, spec: Callable[[], RunSpec]) -> None:
        self._directory, self._device = directory, device
        self.spec = spec
        """The run as it stands, remedies included."""
        self._written = 0

    def write(self, facts: dict[str, Any], failure: OutOfMemory, micro_batch: MicroBatch | None) -> str | None:
        """Write a report; returns its path in the run directory, or None where there are enough, or no room.

        `facts` are what the event says: step, remedy, before, after, attempt.
        """
        if self._written == MOST_REPORTS:
            return None
        folder = self._directory.oom
        try:
            folder.mkdir(exist_ok=True)
            path = _free(folder, f"step-{facts['step']:08d}-{facts['attempt']}")
            snapshot = self._write_snapshot(path, failure)
            report = self._report(facts, failure, micro_batch) | {"snapshot": snapshot}
            write_atomically(path, json.dumps(report, indent=2) + "\n")
        except OSError:
            return None  # a full disk: the event tells the essentials
        self._written += 1
        return str(path.relative_to(self._directory.path))

    def _write_snapshot(self, path: Path, failure: OutOfMemory) -> str | None:
        if failure.held is None or failure.held.snapshot is None or self._written >= MOST_SNAPSHOTS:
            return None
        target = path.with_suffix(".snapshot.pickle")
        with target.open("wb") as file:
            pickle.dump(failure.held.snapshot, file)
        return target.name

    def _report(self, facts: dict[str, Any], failure: OutOfMemory, micro_batch: MicroBatch | None) -> dict[str, Any]:
        device = self._device
        return {
            "version": 1,
            "time": utc_now(),
            **facts,
            "phase": failure.phase,
            "cause": failure.kind,
            "text": failure.text,
            "device": device.name,
            "simulated": device.simulated,
            "requested_bytes": failure.requested_bytes,
            "allocated_bytes": failure.allocated_bytes,
            "reserved_bytes": failure.reserved_bytes,
            "capacity_bytes": device.capacity_bytes,
            "available_bytes": device.available_bytes,
            "micro_batch": _in_flight(micro_batch),
            "held": failure.held.components if failure.held else {},
            "largest": failure.held.largest if failure.held else [],
            "processes": [
                {"gpu": reading.index, "pid": process.pid, "used_bytes": process.used_bytes, "name": process.name}
                for reading in device.readings()
                for process in reading.processes
            ],
            **avoidance(self.spec(), failure, micro_batch),
        }


def avoidance(spec: RunSpec, failure: OutOfMemory, micro_batch: MicroBatch | None) -> dict[str, Any]:
    """What the budget says of the failure: `plan` for this length as the run stands, and `avoided_by`, changes of the
    recipe with the peak each would have had. Both empty where memory of the host ran out, or nothing can be predicted.
    """
    nothing: dict[str, Any] = {"plan": {}, "avoided_by": []}
    if failure.kind != "device":
        return nothing
    try:
        advice = advise(spec, longest=micro_batch.length if micro_batch else None)
    except (UnknownArchitectureError, ConfigNotHereError):
        return nothing
    plan = advice.plan
    return {
        "plan": {"verdict": plan.verdict, "peak_bytes": plan.peak_bytes, "micro_batch": plan.micro_batch},
        "avoided_by": [_change(suggestion) for suggestion in advice.suggestions],
    }


def as_it_stands(spec: RunSpec, loaded: LoadedModel, loss: LossFunction, guard: StepGuard) -> RunSpec:
    """The spec with what the ladder has changed since, so that advice does not name what is already done."""
    standing = {
        "train.gradient_checkpointing": loaded.checkpointing,
        "train.activation_offload": loss.offload.on,
        "train.optimizer_offload": guard.host_state.on,
    }
    return with_changes(spec, standing)


def in_words(found: dict[str, Any], most: int = 3) -> str:
    """The first few ways of `avoidance` as one sentence; empty where there are none."""
    ways = [
        ", ".join(f"{key} = {json.dumps(value)}" for key, value in way["changes"].items())
        + f" (a peak of {way['peak_bytes'] / 2**20:,.1f} MiB)"
        for way in found["avoided_by"][:most]
    ]
    return "; or ".join(ways)


def _change(suggestion: Suggestion) -> dict[str, Any]:
    return {
        "changes": {key: after for key, (_, after) in suggestion.changes.items()},
        "peak_bytes": suggestion.plan.peak_bytes,
        "micro_batch": suggestion.plan.micro_batch,
        "changes_learning": suggestion.changes_learning,
    }


def _in_flight(micro_batch: MicroBatch | None) -> dict[str, int] | None:
    if micro_batch is None:
        return None
    return {"sequences": micro_batch.rows, "length": micro_batch.length, "predicted_bytes": micro_batch.cost_bytes}


def _free(folder: Path, stem: str) -> Path:
    """A name that is not taken: a step may be redone after a resume."""
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path
