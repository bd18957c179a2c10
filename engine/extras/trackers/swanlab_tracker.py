"""Forwards metrics to SwanLab. Where there is no network: SWANLAB_MODE=offline, and `swanlab sync` later."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from engine.extras.trackers.tracker import Point, TrackedRun


class SwanLabTracker:
    """One SwanLab run, continued under the same id by every process that follows the run.

    swanlab writes in a thread of its own, so the follower's record is written only after `close`. Offline, the folder
    of a process that was killed is removed and its events are forwarded again; its server takes a step once.
    """

    last_seq: int | None = None
    replaces_steps = False

    def __init__(self, run: TrackedRun, position: dict[str, Any] | None) -> None:
        """`position`: {"id": id of the SwanLab run, "finished": names of complete folders}; None before the first
        end."""
        import swanlab

        self._id = position["id"] if position else run.own_id
        self._finished: list[str] = position["finished"] if position else []
        mode = os.environ.get("SWANLAB_MODE") or None
        for folder in run.folder.glob("run-*"):
            if mode == "offline" and folder.name not in self._finished:
                shutil.rmtree(folder)
        self._run = swanlab.init(
            project=run.project, name=run.name, id=self._id, resume="allow", group=run.group, tags=run.tags,
            config=run.config, log_dir=str(run.folder), mode=mode, settings=swanlab.Settings(interactive=False),
        )  # fmt: skip

    def forward(self, point: Point) -> None:
        self._run.log(point.metrics, step=point.step)

    def rewind(self, step: int) -> None:
        """Nothing: of a step that comes twice, SwanLab keeps the first point."""

    def refer_to(self, result: Path) -> None:
        """In the run's configuration: SwanLab has no artifacts by reference."""
        self._run.config.update({"result": result.as_uri()})

    def position(self) -> None:
        """None: only after `close` is everything stored."""
        return

    def close(self, exit_code: int) -> dict[str, Any]:
        """Wait until swanlab has stored everything, and mark the run as finished or failed."""
        folder = Path(self._run.dir).name
        if exit_code:
            self._run.finish(state="crashed", error=f"exit code {exit_code}")
        else:
            self._run.finish()
        return {"id": self._id, "finished": [*self._finished, folder]}
