"""Forwards metrics to Weights & Biases. Where there is no network: WANDB_MODE=offline, and `wandb sync` later."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from engine.extras.trackers.tracker import Point, TrackedRun

STEP_METRIC = "train/global_step"
"""The x-axis of all charts, by the name that Hugging Face's trainer gives it."""


class WandbTracker:
    """One wandb run, continued under the same id by every process that follows the run.

    wandb keeps metrics in memory and loses some if its process is killed, so the follower's record is written only
    after `finish`. After a kill, wandb's server says which events it has; offline, the killed process's folder is
    removed and its events are forwarded again.
    """

    replaces_steps = False

    def __init__(self, run: TrackedRun, position: dict[str, Any] | None) -> None:
        """`position`: {"id": id of the wandb run, "finished": names of complete offline folders}; None before the first
        end."""
        import wandb

        self._id = position["id"] if position else run.own_id
        self._finished: list[str] = position["finished"] if position else []
        for folder in (run.folder / "wandb").glob("offline-run-*"):
            if folder.name not in self._finished:
                shutil.rmtree(folder)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=self._id,
            group=run.group,
            tags=run.tags,
            config=run.config,
            dir=str(run.folder),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric=STEP_METRIC)
        self.last_seq: int | None = self._run.step - 1 if self._run.resumed else None

    def forward(self, point: Point) -> None:
        """wandb's own step is set to the event's `seq`, so that wandb's server can say which events it has."""
        self._run.log({**point.metrics, STEP_METRIC: point.step}, step=point.seq)

    def rewind(self, step: int) -> None:
        """Nothing: wandb keeps its points, and those of repeated steps appear beside them."""

    def refer_to(self, result: Path) -> None:
        """As an artifact by reference: nothing is uploaded."""
        import wandb

        artifact = wandb.Artifact(f"{self._run.id}-{result.name}", type="model")
        artifact.add_reference(result.as_uri(), checksum=False)
        self._run.log_artifact(artifact)

    def position(self) -> None:
        """None: only after `close` is everything stored."""
        return

    def close(self, exit_code: int) -> dict[str, Any]:
        """Wait until wandb has stored everything, and mark the run as finished or failed."""
        folder = Path(self._run.dir).parent.name
        self._run.finish(exit_code=exit_code)
        return {"id": self._id, "finished": [*self._finished, folder]}
