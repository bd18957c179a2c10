"""Forwards metrics to Weights & Biases. Where there is no network: WANDB_MODE=offline, and `wandb sync` later.

Try: `WANDB_MODE=offline tunedeck train -p demo -r demo --set 'trackers.use=["wandb"]'`
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from engine.trackers.metrics import Point
from engine.trackers.tracker import TrackedRun

STEP_METRIC = "train/global_step"
"""The x-axis of all charts, by the name that Hugging Face's trainer gives it."""


class WandbTracker:
    """One wandb run, continued under the same id by every process that follows the run.

    wandb keeps what it is given in memory, and loses a part if its process is killed: only `finish` is certain. So
    nothing is remembered before, and after a kill either wandb's server says what it has, or, offline, what the killed
    process left is removed and forwarded again.
    """

    def __init__(self, run: TrackedRun, position: dict[str, Any] | None) -> None:
        """`position`: the id of the wandb run, and the offline folders that were finished."""
        import wandb

        own = hashlib.sha256(f"{run.folder}".encode()).hexdigest()[:12]
        self._id = position["id"] if position else own
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
        """Log the metrics. wandb's own step is the event's `seq`: its server then says which events it has."""
        self._run.log({**point.metrics, STEP_METRIC: point.step}, step=point.seq)

    def rewind(self, step: int) -> None:
        """Nothing: wandb keeps what it has, and the steps that are done again appear beside it."""

    def position(self) -> None:
        """None: wandb cannot be told to hand over before its end."""
        return

    def close(self, exit_code: int) -> dict[str, Any]:
        """Wait until wandb has taken everything, and mark the run as finished or failed."""
        folder = Path(self._run.dir).parent.name
        self._run.finish(exit_code=exit_code)
        return {"id": self._id, "finished": [*self._finished, folder]}
