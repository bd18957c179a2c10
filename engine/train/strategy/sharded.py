"""The strategy "sharded": every rank holds a part of the weights, of their gradients and of the optimizer state.

Every pass gathers weights on all ranks, so all of them run as many micro-batches, evaluate together and save together.
How a model is loaded in this way is in `engine.train.strategy.load_sharded`, how torch shards it in
`engine.distributed.sharded`.

Try: `tunedeck train -p demo-2 -r demo --set parallel.strategy=sharded`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from engine.batching.micro_batches import DUMMY_MICRO_BATCH, MicroBatch
from engine.data.tokens import TokenData
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.distributed.voted_group import VotedGroup
from engine.evaluate.scores import EvaluationContext
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.train.strategy.base import Strategy
from engine.train.strategy.checkpoint_gatherer import CheckpointGatherer
from engine.train.strategy.checkpoint_storage import CheckpointStorage
from engine.train.strategy.collective_evaluation import CollectiveEvaluation

NORM_EPSILON = 1e-6
"""Added to a norm that gradients are divided by, as in torch's clip_grads_with_norm_."""


class Sharded(Strategy):
    """Ranks that each hold a part of the weights."""

    all_ranks_save = True

    def __init__(
        self, loaded: LoadedModel, loss: LossFunction, ranks: Ranks, model: ShardedModel, votes: VotedGroup
    ) -> None:
        super().__init__(loaded, loss, ranks)
        self.model = model
        self.voted_group = self._votes = votes

    def pad_plan(self, plan: list[MicroBatch]) -> list[MicroBatch]:
        """As many micro-batches as the rank with most of them has."""
        return plan + [DUMMY_MICRO_BATCH] * (max(self.ranks.all_gather_object(len(plan))) - len(plan))

    def run_stage(self, stage: Callable[[], None]) -> None:
        """Each gathering of weights is voted on."""
        self._votes.run_together(stage)

    def dummy_micro_batch(self) -> AbstractContextManager[None]:
        """Its gradients, all zero, do not count as present."""
        return self.model.dummy_micro_batch()

    def prepare_gradients(self, loss: float) -> float:
        """Gradients were summed during backward; this gives each part that has one on any rank its own."""
        total: float = sum(self.ranks.all_gather_object(loss))
        self.model.sync_gradients()
        return total

    def sync_gradients(self) -> None:
        """They were summed during backward."""
        return

    def clip_gradients(self, max_norm: float) -> float:
        """Clip to the norm over all parts on all ranks."""
        gradients = self._gradients()
        norm = self.model.global_norm(float(torch.nn.utils.get_total_norm(gradients)))
        if max_norm and norm > max_norm and gradients:
            torch._foreach_mul_(gradients, max_norm / (norm + NORM_EPSILON))
        return norm

    def drop_gradients(self) -> None:
        """Forget the gradients of local parts, and of the full parameters they belong to."""
        super().drop_gradients()
        self.model.drop_gradients()

    def recover(self) -> None:
        """Free what the failed attempt had gathered or left in flight."""
        self.model.recover()

    def checkpoint_storage(self, optimizer: torch.optim.Optimizer) -> CheckpointStorage:
        """Weights are gathered on rank 0; every rank writes its part of the optimizer state."""
        return CheckpointGatherer(self.loaded, optimizer, self.ranks, self.model)

    def forward_only(self) -> AbstractContextManager[None]:
        """Weights are dropped after their use."""
        return self.model.forward_only()

    def join_evaluation(self, context: EvaluationContext, data: TokenData) -> None:
        """Every rank runs the passes that rank 0 asks for."""
        CollectiveEvaluation(context, data, self.ranks, self.model)
