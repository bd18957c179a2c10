"""Says when a step is far from running out of memory, so that sharded ranks may vote once per micro-batch.

With one vote per micro-batch, a rank that runs out of memory in one lets the other ranks finish it before they learn of
it. That is exact anywhere, but it costs time, so it is done where no failure is expected.

Try: `pytest tests/train/recovery/test_ceiling_watch.py`
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import MicroBatch
from engine.train.step.context import StepContext

CLEAN_STEPS = 10
"""Steps of this process without failure, and without a change of remedies, before any step counts as far from the
ceiling."""
FAR_SHARE = 0.9
"""A micro-batch is far from the ceiling if it is predicted to fill at most this share of it."""


class CeilingWatch:
    """Counts steps without failure, and compares the plans of steps with the learned ceiling."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._clean_steps = self._remedies = 0

    def record_step(self) -> None:
        """Record that a step succeeded."""
        self._clean_steps += 1

    def record_failure(self) -> None:
        """Record that an attempt at a step failed."""
        self._clean_steps = 0

    def is_far(self, plan: Sequence[MicroBatch]) -> bool:
        """Whether no micro-batch of `plan`, as far as this rank knows, comes near the learned ceiling."""
        context = self._context
        before, self._remedies = self._remedies, len(context.active_remedies)
        if before != self._remedies:
            self._clean_steps = 0
        if self._clean_steps < CLEAN_STEPS:
            return False
        room_bytes = context.device.available_bytes - context.static_bytes
        return is_far(context.budget, max((group.cost_bytes for group in plan), default=0), room_bytes)


def is_far(budget: MicroBatchBudget, cost_bytes: int, room_bytes: int) -> bool:
    """Whether a micro-batch of `cost_bytes` predicted bytes is far from running out of memory: it is measured to fill
    at most FAR_SHARE of `room_bytes`, the real bytes available above the static level, and costs at most that share of
    any cost that failed. Never where nothing was measured."""
    failed = [each for each in (budget.ceiling_bytes, budget.passing_bytes) if each is not None]
    measured = budget.slope > 0.0 and cost_bytes * budget.slope <= FAR_SHARE * room_bytes
    return measured and all(cost_bytes <= FAR_SHARE * each for each in failed)
