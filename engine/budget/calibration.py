"""The calibration file: non-torch memory as earlier runs on this machine measured it; and the allocator's block size.

Only predictions of non-torch memory are corrected, never those of tensors: the CUDA context with other libraries'
memory (NCCL with several ranks), cuBLAS' workspace, and fragmentation. Runs in host memory record nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from engine.config.files.machine import installed
from engine.config.files.trust import state_folder
from engine.config.schema.run import Profile
from engine.journal.files import write_atomically

BLOCK_BYTES = 512
"""`kMinBlockSize` in `c10/cuda/CUDACachingAllocator.cpp` of torch."""


def round_to_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


FILE = "calibration.json"
VERSION = 2
"""Version 1 took what was reserved at the end of a run for the reserved memory of its peak."""
RUNS_KEPT = 8
SMALL_RUN = 0.5
"""A run is small whose peak is below this share of the card's memory. Its fragmentation does not count: torch takes
segments of 2 and 20 MiB from the driver, so a run of 100 MiB that leaves three of them half empty has a share of 30 %,
which in a plan for 24 GB would be 7 GiB."""
SAME_MEMORY = 0.02
"""A profile matches a recorded GPU whose memory differs by at most this share."""
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class CalibrationKey:
    """The device and software that a measurement is valid for."""

    gpu: str
    compute_capability: float
    memory_gib: float
    """Memory of the card, as the driver reports it."""
    driver: str
    torch: str
    ranks: int
    expandable: bool


@dataclass(frozen=True)
class Residuals:
    """Non-torch memory of one device in one run, or the largest values of several runs."""

    context_bytes: int
    workspace_bytes: int
    fragmented_share: float | None
    """Reserved divided by allocated memory at the peak, minus one; None if all runs were small."""


def residuals_for(profile: Profile) -> Residuals | None:
    """The largest values on this profile's kind of device; None without such runs."""
    if profile.device.kind != "cuda":
        return None
    file = calibration_file()
    if not file.is_file():
        return None
    fitting = [worst for key, worst in _entries(file, file.stat().st_mtime_ns) if _fits(key, profile)]
    return _worst(fitting) if fitting else None


def record(key: CalibrationKey, residuals: Residuals) -> None:
    """Raises OSError if the state folder cannot be written."""
    path = calibration_file()
    entries = _read(path)
    entry = next((entry for entry in entries if entry["setting"] == asdict(key)), None)
    if entry is None:
        entry = {"setting": asdict(key), "runs": []}
        entries.append(entry)
    entry["runs"] = _newest([*entry["runs"], asdict(residuals)])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"version": VERSION, "entries": entries}, indent=1) + "\n")


def calibration_file() -> Path:
    return state_folder() / FILE


def is_expandable(allocator: str | None) -> bool:
    """Whether a value of PYTORCH_CUDA_ALLOC_CONF lets segments grow, which leaves smaller gaps."""
    return "expandable_segments:True" in (allocator or "")


def _fits(key: CalibrationKey, profile: Profile) -> bool:
    device = profile.device
    return (
        key.compute_capability == device.compute_capability
        and abs(key.memory_gib - device.memory_gib) <= SAME_MEMORY * key.memory_gib
        and key.ranks == device.count * profile.nodes.count
        and key.expandable == is_expandable(device.allocator)
        and key.torch == installed("torch")
        and key.driver in _driver_text()
    )


def _newest(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last RUNS_KEPT small runs and the last RUNS_KEPT others, so that neither kind displaces the other."""
    kept = [[run for run in runs if (run["fragmented_share"] is None) == small][-RUNS_KEPT:] for small in (True, False)]
    return [run for run in runs if any(run is each for group in kept for each in group)]


def _worst(found: list[Residuals]) -> Residuals:
    return Residuals(
        max(each.context_bytes for each in found),
        max(each.workspace_bytes for each in found),
        max([each.fragmented_share for each in found if each.fragmented_share is not None], default=None),
    )


@lru_cache(maxsize=4)
def _entries(path: Path, _stamp: int) -> list[tuple[CalibrationKey, Residuals]]:
    """The largest values of each key's runs. `_stamp`, the file's modification time, is part of the cache's key."""
    return [
        (CalibrationKey(**entry["setting"]), _worst([Residuals(**run) for run in entry["runs"]]))
        for entry in _read(path)
        if entry["runs"]
    ]


def _read(path: Path) -> list[dict[str, Any]]:
    """Empty if the file is missing, damaged or of another version; the next run then replaces it."""
    try:
        found = json.loads(path.read_text("utf-8"))
        entries = found["entries"] if found["version"] == VERSION else []
        for entry in entries:
            CalibrationKey(**entry["setting"])
            for run in entry["runs"]:
                Residuals(**run)
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return list(entries)


@cache
def _driver_text() -> str:
    """Empty if no driver is loaded."""
    try:
        return DRIVER.read_text("utf-8", errors="replace")
    except OSError:
        return ""
