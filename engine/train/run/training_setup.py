"""Everything that a run needs for its first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.train.run.identity import Identity
from engine.train.step.context import StepContext

if TYPE_CHECKING:
    from engine.config.schema.run import RunSpec
    from engine.data.order import SampleOrder
    from engine.data.prepare import PreparedData
    from engine.model.flops import StepFlops
    from engine.train.step.optimizer import Schedule


@dataclass
class TrainingSetup:
    """Everything that a run needs for its first step."""

    spec: RunSpec
    context: StepContext
    prepared: PreparedData
    order: SampleOrder
    schedule: Schedule
    total_steps: int
    identity: Identity
    flops: StepFlops | None
    """Model FLOPs of steps; None where they are unknown."""
