"""Forwards metrics to trackio, into its local database or wherever its own variables (TRACKIO_SPACE_ID …) say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.extras.trackers.tracker import SEQ_METRIC, Point, TrackedRun


class TrackioTracker:
    """One trackio run, continued under the same name by every process that follows the run."""

    replaces_steps = False

    def __init__(self, run: TrackedRun, position: dict[str, Any] | None) -> None:
        """`position` is None if no earlier process began the run; trackio's database says which events it has."""
        import trackio

        self.last_seq = None if position is None else _last_seq(run)
        config = {**run.config, "tags": run.tags} if run.tags else run.config
        self._run = trackio.init(
            project=run.project, name=run.name, group=run.group, config=config, resume="allow", embed=False
        )

    def forward(self, point: Point) -> None:
        self._run.log({**point.metrics, SEQ_METRIC: point.seq}, step=point.step)

    def rewind(self, step: int) -> None:
        """Nothing: trackio keeps its points, and those of repeated steps appear beside them."""

    def refer_to(self, result: Path) -> None:
        """As an artifact by reference: nothing is copied."""
        import trackio

        artifact = trackio.Artifact(f"{result.parent.name}-{result.name}", type="model")
        artifact.add_reference(result.as_uri(), checksum=False)
        self._run.log_artifact(artifact)

    def position(self) -> dict[str, Any]:
        """Empty: the run was begun. Which events it has is in trackio's database."""
        return {}

    def close(self, exit_code: int) -> dict[str, Any]:
        """Wait until trackio has written everything. It shows no status of a run: `exit_code` is not used."""
        self._run.finish()
        return {}


def _last_seq(run: TrackedRun) -> int | None:
    """None if the database has no such run."""
    words = ["get", "metric", "--project", run.project, "--run", run.name, "--metric", SEQ_METRIC, "--json"]
    found = subprocess.run(
        [sys.executable, "-P", "-m", "trackio.cli", *words], check=False, capture_output=True, text=True
    )
    if found.returncode != 0:
        return None
    return max((int(row["value"]) for row in json.loads(found.stdout)["values"]), default=0)
