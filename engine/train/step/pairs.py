"""Preference pairs within a step: which sequences of a pair share a micro-batch, and what their log-probabilities,
with those of the reference, make of the loss.

A pair whose sequences fit together is computed in one pass: the head runs first without gradients, the objective makes
weights of the log-probabilities, then the weighted loss is computed on the same hidden states. The sequences of a pair
that does not fit are micro-batches of their own, and pass through the model twice: first without gradients for the
log-probabilities of both, then with the weights. So the largest unit of memory is one sequence, not a pair.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batching.micro_batches import Cost, MicroBatch, plan_micro_batches
from engine.config.schema.preference import Preference
from engine.data.batch import Batch
from engine.data.tokens import TokenData
from engine.evaluate.context import Reference
from engine.model.loss import LossFunction, WeightedSequences
from engine.objectives.preference import METRICS, SequenceLoss, sequence_losses
from engine.train.step.objective import SequenceObjective


class PairObjective(SequenceObjective):
    """The objective of pairs of a chosen and a rejected sequence, 2·p and 2·p + 1 in the data."""

    unit = 2
    sums = METRICS

    def __init__(self, asked: Preference, loss: LossFunction, data: TokenData, reference: Reference | None) -> None:
        super().__init__(asked, loss, data, reference)
        self._measured: dict[int, tuple[Tensor, Tensor | None]] = {}
        """By sequence of a split pair: log-probabilities of the policy and the reference, scalars."""
        self._weighed: dict[int, SequenceLoss] = {}
        """The same sequences once both sides are measured; tensors of one sequence each."""

    def end(self) -> None:
        super().end()
        self._measured.clear()
        self._weighed.clear()

    def split(self, plan: list[MicroBatch], samples: NDArray[np.int64]) -> list[MicroBatch]:
        """Those whose sequences were planned without their pair."""
        return [group for group in plan if not _is_whole(tuple(samples[list(group.members)].tolist()))]

    def measure(self, batch: Batch) -> None:
        policy_B = self.loss.log_probabilities(batch)
        reference_B = None if self.reference is None else self.reference(batch)
        for row, sample in enumerate(batch.sample_ids):
            held = None if reference_B is None else reference_B[row]
            self._measured[sample] = (policy_B[row], held)
            if sample ^ 1 in self._measured:
                self._weigh_pair(sample & ~1)

    def prepare(self, batch: Batch) -> None:
        if batch.sample_ids[0] in self._weighed:
            self._reference_B = None
        else:
            super().prepare(batch)

    def weigh(self, batch: Batch, logps_B: Tensor) -> WeightedSequences:
        """Of a micro-batch of whole pairs, or of measured sequences. A sequence whose other side is not there, in a
        probe, weighs 1."""
        if all(sample in self._weighed for sample in batch.sample_ids):
            rows = [self._weighed[sample] for sample in batch.sample_ids]
            found = SequenceLoss(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
        elif _is_whole(batch.sample_ids):
            found = self._sequence_losses(logps_B, self._reference_B, batch.sample_ids)
        else:
            metrics_BM = logps_B.new_zeros(len(logps_B), len(METRICS))
            found = SequenceLoss(torch.zeros_like(logps_B), torch.ones_like(logps_B), metrics_BM)
        return WeightedSequences(found.weights_S, found.losses_S.sum(), found.metrics_SM.sum(0))

    def _weigh_pair(self, chosen: int) -> None:
        sides = [self._measured[chosen], self._measured[chosen + 1]]
        policy_2 = torch.stack([policy for policy, _ in sides])
        held = [reference for _, reference in sides if reference is not None]
        found = self._sequence_losses(policy_2, torch.stack(held) if held else None, (chosen, chosen + 1))
        for place in range(2):
            self._weighed[chosen + place] = SequenceLoss(*(part[place : place + 1] for part in found))

    def _sequence_losses(self, logps_S: Tensor, reference_S: Tensor | None, samples: tuple[int, ...]) -> SequenceLoss:
        tokens_S = torch.from_numpy(self.data.target_counts[list(samples)].astype(np.float64)).to(logps_S.device)
        return sequence_losses(logps_S, reference_S, tokens_S, self.asked, self._sft_scale)


def plan_pairs(
    lengths: NDArray[np.int32],
    cost: Cost,
    budget_bytes: int,
    floor_tokens: int,
    patches: NDArray[np.int64] | None,
    launch_tokens: int,
) -> list[MicroBatch]:
    """As `plan_micro_batches`, for sequences of which 2·p and 2·p + 1 are a pair: pairs stay together where two
    sequences of their length fit the budget; the others' sequences are planned one by one."""
    longest_P = np.maximum(lengths[0::2], lengths[1::2])
    patches_P = None if patches is None else patches[0::2] + patches[1::2]

    def cost_of_pairs(rows: int, length: int, patches: int | None = None, /) -> int:
        return cost(2 * rows, length, patches)

    alone_P = [cost_of_pairs(1, int(longest), None) for longest in longest_P]
    whole, split = (
        np.array([p for p, bytes_ in enumerate(alone_P) if (bytes_ <= budget_bytes) is fits], np.int64)
        for fits in (True, False)
    )
    groups: list[MicroBatch] = []
    if len(whole):
        planned = plan_micro_batches(
            longest_P[whole], cost_of_pairs, budget_bytes, floor_tokens // 2,
            None if patches_P is None else patches_P[whole], launch_tokens // 2,
        )  # fmt: skip
        groups += [
            _placed(group, [2 * p + side for p in whole[list(group.members)] for side in (0, 1)]) for group in planned
        ]
    if len(split):
        sides = np.concatenate([2 * split, 2 * split + 1])
        planned = plan_micro_batches(
            lengths[sides], cost, budget_bytes, floor_tokens, None if patches is None else patches[sides], launch_tokens
        )
        groups += [_placed(group, sides[list(group.members)].tolist()) for group in planned]
    return sorted(groups, key=lambda group: -group.cost_bytes)


def _placed(group: MicroBatch, members: list[int]) -> MicroBatch:
    return MicroBatch(tuple(int(member) for member in members), group.length, group.cost_bytes)


def _is_whole(samples: tuple[int, ...]) -> bool:
    """Whether chosen and rejected sequences of pairs stand side by side."""
    ids = np.asarray(samples)
    return len(ids) % 2 == 0 and bool((ids[0::2] % 2 == 0).all()) and bool((ids[1::2] == ids[0::2] + 1).all())
