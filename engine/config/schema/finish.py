"""The schema of [trackers] and [finish]: who hears of a run besides its journal, and what is done with its result."""

from __future__ import annotations

from typing import Literal

from engine.config.schema.base import Table

WEBHOOK, PUSH = "finish.webhook", "finish.push"


class Trackers(Table):
    """Experiment trackers beside the journal."""

    use: list[Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]] = []
    """Trackers that get the metrics of a run; each needs its package."""
    project: str | None = None
    """Project name in the trackers; by default tunedeck."""
    tags: list[str] = []
    """Tags of the run in the trackers."""
    result: bool = False
    """Name the result's folder in the trackers: an artifact by reference, a tag or a text. Nothing is uploaded."""


class Finish(Table):
    """What is done with the result at the end of a run, and who hears of it."""

    merge: bool = False
    """Merge the adapter into its base model when the run is done, into merged/ of the run; uses host memory only."""
    webhook: str | None = None
    """An http or https URL that hears of the run's end, failure and alerts, or "$NAME" for a variable that holds it.
    Used only if you have given it once yourself: --set finish.webhook=URL."""
    push: str | None = None
    """OWNER/NAME on the Hugging Face hub: send the result there when the run is done, merged with merge = true. Used
    only if you have given it once yourself: --set finish.push=OWNER/NAME."""
    push_public: bool = False
    """Let everybody read what push sends; by default only you."""

    def destinations(self) -> dict[str, str]:
        """Key = what leaves this machine through it, for all that is set."""
        pushed = f"{self.push} {'public' if self.push_public else 'private'}" if self.push else None
        return {key: value for key, value in ((WEBHOOK, self.webhook), (PUSH, pushed)) if value}
