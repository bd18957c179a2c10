"""The fields of events as an engine would write them."""

from __future__ import annotations

from typing import Any


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
