"""Objectives of whole sequences within a step: preference pairs, and single answers with labels (KTO). They decide what
is measured before it is trained on, and what log-probabilities, with those of the reference, make of the loss.

A pair whose sequences fit together is computed in one pass: the head runs first without gradients, the objective makes
weights of the log-probabilities, then the weighted loss is computed on the same hidden states. The sequences of a pair
that does not fit are micro-batches of their own, and pass through the model twice: first without gradients for the
log-probabilities of both, then with the weights. So the largest unit of memory is one sequence, not a pair.

The divergence of KTO is one estimate for the step: its mismatched sequences, prompts with the answers of other samples,
are measured before any gradient and summed over all ranks. So no split into micro-batches changes the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batching.micro_batches import MicroBatch, plan_micro_batches
from engine.model.loss_values import WeightedSequences
from engine.objectives.kto import SUMS, answer_losses, divergence_of, metrics_of
from engine.objectives.preference import METRICS, SequenceLoss, sequence_losses

if TYPE_CHECKING:
    from engine.batching.micro_batches import Cost
    from engine.config.schema.preference import Preference
    from engine.data.batch import Batch
    from engine.data.tokens import TokenData
    from engine.distributed.ranks import Ranks
    from engine.model.loss import LossFunction
    from engine.objectives.reference import Reference


class StepTokens(NamedTuple):
    """Counts of a whole step, on all ranks; each is at least 1."""

    targets: int
    """What the loss is a mean over: target tokens, or in preference learning pairs or single answers."""
    real: int
    """Tokens without padding."""
    chosen: int = 1
    """In preference learning, target tokens of chosen or desirable answers."""


class Measure(Protocol):
    """A pass without gradients over sequences that are measured first. A dummy joins those of other ranks, and what it
    finds is dropped."""

    def __call__(self, batch: Batch, *, is_dummy: bool) -> None: ...


class MeasuredReference:
    """A reference that takes a pass of all ranks: it is computed for all sequences of a step before the micro-batches,
    so that these are alike on all ranks."""

    def __init__(self, compute: Reference) -> None:
        self._compute = compute
        self._known: dict[int, Tensor] = {}

    def measure(self, batch: Batch, *, is_dummy: bool) -> None:
        values_B = self._compute(batch)
        self._known.update({} if is_dummy else zip(batch.sample_ids, values_B, strict=True))

    def __call__(self, batch: Batch) -> Tensor:
        return torch.stack([self._known[sample] for sample in batch.sample_ids])

    def forget(self) -> None:
        self._known.clear()


class SequenceObjective(ABC):
    """The objective of a run whose loss is of whole sequences. Weighs the sequences of a step for `LossFunction`."""

    unit = 1
    """Sequences of a sample, which stand side by side in the data and go to the same rank."""
    sums: Sequence[str]
    """Names of the metrics that are summed over sequences."""
    measured_first: TokenData | None = None
    """Sequences, one for each of the data, that a step measures before any gradient; None if it needs none."""

    def __init__(self, asked: Preference, loss: LossFunction, data: TokenData, reference: Reference | None) -> None:
        self.asked, self.loss, self.data, self.reference = asked, loss, data, reference
        self._sft_scale = 0.0
        self._reference_B: Tensor | None = None
        loss.weigh = self.weigh

    def begin(self, tokens: StepTokens, ranks: Ranks) -> None:
        """Begin the passes with gradients of an attempt at a step. All ranks call this."""
        self._sft_scale = self.asked.sft_weight * tokens.targets / tokens.chosen

    def end(self) -> None:
        """Forget the sequences of the attempt, also one that failed."""
        self._reference_B = None
        if isinstance(self.reference, MeasuredReference):
            self.reference.forget()

    def begin_measuring(self) -> None:
        """Before this rank measures its sequences of `measured_first`, of which it may have none."""
        raise NotImplementedError(f"{type(self).__name__} has no measurement before training")

    def split(self, plan: list[MicroBatch], samples: NDArray[np.int64]) -> list[MicroBatch]:
        """The micro-batches that are measured before any is trained on."""
        return []

    @abstractmethod
    def measure(self, batch: Batch, *, is_dummy: bool) -> None:
        """See `Measure`."""

    def prepare(self, batch: Batch) -> None:
        """Compute what `weigh` needs of the reference, before the activations of the policy take memory."""
        self._reference_B = None if self.reference is None else self.reference(batch)

    @abstractmethod
    def weigh(self, batch: Batch, logps_B: Tensor) -> WeightedSequences:
        """For `LossFunction`: the weights of a micro-batch, its loss, and the sums over it."""

    def metrics(self, means: list[float], samples: NDArray[np.int64]) -> dict[str, float]:
        """Of a step event, from `sums` of all ranks divided by `StepTokens.targets`; `samples` are all of the step."""
        return dict(zip(self.sums, means, strict=True))


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

    def measure(self, batch: Batch, *, is_dummy: bool) -> None:
        policy_B = self.loss.log_probabilities(batch)
        if is_dummy:
            return
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


class UnpairedObjective(SequenceObjective):
    """The objective of single answers that are desirable or not (KTO)."""

    sums = SUMS

    def __init__(
        self,
        asked: Preference,
        loss: LossFunction,
        data: TokenData,
        reference: Reference,
        mismatched_reference: Reference,
    ) -> None:
        super().__init__(asked, loss, data, reference)
        assert data.mismatched is not None
        self.measured_first, self._mismatched_reference = data.mismatched, mismatched_reference
        self._differences: float | None = None
        """Of this rank's mismatched sequences; None where none were measured, in a probe."""
        self.divergence = 0.0
        """Of the step."""

    def begin(self, tokens: StepTokens, ranks: Ranks) -> None:
        super().begin(tokens, ranks)
        total = 0.0
        if self._differences is not None:
            total = float(sum(ranks.all_gather_object(self._differences)))
        self.divergence = divergence_of(total, tokens.targets)

    def end(self) -> None:
        super().end()
        self._differences = None

    def measure(self, batch: Batch, *, is_dummy: bool) -> None:
        """Of mismatched sequences."""
        difference = (self.loss.log_probabilities(batch) - self._mismatched_reference(batch)).sum()
        if is_dummy:
            return
        # Each rank that shares a sequence knows its whole log-probability.
        self._differences = (self._differences or 0.0) + float(difference) / self.loss.ranks_per_row

    def begin_measuring(self) -> None:
        self._differences = 0.0

    def weigh(self, batch: Batch, logps_B: Tensor) -> WeightedSequences:
        assert self._reference_B is not None
        desirable_B = torch.from_numpy(self.data.desirable[list(batch.sample_ids)]).to(logps_B.device)
        found = answer_losses(logps_B, self._reference_B, desirable_B, self.divergence, self.asked, self._sft_scale)
        return WeightedSequences(found.weights_S, found.losses_S.sum(), found.metrics_SM.sum(0))

    def metrics(self, means: list[float], samples: NDArray[np.int64]) -> dict[str, float]:
        desirable = int(self.data.desirable[samples].sum())
        sums = [mean * len(samples) for mean in means]
        return metrics_of(sums, desirable, len(samples) - desirable, self.divergence)


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
