"""Sequence parallelism: a layer on top of any strategy, in which several ranks share each sequence.

Each rank of a group computes an equally long range of positions of the group's sequences. Around attention, the ranks
exchange heads for positions (`engine.model.ulysses_attention`). The wrapped strategy handles weights and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batching.micro_batches import Cost, MicroBatch
from engine.batching.predicted_cost import cost_on_one_device
from engine.config.schema.run import RunSpec
from engine.data.batch import Batch
from engine.distributed.ranks import assign_samples
from engine.evaluate.context import EvaluationContext, Questions
from engine.model.ulysses_attention import join_ulysses_attention
from engine.train.step.interface import CheckpointStorage, Strategy


class SequenceParallel(Strategy):
    """Wraps the strategy `inner` so that `parallel.sequence` ranks share each sequence."""

    def __init__(self, inner: Strategy, spec: RunSpec) -> None:
        """Make the groups of ranks, and check that sharing sequences does not change the model's result. All ranks call
        this.

        Raises:
            UsageError: the model's result changes when sequences are shared.
        """
        super().__init__(inner.loaded, inner.loss, inner.ranks)
        self.inner, self._spec = inner, spec
        with inner.forward_only():
            self._attention = join_ulysses_attention(
                inner.loaded, inner.ranks, spec.profile.parallel.sequence, inner.voted_group
            )
        self.gathers_in_passes = inner.gathers_in_passes
        self.ranks_per_sample, self.all_ranks_save = self._attention.group.size, inner.all_ranks_save
        self.voted_group = self._votes = self._attention.group.voted_group

    def assign_samples(self, lengths: NDArray[np.int32]) -> list[int]:
        groups = self.ranks.size // self.ranks_per_sample
        return assign_samples(lengths, groups)[self.ranks.rank // self.ranks_per_sample]

    def run_stage(self, stage: Callable[[], None]) -> None:
        # A failure on one rank ends the stage on all ranks that take part in the next exchange in attention.
        self._votes.run_together(stage)

    def local_part(self, batch: Batch, *, pad_id: int) -> Batch:
        return self._attention.slice_of(batch, pad_id=pad_id)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        group = self._attention.group
        with self._attention.installed(), self.loss.on_slices(group.size, group.sum_):
            yield

    def most_passes(self, own: int) -> int:
        return self.inner.most_passes(own)

    @contextmanager
    def pass_without_gradients(self) -> Iterator[None]:
        with self.micro_batch(), self.inner.pass_without_gradients():
            yield

    def evaluation_cost(self, cost: Cost) -> Cost:
        return cost_on_one_device(self._spec)  # in evaluation, ranks do not share sequences

    def begin_attempt(self, plan: list[MicroBatch], *, far_from_ceiling: bool) -> list[MicroBatch]:
        # Every collective is voted on: the sizes of those in attention differ from one micro-batch to the next.
        return self.inner.begin_attempt(plan, far_from_ceiling=False)

    def dummy_micro_batch(self) -> AbstractContextManager[None]:
        return self.inner.dummy_micro_batch()

    def prepare_gradients(self, losses: list[float]) -> list[float]:
        return self.inner.prepare_gradients(losses)

    def sync_gradients(self) -> None:
        self.inner.sync_gradients()

    def clip_gradients(self, max_norm: float) -> float:
        return self.inner.clip_gradients(max_norm)

    def drop_gradients(self) -> None:
        self.inner.drop_gradients()

    def recover(self) -> None:
        self.inner.recover()

    def checkpoint_storage(self, optimizer: torch.optim.Optimizer) -> CheckpointStorage:
        return self.inner.checkpoint_storage(optimizer)

    def forward_only(self) -> AbstractContextManager[None]:
        return self.inner.forward_only()

    def run_whole(self, compute: Callable[[], None]) -> None:
        self.inner.run_whole(compute)

    def join_evaluation(self, context: EvaluationContext, data: Questions, name: str = "") -> EvaluationContext:
        return self.inner.join_evaluation(context, data, name)
