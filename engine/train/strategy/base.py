"""The strategy of a run: how its ranks share weights, gradients and samples. The interface, and a run of one process.

The step transaction, checkpoints and evaluation call these methods without asking which strategy it is. All ranks call
them in the same order, because most hold collectives or votes. `engine.train.strategy.load` chooses and loads one.

Try: `pytest tests/distributed`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batching.micro_batches import Cost, MicroBatch
from engine.data.batch import Batch
from engine.data.tokens import TokenData
from engine.distributed.assign_samples import assign_samples
from engine.distributed.ranks import Ranks
from engine.distributed.voted_group import VotedGroup
from engine.evaluate.scores import EvaluationContext
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.train.strategy.checkpoint_storage import CheckpointStorage, LocalStorage


class Strategy(ABC):
    """How the ranks of a run share its work. The methods here involve this rank alone; subclasses override those that
    need other ranks."""

    ranks_per_sample = 1
    """Ranks that share each sequence."""
    all_ranks_save = False
    """Whether a checkpoint can only be written by all ranks together."""
    voted_group: VotedGroup | None = None
    """Votes before the collectives of a micro-batch; None where a micro-batch has none."""

    def __init__(self, loaded: LoadedModel, loss: LossFunction, ranks: Ranks) -> None:
        self.loaded, self.loss, self.ranks = loaded, loss, ranks
        self.parameters = [parameter for _, parameter in loaded.trainable()]
        """What the optimizer updates on this rank."""

    def assign_samples(self, lengths: NDArray[np.int32]) -> list[int]:
        """Positions in `lengths`, which has one entry for each sample of the step, of the samples that this rank works
        on."""
        return assign_samples(lengths, self.ranks.size)[self.ranks.rank]

    def pad_plan(self, plan: list[MicroBatch]) -> list[MicroBatch]:
        """`plan` with the dummy micro-batches that this rank needs to take part in the collectives of the others."""
        return plan

    def run_stage(self, stage: Callable[[], None]) -> None:
        """Run one stage of a step. If the stage contains collectives and fails on one rank, it ends on all of them."""
        stage()

    def local_part(self, batch: Batch, *, pad_id: int) -> Batch:
        """The part of a micro-batch that this rank computes."""
        return batch

    def micro_batch(self) -> AbstractContextManager[None]:
        """Context manager around forward and backward of every micro-batch."""
        return nullcontext()

    def dummy_micro_batch(self) -> AbstractContextManager[None]:
        """Context manager around forward and backward of a micro-batch that `pad_plan` added."""
        return nullcontext()

    @abstractmethod
    def prepare_gradients(self, loss: float) -> float:
        """Agree on which parameters have a gradient on any rank, and allocate missing ones; returns the sum of all
        ranks' `loss`."""

    @abstractmethod
    def sync_gradients(self) -> None:
        """Make every gradient the sum over all ranks. Allocates nothing."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        torch._foreach_mul_(self._gradients(), factor)

    def clip_gradients(self, max_norm: float) -> float:
        """Clip gradients to `max_norm`, unless that is 0; returns their norm before. Waits for the device once."""
        norm = torch.nn.utils.get_total_norm(self._gradients())
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        return float(norm)

    def drop_gradients(self) -> None:
        """Forget all gradients on this rank."""
        for parameter in self.parameters:
            parameter.grad = None

    def recover(self) -> None:
        """Restore the model's internal state after a failed attempt at a step. Allocates nothing.

        Raises:
            LostRankError: recovery needs a restart of all ranks.
        """
        return

    def checkpoint_storage(self, optimizer: torch.optim.Optimizer) -> CheckpointStorage:
        """The object that writes weights and the state of `optimizer` into checkpoints and reads the state back. All
        ranks call this."""
        return LocalStorage(self.loaded, optimizer)

    def forward_only(self) -> AbstractContextManager[None]:
        """Context manager around forward passes on all ranks that no backward follows."""
        return nullcontext()

    def join_evaluation(self, context: EvaluationContext, data: TokenData) -> None:
        """If no rank can evaluate alone, make all ranks take part in rank 0's evaluation of `data`."""
        return

    def evaluation_cost(self, cost: Cost) -> Cost:
        """The cost of a micro-batch in evaluation, from its cost in training."""
        return cost

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


class SingleDevice(Strategy):
    """The strategy of one process, which holds the whole model and trains on every sample."""

    def prepare_gradients(self, loss: float) -> float:
        """Return `loss` unchanged: there is no other rank."""
        return loss

    def sync_gradients(self) -> None:
        """Do nothing: there is no other rank."""
        return
