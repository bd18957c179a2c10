"""Events as an engine would write them, and run directories to write them into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.journal.directory import RunDirectory, create_run_directory

RUN_TOML = """schema = 1
kind = "run"
name = "{name}"

[profile]
name = "demo"
[profile.device]
kind = "metered"

[recipe]
name = "demo"
[recipe.model]
id = "builtin:tiny"
"""


def new_run(folder: Path, name: str = "demo") -> RunDirectory:
    """A run directory as `train` makes it, but not started."""
    plan = {"verdict": "tight", "peak_bytes": 300 << 20, "capacity_bytes": 256 << 20}
    return create_run_directory(folder, name, RUN_TOML.format(name=name), plan)


def step_fields(step: int, **other: Any) -> dict[str, Any]:
    """The fields of a `step` event."""
    return {
        "step": step,
        "epoch": step / 10,
        "loss": 1.0 / step,
        "learning_rate": 1e-4,
        "grad_norm": 1.0,
        "tokens": 640,
        "target_tokens": 320,
        "tokens_per_second": 1000.0,
        "step_seconds": 0.5,
        "data_wait_seconds": 0.0,
        "mfu": None,
        "micro_batches": 2,
        "allocated_bytes": 1 << 20,
        "reserved_bytes": 2 << 20,
        "peak_bytes": (200 << 20) + step,
        **other,
    }


def backoff_fields(step: int, **other: Any) -> dict[str, Any]:
    """The fields of a `backoff` event."""
    return {
        "step": step,
        "phase": "backward",
        "failed_rank": 0,
        "cause": "device",
        "requested_bytes": 24 << 20,
        "allocated_bytes": 230 << 20,
        "reserved_bytes": 230 << 20,
        "remedy": "cut",
        "before": 1000,
        "after": 800,
        "attempt": 1,
        **other,
    }
