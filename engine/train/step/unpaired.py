"""Single answers with labels (KTO) within a step: the divergence of policy and reference over the whole step, and what
it and the label make of each answer's log-probability.

The mismatched sequences of a step, prompts with the answers of other samples, are measured before any gradient. Their
sum over all ranks gives one estimate for the step, so that no split into micro-batches changes the loss.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config.schema.preference import Preference
from engine.data.batch import Batch
from engine.data.tokens import TokenData
from engine.distributed.ranks import Ranks
from engine.evaluate.context import Reference
from engine.model.loss import LossFunction, WeightedSequences
from engine.objectives.kto import SUMS, answer_losses, divergence_of, metrics_of
from engine.train.step.objective import SequenceObjective, StepTokens


class UnpairedObjective(SequenceObjective):
    """The objective of answers that are desirable or not."""

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
        self.mismatched, self._mismatched_reference = data.mismatched, mismatched_reference
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

    def measure(self, batch: Batch) -> None:
        """Of mismatched sequences."""
        difference = (self.loss.log_probabilities(batch) - self._mismatched_reference(batch)).sum()
        self._differences = (self._differences or 0.0) + float(difference)

    def nothing_measured(self) -> None:
        """Begin to measure the mismatched sequences of this rank, which may have none."""
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
