"""The strategy "sharded": every rank loads and holds a part of the weights, of their gradients and of the optimizer
state.

Every pass gathers weights on all ranks, so all run the same number of micro-batches, evaluate together and save
together. Rank 0 loads the model in host memory, the others build it from meta tensors; group by group each rank then
reads its own rows from the files and receives the others from rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from engine.batching.micro_batches import DUMMY_MICRO_BATCH, MicroBatch
from engine.device.base import Device
from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.distributed.votes import RepeatWithVotesError
from engine.evaluate.context import EvaluationContext, Questions
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.train.step.interface import Strategy
from engine.train.strategy.checkpoint_storage import CheckpointGatherer
from engine.train.strategy.evaluation import share_evaluation

NORM_EPSILON = 1e-6
"""Added to a norm that gradients are divided by, as in torch's clip_grads_with_norm_."""


class Sharded(Strategy):
    """Every rank holds a part of the weights."""

    all_ranks_save = gathers_in_passes = True

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
        return self.model.votes.micro_batch()

    def most_passes(self, own: int) -> int:
        return max(map(int, self.ranks.all_gather_object(own)))

    def pass_without_gradients(self) -> AbstractContextManager[None]:
        """Its collectives are others than those of a micro-batch, so each is voted on."""
        return self.model.forward_only()

    def end_micro_batches(self) -> None:
        """Vote if ranks vote once for each micro-batch, so that none waits for the device if another is gone. Raises
        PeerFailedError if another rank failed in the last micro-batch."""
        self.model.votes.end_micro_batches()

    def run_stage(self, stage: Callable[[], None]) -> None:
        try:
            self._votes.run_together(stage, self._join_others)
        except RepeatWithVotesError:
            self.model.votes.vote_always()
            raise

    def dummy_micro_batch(self) -> AbstractContextManager[None]:
        """The zero gradients that a dummy leaves do not count: a parameter with no other gradient has none."""
        return self.model.dummy_micro_batch()

    def prepare_gradients(self, losses: list[float]) -> list[float]:
        """Give each local part of a parameter its part of the gradient that backward summed over ranks."""
        totals = self.ranks.sums(losses)
        self.model.sync_gradients()
        return totals

    def sync_gradients(self) -> None:
        return  # gradients were summed over ranks during backward

    def clip_gradients(self, max_norm: float) -> float:
        gradients = self._gradients()
        norm = self.model.global_norm(float(torch.nn.utils.get_total_norm(gradients)))
        if max_norm and norm > max_norm and gradients:
            torch._foreach_mul_(gradients, max_norm / (norm + NORM_EPSILON))
        return norm

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self.model.drop_gradients()

    def recover(self) -> None:
        self.model.recover()

    def checkpoint_storage(self, optimizer: torch.optim.Optimizer) -> CheckpointGatherer:
        return CheckpointGatherer(self.loaded, optimizer, self.ranks, self.model)

    def forward_only(self) -> AbstractContextManager[None]:
        return self.model.forward_only()

    def run_whole(self, compute: Callable[[], None]) -> None:
        def gathered() -> None:
            with self.model.forward_only(gathers_head=True):
                compute()

        self._votes.run_together(gathered)

    def join_evaluation(self, context: EvaluationContext, data: Questions, name: str = "") -> EvaluationContext:
        return share_evaluation(context, data, self.ranks, self.model, name)
