"""Sequence parallelism: a layer on top of any strategy, in which several ranks share each sequence.

Each rank of a group computes an equal run of positions of the group's sequences; around attention they exchange heads
for positions (`engine.model.ulysses_attention`). Weights and gradients are left to the strategy underneath.

Try: `tunedeck train -p demo-2 -r demo --set parallel.sequence=2`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batching.cost import cost_on_one_device
from engine.batching.micro_batches import Cost, MicroBatch
from engine.data.batch import Batch
from engine.data.tokens import TokenData
from engine.distributed.assign_samples import assign_samples
from engine.evaluate.scores import EvaluationContext
from engine.model.ulysses_attention import join_ulysses_attention
from engine.spec.schema.run import RunSpec
from engine.train.strategy.base import Strategy
from engine.train.strategy.checkpoint_storage import CheckpointStorage


class SequenceParallel(Strategy):
    """`inner` with each sequence shared by `parallel.sequence` ranks."""

    def __init__(self, inner: Strategy, spec: RunSpec) -> None:
        """Make the groups of ranks, and see that the model computes the same with them. All ranks call it.

        Raises:
            UsageError: the model computes something else when its sequences are shared.
        """
        super().__init__(inner.loaded, inner.loss, inner.ranks)
        self.inner, self._spec = inner, spec
        with inner.forward_only():
            self._attention = join_ulysses_attention(
                inner.loaded, inner.ranks, spec.profile.parallel.sequence, inner.voted_group
            )
        self.ranks_per_sample, self.all_ranks_save = self._attention.group.size, inner.all_ranks_save
        self.voted_group = self._votes = self._attention.group.voted_group

    def assign_samples(self, lengths: NDArray[np.int32]) -> list[int]:
        """The samples of this rank's group."""
        groups = self.ranks.size // self.ranks_per_sample
        return assign_samples(lengths, groups)[self.ranks.rank // self.ranks_per_sample]

    def run_stage(self, stage: Callable[[], None]) -> None:
        """Attention holds collectives, which the ranks of the group vote on."""
        self._votes.run_together(stage)

    def local_part(self, batch: Batch, *, pad_id: int) -> Batch:
        """This rank's positions of every row."""
        return self._attention.slice_of(batch, pad_id=pad_id)

    def micro_batch(self) -> AbstractContextManager[None]:
        """Attention exchanges heads for positions."""
        return self._attention.installed()

    def evaluation_cost(self, cost: Cost) -> Cost:
        """Evaluation runs whole sequences."""
        return cost_on_one_device(self._spec)

    def pad_plan(self, plan: list[MicroBatch]) -> list[MicroBatch]:
        """The inner strategy's."""
        return self.inner.pad_plan(plan)

    def dummy_micro_batch(self) -> AbstractContextManager[None]:
        """The inner strategy's."""
        return self.inner.dummy_micro_batch()

    def prepare_gradients(self, loss: float) -> float:
        """The inner strategy's."""
        return self.inner.prepare_gradients(loss)

    def sync_gradients(self) -> None:
        """The inner strategy's."""
        self.inner.sync_gradients()

    def clip_gradients(self, max_norm: float) -> float:
        """The inner strategy's."""
        return self.inner.clip_gradients(max_norm)

    def drop_gradients(self) -> None:
        """The inner strategy's."""
        self.inner.drop_gradients()

    def recover(self) -> None:
        """The inner strategy's."""
        self.inner.recover()

    def checkpoint_storage(self, optimizer: torch.optim.Optimizer) -> CheckpointStorage:
        """The inner strategy's."""
        return self.inner.checkpoint_storage(optimizer)

    def forward_only(self) -> AbstractContextManager[None]:
        """The inner strategy's."""
        return self.inner.forward_only()

    def join_evaluation(self, context: EvaluationContext, data: TokenData) -> None:
        """The inner strategy's."""
        self.inner.join_evaluation(context, data)
