"""What a step asks of the strategy of its run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.distributed.ranks import assign_samples

if TYPE_CHECKING:
    from engine.batching.micro_batches import Cost, MicroBatch
    from engine.data.batch import Batch
    from engine.distributed.ranks import Ranks
    from engine.distributed.votes import VotedGroup
    from engine.evaluate.context import EvaluationContext, Questions
    from engine.model.load import LoadedModel
    from engine.model.loss import LossFunction
    from engine.model.tensor_file import Hashes


class CheckpointStorage(Protocol):
    """Writes and reads the weights and the optimizer state of a run. All ranks call each method."""

    def write_weights(self, folder: Path) -> Hashes:
        """Write the weights as safetensors files into `folder`; returns the hashes of the files written."""

    def write_optimizer(self, checkpoint: Path) -> Hashes:
        """Write the optimizer state into the checkpoint's folder; returns the hashes of the files written."""

    def read_optimizer(self, checkpoint: Path) -> None:
        """Load the optimizer state of a checkpoint. Raises UsageError if it is of other parameters."""


class Strategy(ABC):
    """Defines how the ranks of a run share its work. The methods of this base class need no other rank; subclasses
    override those that do. All ranks call them in the same order, because most contain collectives or votes."""

    ranks_per_sample = 1
    """The number of ranks that share each sequence."""
    all_ranks_save = False
    """Whether a checkpoint can only be written by all ranks together."""
    gathers_in_passes = False
    """Whether every pass through the model takes all ranks, so that all must run equally many."""
    voted_group: VotedGroup | None = None
    """The ranks that vote before each collective of a micro-batch; None if micro-batches have no collectives."""

    def __init__(self, loaded: LoadedModel, loss: LossFunction, ranks: Ranks) -> None:
        self.loaded, self.loss, self.ranks = loaded, loss, ranks
        self.parameters = [parameter for _, parameter in loaded.trainable()]
        """The parameters that the optimizer updates on this rank."""

    def assign_samples(self, lengths: NDArray[np.int32]) -> list[int]:
        """Assign the samples of a step to ranks by `lengths`, their numbers of tokens; returns the positions in
        `lengths` of this rank's samples."""
        return assign_samples(lengths, self.ranks.size)[self.ranks.rank]

    def begin_attempt(self, plan: list[MicroBatch], *, far_from_ceiling: bool) -> list[MicroBatch]:
        """Begin an attempt at a step with `plan`, this rank's micro-batches; returns it with dummy micro-batches added
        where this rank needs them to take part in all collectives of the other ranks. If every rank is
        `far_from_ceiling` (see `engine.train.step.budget_growth`), ranks may vote less often."""
        return plan

    def run_stage(self, stage: Callable[[], None]) -> None:
        """Run one stage of a step (see `engine.train.step.transaction`). If a stage that contains collectives fails on
        one rank, it ends on all ranks: the error is raised where it occurred, and the other ranks return early.

        Raises:
            LostRankError: a rank is gone.
            RepeatWithVotesError: on all ranks, if the attempt must be repeated although no rank failed.
        """
        stage()

    def local_part(self, batch: Batch, *, pad_id: int) -> Batch:
        """The part of a micro-batch that this rank computes: without sequence parallelism, all of it. `pad_id` is the
        token that fills rows up to a length that the ranks can divide."""
        return batch

    def micro_batch(self) -> AbstractContextManager[None]:
        """Context manager around forward and backward of a micro-batch."""
        return nullcontext()

    def most_passes(self, own: int) -> int:
        """The number of passes that this rank runs, of which it needs `own`: where it `gathers_in_passes`, as many as
        the rank that needs most."""
        return own

    def pass_without_gradients(self) -> AbstractContextManager[None]:
        """Context manager around a pass of a step before its micro-batches."""
        return self.micro_batch()

    def end_micro_batches(self) -> None:
        """Called after the last micro-batch of an attempt, before the host waits for the device."""
        return

    def dummy_micro_batch(self) -> AbstractContextManager[None]:
        """Context manager around forward and backward of a dummy micro-batch, which `begin_attempt` added."""
        return nullcontext()

    @abstractmethod
    def prepare_gradients(self, losses: list[float]) -> list[float]:
        """Find out which parameters have a gradient on any rank, and allocate a gradient for those that have none on
        this rank; returns the sum over all ranks of each of `losses`.

        Raises:
            torch.OutOfMemoryError: no room for a gradient; the call may be repeated.
            LostRankError: a rank is gone.
        """

    @abstractmethod
    def sync_gradients(self) -> None:
        """Sum every gradient over all ranks, in place. Allocates no memory. Raises LostRankError."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        torch._foreach_mul_(self._gradients(), factor)

    def clip_gradients(self, max_norm: float) -> float:
        """Gradient clipping: clip to the L2 norm `max_norm` over all parameters, or not at all if that is 0; returns
        the norm before clipping. Waits for the device once. A sharded model raises PeerFailedError if another rank
        failed before."""
        norm = torch.nn.utils.get_total_norm(self._gradients())
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        return float(norm)

    def drop_gradients(self) -> None:
        """Set all gradients on this rank to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def recover(self) -> None:
        """Make the model usable again after a failed attempt at a step: a sharded model frees gathered weights and
        their gradients. Allocates no memory. Raises LostRankError if all ranks must restart."""
        return

    @abstractmethod
    def checkpoint_storage(self, optimizer: torch.optim.Optimizer) -> CheckpointStorage:
        """Create the object that writes and reads weights and the state of `optimizer`. All ranks call this."""

    def forward_only(self) -> AbstractContextManager[None]:
        """Context manager that readies the weights for forward passes without a backward; it does not switch gradients
        off. All ranks enter it."""
        return nullcontext()

    def run_whole(self, compute: Callable[[], None]) -> None:
        """Run `compute`, which calls the model itself on whole sequences, without gradients. Where the strategy
        `gathers_in_passes`, all ranks call this; an error on one ends it on all, as in `run_stage`."""
        compute()

    def join_evaluation(self, context: EvaluationContext, data: Questions, name: str = "") -> EvaluationContext:
        """Return the context with which rank 0 evaluates `data`; other ranks do not use what they get. If ranks share
        an evaluation, rank 0's context requests each pass of all ranks, which wait for it in `Ranks.run_on_rank0`. All
        ranks call this, with another `name` for each data set."""
        return context

    def evaluation_cost(self, cost: Cost) -> Cost:
        """A micro-batch's cost in bytes in evaluation, given `cost`, that in training."""
        return cost

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]
