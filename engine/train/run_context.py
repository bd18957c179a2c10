"""What a process is started with, and what the parts of a run share: records without behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.journal.directory import RunDirectory
from engine.launch.run_requests import RunRequests
from engine.spec.schema.run import RunSpec
from engine.train.monitor.journal import Journal
from engine.train.monitor.watchdog import Watchdog


@dataclass(frozen=True)
class RunStart:
    """Which run this process trains, as which of its ranks, and from where."""

    spec: RunSpec
    directory: RunDirectory
    ranks: Ranks = SINGLE_PROCESS
    resume: bool = False
    from_step: int | None = None
    """Resume from the newest checkpoint at or before this step; None for the newest of all."""


@dataclass(frozen=True)
class RunContext:
    """What the loop, the checkpoint manager and the evaluator share beside the training set-up."""

    directory: RunDirectory
    journal: Journal
    requests: RunRequests
    watchdog: Watchdog
