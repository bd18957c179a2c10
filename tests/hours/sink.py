"""A tracker that keeps only the steps that it got."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from engine.extras.trackers.tracker import Point


class Sink:
    """Counts points; `steps` has the newest ones."""

    last_seq: int | None = None

    def __init__(self, *, replaces_steps: bool = False, most: int | None = 100) -> None:
        self.replaces_steps = replaces_steps
        self.steps: deque[int] = deque(maxlen=most)

    def forward(self, point: Point) -> None:
        """Take one point."""
        self.steps.append(point.step)

    def rewind(self, step: int) -> None:
        """Nothing: the points before stay."""

    def refer_to(self, result: Path) -> None:
        """Nothing."""

    def position(self) -> dict[str, Any] | None:
        """Nothing to go on from."""
        return {}

    def close(self, exit_code: int) -> dict[str, Any]:
        """Nothing to store."""
        return {}
