"""The protocol of a tracker, and the metrics that it gets."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine.journal.events import Event

SEQ_METRIC = "journal/seq"
"""The `seq` of an event beside its metrics: which events a tracker has, only its own store can say after a kill."""


NOT_METRICS = frozenset({"seq", "rank", "step", "stage_seq"})
"""Numbers of a step event that say where it belongs."""


class Point(NamedTuple):
    seq: int
    seconds: float
    """Since 1970, when the event was written."""
    step: int
    """Counted from 1; an evaluation before the first step has step 0."""
    metrics: dict[str, float]


def point_of(event: Event) -> Point | None:
    """`train/loss`, `eval/rougeL`, `experts/entropy`. None for other events, and where no value is a finite number."""
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
    """A bool is none; None stands for a value that was not finite."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class TrackedRun:
    name: str
    """The run directory's name; for a stage "RUN/STAGE"."""
    group: str | None
    """The sweep's id, or the name of the staged run, that the run belongs to."""
    project: str
    tags: list[str]
    config: dict[str, Any]
    folder: Path
    """For the tracker's own files; exists."""
    names_result: bool = False
    """Whether `refer_to` is called for the run's result."""

    @property
    def own_id(self) -> str:
        """An id for the tracker's run, the same in every process that follows this run."""
        return hashlib.sha256(f"{self.folder}".encode()).hexdigest()[:12]


class Tracker(Protocol):
    """Takes the metrics of one run. Every method may raise any exception of the tracker's package."""

    last_seq: int | None
    """`seq` of the last event in the tracker's own storage; None leaves it to the
    follower's record."""
    replaces_steps: bool
    """Whether `rewind` discards points. If not, the points of steps that a resume does again are not sent, as far as
    the resume is known by then."""

    def forward(self, point: Point) -> None:
        """Send the metrics of one event to the tracker."""

    def rewind(self, step: int) -> None:
        """Discard the metrics of the steps after `step`: the run was resumed from its checkpoint of that step."""

    def refer_to(self, result: Path) -> None:
        """Name the folder of the run's result beside its metrics, as an artifact by reference where the tracker has
        such."""

    def position(self) -> dict[str, Any] | None:
        """Store everything forwarded; returns what a later process needs to continue, None if only `close` can."""

    def close(self, exit_code: int) -> dict[str, Any]:
        """Store everything and end the run; returns what `position` does. `exit_code` is 0 unless the run failed."""
