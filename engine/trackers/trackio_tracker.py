"""Forwards metrics to trackio, into its local database or wherever its own variables (TRACKIO_SPACE_ID …) say.

Try: `tunedeck train -p demo -r demo --set 'trackers.use=["trackio"]'`, then `trackio show`
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from engine.trackers.metrics import Point
from engine.trackers.tracker import TrackedRun

SEQ_METRIC = "journal/seq"
"""The event's `seq`, logged with every point: trackio writes in a thread of its own, so only its database knows what a
process that was killed had still written."""


class TrackioTracker:
    """One trackio run, continued under the same name by every process that follows the run."""

    def __init__(self, run: TrackedRun, position: dict[str, Any] | None) -> None:
        """`position`: not None if an earlier process began the trackio run."""
        import trackio

        self.last_seq = None if position is None else _last_seq(run)
        config = {**run.config, "tags": run.tags} if run.tags else run.config
        self._run = trackio.init(
            project=run.project, name=run.name, group=run.group, config=config, resume="allow", embed=False
        )

    def forward(self, point: Point) -> None:
        """Log the metrics at their step."""
        self._run.log({**point.metrics, SEQ_METRIC: point.seq}, step=point.step)

    def rewind(self, step: int) -> None:
        """Nothing: trackio keeps what it has, and the steps that are done again appear beside it."""

    def position(self) -> dict[str, Any]:
        """Nothing to remember but that the run began: trackio's database says what it has."""
        return {}

    def close(self, exit_code: int) -> dict[str, Any]:
        """Wait until trackio has written everything. It has no status of a run."""
        self._run.finish()
        return {}


def _last_seq(run: TrackedRun) -> int | None:
    """The `seq` of the last event in trackio's database; None if it does not have the run."""
    words = ["get", "metric", "--project", run.project, "--run", run.name, "--metric", SEQ_METRIC, "--json"]
    found = subprocess.run(
        [sys.executable, "-P", "-m", "trackio.cli", *words], check=False, capture_output=True, text=True
    )
    if found.returncode != 0:
        return None
    return max((int(row["value"]) for row in json.loads(found.stdout)["values"]), default=0)
