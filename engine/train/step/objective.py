"""What a step asks of an objective of whole sequences: which of them are measured before they are trained on, and how
much each log-probability weighs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batching.micro_batches import MicroBatch
from engine.config.schema.preference import Preference
from engine.data.batch import Batch
from engine.data.tokens import TokenData
from engine.distributed.ranks import Ranks
from engine.evaluate.context import Reference
from engine.model.loss import LossFunction, WeightedSequences


class StepTokens(NamedTuple):
    """Counts of a whole step, on all ranks; each is at least 1."""

    targets: int
    """What the loss is a mean over: target tokens, or in preference learning pairs or single answers."""
    real: int
    """Tokens without padding."""
    chosen: int = 1
    """In preference learning, target tokens of chosen or desirable answers."""


class SequenceObjective(ABC):
    """The objective of a run whose loss is of whole sequences. Weighs the sequences of a step for `LossFunction`."""

    unit = 1
    """Sequences of a sample, which stand side by side in the data and go to the same rank."""
    sums: Sequence[str]
    """Names of the metrics that are summed over sequences."""

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

    def split(self, plan: list[MicroBatch], samples: NDArray[np.int64]) -> list[MicroBatch]:
        """The micro-batches that are measured before any is trained on."""
        return []

    @abstractmethod
    def measure(self, batch: Batch) -> None:
        """The pass without gradients over sequences that are measured first."""

    def prepare(self, batch: Batch) -> None:
        """Compute what `weigh` needs of the reference, before the activations of the policy take memory."""
        self._reference_B = None if self.reference is None else self.reference(batch)

    @abstractmethod
    def weigh(self, batch: Batch, logps_B: Tensor) -> WeightedSequences:
        """For `LossFunction`: the weights of a micro-batch, its loss, and the sums over it."""

    def metrics(self, means: list[float], samples: NDArray[np.int64]) -> dict[str, float]:
        """Of a step event, from `sums` of all ranks divided by `StepTokens.targets`; `samples` are all of the step."""
        return dict(zip(self.sums, means, strict=True))
