"""The schema of [trackers] and [finish]: who hears of a run besides its journal, and what is done with its result."""

from __future__ import annotations

from typing import Literal

from engine.config.schema.base import Table

WEBHOOK, PUSH = "finish.webhook", "finish.push"


class Trackers(Table):
    """Experiment trackers, in addition to the journal."""

    use: list[Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]] = []
    """Trackers that get the metrics of a run; each needs its package."""
    project: str | None = None
    """Project name in the trackers; by default tunedeck."""
    tags: list[str] = []
    """Tags of the run in the trackers."""
    result: bool = False
    """Record the path of the result in the trackers: as an artifact by reference, a tag or a text. Nothing is
    uploaded."""


class Finish(Table):
    """What happens with the result at the end of a run, and who is notified."""

    merge: bool = False
    """Merge the adapter into its base model when the run is done, into merged/ of the run; uses host memory only."""
    webhook: str | None = None
    """An HTTP(S) URL that is notified of the run's end, failure and alerts, or "$NAME" for a variable with the URL.
    Only used after you have set it yourself once: --set finish.webhook=URL."""
    push: str | None = None
    """OWNER/NAME on the Hugging Face hub: send the result there when the run is done, merged with merge = true. Only
    used after you have set it yourself once: --set finish.push=OWNER/NAME."""
    push_public: bool = False
    """Make the pushed repository public; by default it is private."""

    def destinations(self) -> dict[str, str]:
        """Key = what leaves this machine through it, for all that is set."""
        pushed = f"{self.push} {'public' if self.push_public else 'private'}" if self.push else None
        return {key: value for key, value in ((WEBHOOK, self.webhook), (PUSH, pushed)) if value}
