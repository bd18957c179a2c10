"""What a step works on, made once per run, and the record of one allocation failure that it outlived.

Plain data: `engine.train.setup` builds it, `engine.train.transaction` and what stands around the steps use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.model.slices import SlicedAttention
from engine.parallel.deepspeed import Zero
from engine.parallel.joint import Joint
from engine.parallel.ranks import ALONE, Ranks
from engine.parallel.reduce import GradientSum
from engine.parallel.sharded import Sharded
from engine.train.agreement import Knowledge
from engine.train.costbudget import CostBudget
from engine.train.failure import Failure
from engine.train.ladder import Remedy, Standing
from engine.train.microbatch import Cost, MicroBatch
from engine.train.optimizer import StepGuard
from engine.train.rollback import Rollback
from engine.train.scaler import LossScaler

if TYPE_CHECKING:
    from engine.train.collecting import Collector
    from engine.train.outlived import Outlived
    from engine.train.zero import ZeroCollector


@dataclass(frozen=True)
class Backoff:
    """One allocation failure and what was done about it."""

    step: int
    failure: Failure
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
    budget: CostBudget
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
    advise: Callable[[Failure, MicroBatch | None], str]
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
    zero: Zero | None = None
    """What DeepSpeed shares out, where ranks use it."""
    collector: Collector | ZeroCollector | None = None
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
        return self.sharded is not None or self.zero is not None

    @property
    def knowledge(self) -> Knowledge:
        """What all ranks must know alike."""
        return Knowledge(self.budget, self.loaded, self.loss, self.guard, self.standing)
