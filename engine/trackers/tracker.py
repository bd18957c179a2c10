"""The protocol of a tracker, which the follower of a journal calls, and the description of the run that the tracker
gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.trackers.metrics import Point


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run with which a tracker begins or continues it."""

    name: str
    """The run directory's name; for a stage "RUN/STAGE"."""
    group: str | None
    """The id of the sweep, or the name of the staged run, that the run belongs to; None if it belongs to neither."""
    project: str
    tags: list[str]
    config: dict[str, Any]
    """The resolved recipe."""
    folder: Path
    """Folder for the tracker's own files; exists."""


class Tracker(Protocol):
    """Takes the metrics of one run. Every method may raise any exception of the tracker's package."""

    last_seq: int | None
    """`seq` of the last event that the tracker's own storage has. None if the tracker cannot tell: then `seq` of the
    follower's record is used."""

    def forward(self, point: Point) -> None:
        """Send the metrics of one event to the tracker."""

    def rewind(self, step: int) -> None:
        """Discard the forwarded metrics of the steps after `step`: the run was resumed from its checkpoint of that
        step."""

    def position(self) -> dict[str, Any] | None:
        """Write everything that was forwarded to the tracker's storage; returns what a later process needs to continue
        after it. None if the tracker can only do this in `close`."""

    def close(self, exit_code: int) -> dict[str, Any]:
        """End the run in the tracker after writing everything that was forwarded; returns what a later process needs to
        continue, as `position` does. `exit_code` is 0 unless the run failed."""
