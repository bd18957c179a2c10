"""The strategy "sharded": every rank holds a part of the weights, of their gradients and of the optimizer state.

Every pass gathers weights on all ranks, so all ranks run the same number of micro-batches, evaluate together and save
together. `engine.train.strategy.load_sharded` loads a model in parts, `engine.distributed.sharded` shards it with
torch.

Try: `tunedeck train -p demo-2 -r demo --set parallel.strategy=sharded`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from engine.batching.micro_batches import DUMMY_MICRO_BATCH, MicroBatch
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.distributed.voted_group import RepeatWithVotesError
from engine.evaluate.context import EvaluationContext
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.train.strategy.base import Strategy
from engine.train.strategy.checkpoint_gatherer import CheckpointGatherer
from engine.train.strategy.checkpoint_storage import CheckpointStorage
from engine.train.strategy.collective_evaluation import join_evaluation

NORM_EPSILON = 1e-6
"""Added to a norm that gradients are divided by, as in torch's clip_grads_with_norm_."""


class Sharded(Strategy):
    """The strategy in which every rank holds a part of the weights."""

    all_ranks_save = True

    def __init__(
        self,
        loaded: LoadedModel,
        loss: LossFunction,
        ranks: Ranks,
        model: ShardedModel,
        device: Device,
        report_retry: Callable[[OutOfMemory, str, int], None],
    ) -> None:
        super().__init__(loaded, loss, ranks)
        self.model = model
        self.voted_group = self._votes = model.voted_group
        self._join_others = partial(model.join_others, device, report_retry)

    def begin_attempt(self, plan: list[MicroBatch], *, far_from_ceiling: bool) -> list[MicroBatch]:
        """Append dummy micro-batches until this rank has as many micro-batches as the rank with most. The ranks vote
        once for each micro-batch if all are far from the ceiling and know the same order of collectives, else before
        each collective."""
        order = self.model.votes.checksum if far_from_ceiling and self.model.recovers else None
        received = self.ranks.all_gather_object([len(plan), order])
        self.model.votes.begin_attempt(once=order is not None and all(each == order for _, each in received))
        return plan + [DUMMY_MICRO_BATCH] * (max(count for count, _ in received) - len(plan))

    def micro_batch(self) -> AbstractContextManager[None]:
        """Context manager around forward and backward of a micro-batch, which may begin with a vote."""
        return self.model.votes.micro_batch()

    def end_micro_batches(self) -> None:
        """Vote, if the ranks vote once for each micro-batch, so that no rank waits for the device if another is gone.
        Raises PeerFailedError if another rank failed in the last micro-batch."""
        self.model.votes.end_micro_batches()

    def run_stage(self, stage: Callable[[], None]) -> None:
        """Run one stage of a step. Ranks vote before each collective on weights and gradients, or before each
        micro-batch, so that a failure on one rank ends the stage on all: the exception is raised on that rank alone,
        and the others return early."""
        try:
            self._votes.run_together(stage, self._join_others)
        except RepeatWithVotesError:
            self.model.votes.vote_always()
            raise

    def dummy_micro_batch(self) -> AbstractContextManager[None]:
        """Context manager for a dummy micro-batch. The zero gradients that it leaves do not count: a parameter that has
        no other gradient is treated as one without a gradient."""
        return self.model.dummy_micro_batch()

    def prepare_gradients(self, losses: list[float]) -> list[float]:
        """Set the gradient of each local part of a parameter to its part of the gradient that backward summed over
        ranks; returns the sum over all ranks of each of `losses`."""
        totals = self.ranks.sums(losses)
        self.model.sync_gradients()
        return totals

    def sync_gradients(self) -> None:
        """Do nothing: gradients were summed over ranks during backward."""
        return

    def clip_gradients(self, max_norm: float) -> float:
        """Clip gradients by their norm over all parts on all ranks; returns the norm before clipping. Raises
        PeerFailedError if another rank failed before."""
        gradients = self._gradients()
        norm = self.model.global_norm(float(torch.nn.utils.get_total_norm(gradients)))
        if max_norm and norm > max_norm and gradients:
            torch._foreach_mul_(gradients, max_norm / (norm + NORM_EPSILON))
        return norm

    def drop_gradients(self) -> None:
        """Discard the gradients of local parts of parameters, and those of the full parameters."""
        super().drop_gradients()
        self.model.drop_gradients()

    def recover(self) -> None:
        """Free the weights and gradients that a failed attempt gathered or computed, also those of unfinished
        collectives."""
        self.model.recover()

    def checkpoint_storage(self, optimizer: torch.optim.Optimizer) -> CheckpointStorage:
        """Create a storage that has every rank write a part of the weights and of the optimizer state."""
        return CheckpointGatherer(self.loaded, optimizer, self.ranks, self.model)

    def forward_only(self) -> AbstractContextManager[None]:
        """Context manager for forward passes without a backward: gathered weights are freed after use."""
        return self.model.forward_only()

    def join_evaluation(self, context: EvaluationContext, data: TokenData) -> EvaluationContext:
        """Register all ranks to run the forward passes that rank 0 requests in later evaluations of `data`; returns a
        context that makes these requests."""
        return join_evaluation(context, data, self.ranks, self.model)
