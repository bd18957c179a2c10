"""The learning rate as a pure function of the step, so a checkpoint need not save it.

Step s (from 1) uses the factor of s - 1 finished steps, as transformers' schedulers do: with warm-up the first step has
rate 0, and runs of both can be compared step for step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.spec.check.notes import warmup_steps_of
from engine.spec.schema.recipe import Train


@dataclass(frozen=True)
class Schedule:
    """The learning rate at each of `total_steps` steps, as a share (0 to 1) of the peak rate."""

    kind: str
    total_steps: int
    warmup_steps: int
    floor_ratio: float
    cycles: int

    @classmethod
    def of(cls, train: Train, total_steps: int) -> Schedule:
        """The schedule of a recipe; a warm-up longer than the run is shortened."""
        warmup = warmup_steps_of(train, total_steps)
        return cls(train.scheduler, total_steps, warmup, train.min_learning_rate / train.learning_rate, train.restarts)

    def factor(self, step: int) -> float:
        """Share of the peak rate at optimizer step `step` (from 1), in [0, 1]."""
        done = step - 1
        if done < self.warmup_steps:
            return done / max(1, self.warmup_steps)
        if self.kind == "constant":
            return 1.0
        progress = min(1.0, (done - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.floor_ratio + (1.0 - self.floor_ratio) * self._decay(progress)

    def _decay(self, progress: float) -> float:
        """The factor at the share `progress` (0 to 1) of the steps after warm-up: from 1 down to 0, before the recipe's
        minimum rate is applied."""
        if self.kind == "linear":
            return 1.0 - progress
        if self.kind == "cosine_with_restarts":
            return 0.0 if progress >= 1.0 else 0.5 * (1.0 + math.cos(math.pi * ((self.cycles * progress) % 1.0)))
        return 0.5 * (1.0 + math.cos(math.pi * progress))
