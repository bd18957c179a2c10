"""Opens a tracker for a run: what the run is called there, and which class forwards to it."""

from __future__ import annotations

from typing import Any

from engine.errors import UsageError
from engine.journal.directory import RunDirectory
from engine.journal.stages import stage_name
from engine.spec.load import load_run_spec
from engine.trackers.tensorboard_tracker import TensorBoardTracker
from engine.trackers.tracker import TrackedRun, Tracker
from engine.trackers.trackio_tracker import TrackioTracker
from engine.trackers.wandb_tracker import WandbTracker

DEFAULT_PROJECT = "tunedeck"
"""Project of a recipe without `trackers.project`."""

TRACKER_CLASSES: dict[str, type[TensorBoardTracker] | type[WandbTracker] | type[TrackioTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}


def open_tracker(directory: RunDirectory, name: str, position: dict[str, Any] | None) -> Tracker:
    """Open tracker `name` for a run. `position` is what the tracker's `position` or `close` returned in an earlier
    process; None for the run's first.

    Raises UsageError for an unknown name, and whatever the tracker's package raises.
    """
    if name not in TRACKER_CLASSES:
        raise UsageError(f"no tracker {name!r}", expected=f"one of: {', '.join(TRACKER_CLASSES)}")
    return TRACKER_CLASSES[name](tracked_run(directory, name), position)


def tracked_run(directory: RunDirectory, name: str) -> TrackedRun:
    """Return the run as tracker `name` shows it, and create the folder for the tracker's files."""
    spec = load_run_spec(directory.run_toml, own=True)
    parent = directory.path.parent.parent.name if directory.path.parent.name == "stages" else None
    sweep = spec.provenance.sweep
    folder = directory.trackers / name
    folder.mkdir(parents=True, exist_ok=True)
    return TrackedRun(
        name=f"{parent}/{stage_name(directory)}" if parent else directory.name,
        group=parent or (sweep.id if sweep else None),
        project=spec.recipe.trackers.project or DEFAULT_PROJECT,
        tags=spec.recipe.trackers.tags,
        config=spec.recipe.model_dump(mode="json", by_alias=True, exclude_none=True),
        folder=folder,
    )
