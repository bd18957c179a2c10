"""The objects that a step works on, and all that a run needs for its first step; loss scaling for fp16 (mixed
precision)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from engine.batching.budget import MicroBatchBudget
    from engine.batching.micro_batches import Cost
    from engine.config.files.caches import SequenceBounds
    from engine.data.tokens import TokenData
    from engine.device.base import Device
    from engine.distributed.ranks import Ranks
    from engine.model.cudnn_attention import CudnnAttention
    from engine.model.load import LoadedModel
    from engine.model.loss import LossFunction
    from engine.objectives.reference import Reference
    from engine.train.step.failures import ActiveRemedy, LocalRecoveries, RankOom, RecoveredOom
    from engine.train.step.interface import Strategy
    from engine.train.step.objective import SequenceObjective
    from engine.train.step.optimizer import StepGuard
    from engine.train.step.rollback import Rollback

GROWTH_INTERVAL = 2000
SMALLEST_SCALE = 1.0
"""Below it the data or weights are broken: nothing was scaled up, and torch's scaler would halve for ever."""


@dataclass
class LossScaler:
    """`scale` multiplies the loss before backward; it is always 1.0 if `enabled` is false. The rule of
    torch.amp.GradScaler without its tensors on the device: the gradient norm, computed for clipping anyway, says
    whether a gradient overflowed."""

    enabled: bool
    scale: float = 1.0
    clean_steps: int = 0

    @classmethod
    def start(cls, enabled: bool) -> LossScaler:
        return cls(enabled, 2.0**16 if enabled else 1.0)

    @property
    def can_back_off(self) -> bool:
        """Whether lowering the scale may make the gradients finite."""
        return self.enabled and self.scale > SMALLEST_SCALE

    def overflowed(self) -> None:
        """After a step that was skipped because a gradient was not finite."""
        self.scale, self.clean_steps = self.scale / 2, 0

    def succeeded(self) -> None:
        """After a step that was applied; doubles the scale after 2000 of them without an overflow."""
        self.clean_steps += 1
        if self.enabled and self.clean_steps >= GROWTH_INTERVAL:
            self.scale, self.clean_steps = self.scale * 2, 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class StepContext:
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
    bounds: SequenceBounds
    """Of the data that plan and cost are for."""
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
    cost_recomputing: Callable[[int], Cost] | None = None
    """`cost` if so many layers recompute their activations; None where this cannot be predicted."""
    objective: SequenceObjective | None = None
    """None: the loss of target tokens."""
    cudnn: CudnnAttention | None = None
    """Which micro-batches cuDNN's attention computes; None: none of this run."""
    references: Callable[[TokenData], Reference | None] = lambda data: None
    """In preference learning: what computes the reference's log-probabilities of these data."""
    static_bytes: int = 0
    """Allocated between steps, by weights and optimizer state."""
    active_remedies: list[ActiveRemedy] = field(default_factory=list)
    """In the order in which they were applied."""
