"""What is written about each allocation failure: the event `backoff`, and a report on what held the memory."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.budget.advise.search import advise
from engine.config.files.caches import SequenceBounds
from engine.errors import ConfigNotHereError, NotSimulatedError, UnknownArchitectureError
from engine.journal.events import utc_now
from engine.journal.files import write_atomically

if TYPE_CHECKING:
    from engine.batching.micro_batches import MicroBatch
    from engine.budget.advise.search import Suggestion
    from engine.config.schema.run import RunSpec
    from engine.device.base import Device
    from engine.device.oom import OutOfMemory
    from engine.journal.directory import RunDirectory
    from engine.journal.events import Journal
    from engine.train.step.failures import RankOom, RecoveredOom


MOST_REPORTS = 20
"""Limit for one engine process: a co-tenant that comes and goes all night must not fill the disk."""

MOST_SNAPSHOTS = 3
"""Limit for snapshots of the allocator, which are megabytes each."""


def oom_reporter(journal: Journal, device: Device, reports: OomReports | None = None) -> Callable[[RecoveredOom], None]:
    """For each failure: the event `backoff`, a warning if the remedy changes the training result, a report if
    `reports`."""

    def report(recovered: RecoveredOom) -> None:
        oom, failure = recovered.oom, recovered.oom.failure
        journal.write(
            "backoff",
            step=recovered.step,
            phase=failure.phase,
            failed_rank=oom.rank,
            cause=failure.kind,
            requested_bytes=failure.requested_bytes,
            allocated_bytes=failure.allocated_bytes,
            reserved_bytes=failure.reserved_bytes,
            capacity_bytes=device.capacity_bytes,
            **_remedy(recovered),
            **({} if recovered.rows_after is None else (
                {"sequences_before": oom.rows, "sequences_after": recovered.rows_after}
            )),
        )  # fmt: skip
        if recovered.remedy == "max_length":
            journal.warn(
                "learning_changed",
                f"from step {recovered.step}, sequences are truncated to {recovered.after} tokens, because a "
                "single full sequence does not fit",
                f"use more memory, or set data.max_length = {recovered.after} from the start",
            )
        path = reports.write(recovered) if reports else None
        if path is not None:
            journal.write("oom_report", step=recovered.step, path=path)

    return report


class OomReports:
    """Writes the reports of one engine process, at most MOST_REPORTS."""

    def __init__(self, directory: RunDirectory, device: Device, spec: Callable[[], RunSpec]) -> None:
        self._directory, self._device = directory, device
        self.spec = spec
        """Gives the run spec with the memory settings in force."""
        self.row_targets: int | None = None
        """Most target tokens of one sequence of the data; None: not known yet."""
        self._written = 0

    def write(self, recovered: RecoveredOom) -> str | None:
        """Write a report; returns its path in the run directory, None beyond MOST_REPORTS or if the disk is full."""
        if self._written == MOST_REPORTS:
            return None
        folder, failure = self._directory.oom, recovered.oom.failure
        try:
            folder.mkdir(exist_ok=True)
            path = _free(folder, f"step-{recovered.step:08d}-{recovered.attempt}")
            snapshot = self._write_snapshot(path, failure)
            write_atomically(path, json.dumps(self._report(recovered) | {"snapshot": snapshot}, indent=2) + "\n")
        except OSError:
            return None  # a full disk: the event holds the essentials
        self._written += 1
        return str(path.relative_to(self._directory.path))

    def _write_snapshot(self, path: Path, failure: OutOfMemory) -> str | None:
        if failure.held is None or failure.held.snapshot is None or self._written >= MOST_SNAPSHOTS:
            return None
        target = path.with_suffix(".snapshot.pickle")
        with target.open("wb") as file:
            pickle.dump(failure.held.snapshot, file)
        return target.name

    def _report(self, recovered: RecoveredOom) -> dict[str, Any]:
        device, failure = self._device, recovered.oom.failure
        return {
            "version": 1,
            "time": utc_now(),
            "step": recovered.step,
            **_remedy(recovered),
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
            "micro_batch": _micro_batch(recovered.oom.micro_batch),
            "held": failure.held.components if failure.held else {},
            "largest": failure.held.largest if failure.held else [],
            "processes": [
                {"gpu": reading.index, "pid": process.pid, "used_bytes": process.used_bytes, "name": process.name}
                for reading in device.readings()
                for process in reading.processes
            ],
            **suggested_fixes(self.spec(), recovered.oom, self.row_targets),
        }


def _remedy(recovered: RecoveredOom) -> dict[str, Any]:
    return {name: getattr(recovered, name) for name in ("remedy", "before", "after", "attempt")}


def suggested_fixes(spec: RunSpec, oom: RankOom, row_targets: int | None) -> dict[str, Any]:
    """`plan`: the plan for the micro-batch's length under `spec`; `avoided_by`: changes of the recipe that would avoid
    the failure, each with its predicted peak. Empty if host memory ran out or nothing can be predicted. `row_targets`:
    as in `Predictor`."""
    nothing: dict[str, Any] = {"plan": {}, "avoided_by": []}
    if oom.failure.kind != "device":
        return nothing
    try:
        failed = oom.micro_batch
        advice = advise(spec, known=SequenceBounds(failed.length, row_targets) if failed is not None else None)
    except (UnknownArchitectureError, NotSimulatedError, ConfigNotHereError):
        return nothing
    plan = advice.plan
    return {
        "plan": {"verdict": plan.verdict, "peak_bytes": plan.peak_bytes, "micro_batch": plan.micro_batch},
        "avoided_by": [_change(suggestion) for suggestion in advice.suggestions],
    }


MOST_FIXES = 3


def fixes_sentence(spec: RunSpec, oom: RankOom, row_targets: int | None) -> str:
    """The first fixes as one sentence; empty where there are none."""
    fixes = [
        ", ".join(f"{key} = {json.dumps(value)}" for key, value in fix["changes"].items())
        + f" (a peak of {fix['peak_bytes'] / 2**20:,.1f} MiB{', tight' if fix['tight'] else ''})"
        for fix in suggested_fixes(spec, oom, row_targets)["avoided_by"][:MOST_FIXES]
    ]
    return "; or ".join(fixes)


def _change(suggestion: Suggestion) -> dict[str, Any]:
    return {
        "changes": {key: after for key, (_, after) in suggestion.changes.items()},
        "peak_bytes": suggestion.plan.peak_bytes,
        "micro_batch": suggestion.plan.micro_batch,
        "tight": suggestion.plan.is_tight,
        "slower_percent": suggestion.slower_percent,
        "changes_arithmetic": suggestion.changes_arithmetic,
        "changes_learning": suggestion.changes_learning,
    }


def _micro_batch(micro_batch: MicroBatch | None) -> dict[str, int] | None:
    if micro_batch is None:
        return None
    return {"sequences": micro_batch.rows, "length": micro_batch.length, "predicted_bytes": micro_batch.cost_bytes}


def _free(folder: Path, stem: str) -> Path:
    """A path whose file does not exist yet: a step may be repeated after a resume."""
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path
