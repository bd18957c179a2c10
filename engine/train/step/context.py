"""The objects that a step works on, created once per run.

Plain data: built by `engine.train.setup`, used by the step transaction, checkpoints and evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import Cost
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.distributed.ranks import Ranks
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.train.recovery.local_recoveries import LocalRecoveries
from engine.train.recovery.records import ActiveRemedy, RankOom, RecoveredOom
from engine.train.step.loss_scaler import LossScaler
from engine.train.step.optimizer import StepGuard
from engine.train.step.rollback import Rollback
from engine.train.strategy.base import Strategy


@dataclass
class StepContext:
    """Objects and settings that all steps of a run use."""

    device: Device
    ranks: Ranks
    strategy: Strategy
    loaded: LoadedModel
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    guard: StepGuard
    rollback: Rollback
    scaler: LossScaler
    data: TokenData
    cost: Cost
    budget: MicroBatchBudget
    ladder: list[str]
    pad_id: int
    seed: int
    max_grad_norm: float
    may_grow: bool
    measures: bool
    """Whether the device's readings are exact (CUDA, metered), so that the budget may learn from them."""
    report: Callable[[RecoveredOom], None]
    """Records a failure that all ranks know of."""
    local_recoveries: LocalRecoveries
    """Records failures that only this rank knows of."""
    suggest_fixes: Callable[[RankOom], str]
    """Changes of the recipe that would have avoided a failure, as a sentence; empty where nothing can be predicted."""
    static_bytes: int = 0
    """Bytes allocated between steps, by weights and optimizer state."""
    active_remedies: list[ActiveRemedy] = field(default_factory=list)
    """Remedies that stay on, in the order in which they were applied."""
