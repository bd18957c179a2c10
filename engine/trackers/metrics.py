"""The metrics that a tracker gets: the numbers of the journal's step and evaluation events, with the field's usual
names."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

Event = dict[str, Any]

NOT_METRICS = frozenset({"seq", "rank", "step", "stage_seq"})
"""Numbers of a step event that say where the event belongs."""


class Point(NamedTuple):
    """The metrics of one event of the journal, as a tracker gets them."""

    seq: int
    """The event's number in the journal."""
    seconds: float
    """When the event was written, in seconds since 1970."""
    step: int
    """The optimizer step, counted from 1; an evaluation before the first step has step 0."""
    metrics: dict[str, float]


def point_of(event: Event) -> Point | None:
    """The metrics of a step or evaluation event: `train/loss`, `eval/rougeL`, `experts/entropy`. None for other events,
    and where no value is a finite number."""
    if event["kind"] == "step":
        metrics = {f"train/{name}": value for name, value in event.items() if name not in NOT_METRICS}
        used = event.get("expert_utilisation") or {}
        metrics |= {f"experts/{name}": value for name, value in used.items() if name != "layer"}
    elif event["kind"] == "eval":
        metrics = {f"eval/{name}": value for name, value in event["metrics"].items()}
    else:
        return None
    numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
    seconds = datetime.fromisoformat(event["time"]).timestamp()
    return Point(event["seq"], seconds, event["step"], numbers) if numbers else None


def _is_number(value: object) -> bool:
    """Whether a value of the journal is a number (bool excluded). The journal has None in place of a value that was not
    finite."""
    return isinstance(value, int | float) and not isinstance(value, bool)
