"""The fields of events as an engine would write them, and as none would."""

from __future__ import annotations

import json
import random
from typing import Any

from engine.journal.event_schema import EVENT_KINDS

JUNK: list[Any] = [None, True, -1, 10**30, 0.5, "", "\x1b[31m", [], [1], [[]], {}, {"a": {"b": None}}]

SOUND = {"whole": 1, "number": 1.0, "text": "x", "flag": True, "table": {}, "texts": [], "any": 1}
"""A value of each type of EVENT_KINDS; of others an empty table."""


def junk_lines(count: int, *, seed: int = 36) -> list[bytes]:
    """Lines of an event file: events of every kind, one field of each missing or of a random type."""
    chance = random.Random(seed)
    lines = []
    for number in range(count):
        kind = chance.choice(list(EVENT_KINDS))
        types = {**EVENT_KINDS[kind].required, **EVENT_KINDS[kind].optional}
        fields = {name: SOUND.get(of.rstrip("?"), {}) for name, of in types.items()}
        event = {"seq": number, "time": "2026-11-20T20:58:00.123Z", "kind": kind, "stage": "", "rank": 0, **fields}
        harmed = chance.choice(list(event))
        if chance.random() < 0.3:
            del event[harmed]
        else:
            event[harmed] = chance.choice(JUNK)
        lines.append(json.dumps(event, separators=(",", ":")).encode() + b"\n")
    return lines


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
