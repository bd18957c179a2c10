"""What a step works on, made once per run, and the record of one allocation failure that it outlived.

Plain data: `engine.train.setup` builds it, `engine.train.step.transaction` and what stands around the steps use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import Cost, MicroBatch
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.oom import OutOfMemory
from engine.distributed.gradient_all_reduce import GradientSum
from engine.distributed.ranks import ALONE, Ranks
from engine.distributed.sharded import Sharded
from engine.distributed.voted_group import Joint
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.model.slices import SlicedAttention
from engine.train.recovery.consensus import Knowledge
from engine.train.recovery.ladder import Remedy, Standing
from engine.train.step.loss_scaler import LossScaler
from engine.train.step.optimizer import StepGuard
from engine.train.step.rollback import Rollback

if TYPE_CHECKING:
    from engine.train.recovery.local_recoveries import Outlived
    from engine.train.strategy.checkpoint_gatherer import Collector


@dataclass(frozen=True)
class Backoff:
    """One allocation failure and what was done about it."""

    step: int
    failure: OutOfMemory
    remedy: Remedy
    rows_before: int | None
    """Sequences in the micro-batch that was in flight; 0 when none was, None where nothing is cut."""
    rows_after: int | None
    """Most sequences at a time in the next attempt; 0 when there is none, None where nothing is cut."""
    attempt: int
    micro_batch: MicroBatch | None = None
    """What was in flight."""
    failed_rank: int = 0


@dataclass
class Parts:
    """What a step works on; made once per run."""

    device: Device
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
    """The device's readings are exact (CUDA, metered), so the budget may learn from them."""
    report: Callable[[Backoff], None]
    """Tells of a failure that all ranks know of."""
    outlived: Outlived
    """Tells of one that only this rank knows of."""
    advise: Callable[[OutOfMemory, MicroBatch | None], str]
    """What would have helped, in words; empty where nothing can be predicted."""
    static_bytes: int = 0
    standing: list[Standing] = field(default_factory=list)
    """Remedies in force, first to last."""
    ranks: Ranks = ALONE
    gradient_sum: GradientSum | None = None
    """Over ranks that are replicas of each other; None elsewhere."""
    joint: Joint | None = None
    """The ranks that launch collectives together within a step's micro-batches; None where there are none."""
    sharded: Sharded | None = None
    """The weights where each rank holds a part of them."""
    collector: Collector | None = None
    """What puts parts together to be saved."""
    slices: SlicedAttention | None = None
    """Where several ranks share each sequence."""

    @property
    def sharers(self) -> int:
        """How many ranks share each sequence."""
        return self.slices.group.size if self.slices else 1

    @property
    def moves_together(self) -> bool:
        """Whether no rank computes a micro-batch by itself."""
        return self.sharded is not None

    @property
    def knowledge(self) -> Knowledge:
        """What all ranks must know alike."""
        return Knowledge(self.budget, self.loaded, self.loss, self.guard, self.standing)
