"""What a tracker is to the follower of a journal, and what a tracker is told about the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.trackers.metrics import Point


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker shows it."""

    name: str
    """The run directory's name; for a stage "RUN/STAGE"."""
    group: str | None
    """The sweep or the staged run that it belongs to."""
    project: str
    tags: list[str]
    config: dict[str, Any]
    """The resolved recipe."""
    folder: Path
    """Folder for the tracker's own files; exists."""


class Tracker(Protocol):
    """Takes the metrics of one run. Every method may raise whatever the tracker's package raises."""

    last_seq: int | None
    """`seq` of the last event that the tracker itself has recorded, if it can tell; else None, and the follower's own
    record counts."""

    def forward(self, point: Point) -> None:
        """Take the metrics of one event."""

    def rewind(self, step: int) -> None:
        """Void what was forwarded of the steps after `step`: the run went back to its checkpoint of that step."""

    def position(self) -> dict[str, Any] | None:
        """Hand over what was forwarded; returns what a later process needs to continue after it. None where only
        `close` can hand over."""

    def close(self, exit_code: int) -> dict[str, Any]:
        """End the run in the tracker, and return what `position` does. `exit_code` is 0 unless the run failed."""
