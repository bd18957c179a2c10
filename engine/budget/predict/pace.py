"""How much longer steps took on this machine than the model of time says, by device and model, as earlier runs measured
it. Predictions are multiplied by it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from engine.config.files.machine import installed
from engine.config.files.trust import state_folder
from engine.config.schema.run import RunSpec
from engine.journal.files import write_atomically

FILE = "pace.json"
VERSION = 2
"""Of the model of time, too: what was measured against another one corrects nothing."""
RUNS_KEPT = 8
LEAST_MODELS = 2
"""Models that a device must have run for their pace to correct the prediction of another one."""


@dataclass(frozen=True)
class PaceKey:
    """What a measured pace is valid for."""

    device: str
    model: str
    method: str
    torch: str


class Pace(NamedTuple):
    factor: float
    """Measured divided by predicted duration."""
    spread: float
    """The largest deviation of a run's factor from this one, as a share; 0 for a single run."""
    runs: int
    same_model: bool
    """Whether the runs had the model and method that was asked about."""


def pace_key(spec: RunSpec) -> PaceKey:
    device = spec.profile.device
    name: str = device.kind
    if device.kind == "cuda":
        name += f" {device.compute_capability} {device.memory_gib:.0f} GiB"
    name += f" x{device.count * spec.profile.nodes.count}"
    return PaceKey(name, spec.recipe.model.id, spec.recipe.method.kind, installed("torch") or "")


def pace_of(spec: RunSpec) -> Pace | None:
    """The pace of earlier runs with this device, model and method, else of other models on the device; None if there
    are too few."""
    file = pace_file()
    if not file.is_file():
        return None
    asked, entries = pace_key(spec), _entries(file, file.stat().st_mtime_ns)
    if asked in entries:
        return _pace(entries[asked], same_model=True)
    alike = [median(runs) for key, runs in entries.items() if (key.device, key.torch) == (asked.device, asked.torch)]
    return _pace(tuple(alike), same_model=False) if len(alike) >= LEAST_MODELS else None


def record_pace(spec: RunSpec, factor: float) -> None:
    """Raises OSError if the state folder cannot be written."""
    path, key = pace_file(), pace_key(spec)
    entries = _read(path)
    entries[key] = (*entries.get(key, ()), round(factor, 4))[-RUNS_KEPT:]
    written = [vars(each) | {"runs": list(runs)} for each, runs in entries.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"version": VERSION, "entries": written}, indent=1) + "\n")


def pace_file() -> Path:
    return state_folder() / FILE


def _pace(runs: tuple[float, ...], *, same_model: bool) -> Pace:
    factor = median(runs)
    return Pace(factor, max(abs(each / factor - 1) for each in runs), len(runs), same_model)


@lru_cache(maxsize=4)
def _entries(path: Path, _stamp: int) -> dict[PaceKey, tuple[float, ...]]:
    """`_stamp`, the file's modification time, is part of the cache's key."""
    return _read(path)


def _read(path: Path) -> dict[PaceKey, tuple[float, ...]]:
    """Empty if the file is missing, damaged or of another version; the next run then replaces it."""
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        entries = found["entries"] if found["version"] == VERSION else []
        return {
            PaceKey(entry["device"], entry["model"], entry["method"], entry["torch"]): tuple(map(float, entry["runs"]))
            for entry in entries
            if entry["runs"] and min(entry["runs"]) > 0
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
