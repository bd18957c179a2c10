"""Forwards metrics to MLflow, wherever its own variables (MLFLOW_TRACKING_URI …) say; without them into its default
store in the folder where the run was started."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.extras.trackers.tracker import SEQ_METRIC, Point, TrackedRun

ID_TAG = "tunedeck.id"
PARAMETER_CHARACTERS = 500
"""What every version of MLflow's server takes."""
PARAMETERS_AT_ONCE = 100
NOT_IN_NAMES = re.compile(r"[^\w\-. /:]", re.ASCII)


class MlflowTracker:
    """One MLflow run, continued by every process that follows the run; metrics of an event are stored in one call."""

    replaces_steps = False

    def __init__(self, run: TrackedRun, position: dict[str, Any] | None) -> None:
        """`position`: {"run": id of the MLflow run}; without one the run is found by a tag that an earlier process may
        have left."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        found = position["run"] if position else self._find(run)
        self._id: str = found or self._begin(run)
        self._client.update_run(self._id, status="RUNNING")
        seq = self._client.get_run(self._id).data.metrics.get(SEQ_METRIC)
        self.last_seq = int(seq) if seq is not None else None

    def _experiment(self, project: str) -> str:
        found = self._client.get_experiment_by_name(project)
        return str(found.experiment_id if found is not None else self._client.create_experiment(project))

    def _find(self, run: TrackedRun) -> str | None:
        runs = self._client.search_runs(
            [self._experiment(run.project)], filter_string=f"tags.`{ID_TAG}` = '{run.own_id}'", max_results=1
        )
        return str(runs[0].info.run_id) if runs else None

    def _begin(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        tags = {ID_TAG: run.own_id, "group": run.group, "tags": ", ".join(run.tags)}
        made = self._client.create_run(
            self._experiment(run.project),
            run_name=run.name,
            tags={name: text for name, text in tags.items() if text},
        )
        parameters = [Param(key, value[:PARAMETER_CHARACTERS]) for key, value in flatten(run.config)]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(made.info.run_id, params=parameters[start : start + PARAMETERS_AT_ONCE])
        return str(made.info.run_id)

    def forward(self, point: Point) -> None:
        from mlflow.entities import Metric

        when = int(point.seconds * 1000)
        metrics = [Metric(NOT_IN_NAMES.sub("_", key), value, when, point.step) for key, value in point.metrics.items()]
        # Its step is its value, so that it only grows.
        metrics.append(Metric(SEQ_METRIC, point.seq, when, point.seq))
        self._client.log_batch(self._id, metrics=metrics, synchronous=True)

    def rewind(self, step: int) -> None:
        """Nothing: MLflow keeps its points, and those of repeated steps appear beside them."""

    def refer_to(self, result: Path) -> None:
        """As the tag `result`: MLflow has artifacts only in its own store."""
        self._client.set_tag(self._id, "result", result.as_uri())

    def position(self) -> dict[str, Any]:
        """Everything forwarded is stored already."""
        return {"run": self._id}

    def close(self, exit_code: int) -> dict[str, Any]:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED", int(time.time() * 1000))
        return self.position()


def flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys with their values as text; lists count as values. Yields nothing for empty tables and lists."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif value not in (None, [], ""):
            yield NOT_IN_NAMES.sub("_", f"{prefix}{key}"), str(value)
