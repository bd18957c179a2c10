"""After each step: larger micro-batches and fewer remedies when memory is available again, smaller ones when the
allocator thrashes; and whether the next step is far from the learned ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from engine.batching.budget import MicroBatchBudget
from engine.device.oom import catch_oom
from engine.train.step.ladder import apply_settings, current_settings

if TYPE_CHECKING:
    from engine.batching.micro_batches import MicroBatch
    from engine.journal.events import Journal
    from engine.train.step.context import StepContext
    from engine.train.step.failures import ActiveRemedy

CLEAN_STEPS = 10
"""Steps without failure or change of remedies before any step counts as far from the ceiling."""
FAR_SHARE = 0.9
"""A micro-batch is far from the ceiling if it is predicted to fill at most this share of it."""


class CeilingWatch:
    """Counts steps without failure, and compares the plans of steps with the learned ceiling. With one vote per
    micro-batch, a rank that runs out of memory lets the others finish it before they learn of it: always exact, but it
    costs time, so it is done where no failure is expected."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._clean_steps = self._remedies = 0

    def record_step(self) -> None:
        self._clean_steps += 1

    def record_failure(self) -> None:
        self._clean_steps = 0

    def is_far(self, plan: Sequence[MicroBatch]) -> bool:
        context = self._context
        before, self._remedies = self._remedies, len(context.active_remedies)
        if before != self._remedies:
            self._clean_steps = 0
        if self._clean_steps < CLEAN_STEPS:
            return False
        room_bytes = context.device.available_bytes - context.static_bytes
        return is_far(context.budget, max((group.cost_bytes for group in plan), default=0), room_bytes)


def is_far(budget: MicroBatchBudget, cost_bytes: int, room_bytes: int) -> bool:
    """Whether a micro-batch is far from running out of memory: measured to fill at most FAR_SHARE of `room_bytes` above
    the static level, and at most that share of any cost that failed. Never where nothing was measured."""
    failed = [each for each in (budget.ceiling_bytes, budget.passing_bytes) if each is not None]
    measured = budget.slope > 0.0 and cost_bytes * budget.slope <= FAR_SHARE * room_bytes
    return measured and all(cost_bytes <= FAR_SHARE * each for each in failed)


class BudgetGrowth:
    def __init__(self, context: StepContext, journal: Journal) -> None:
        self.context, self.journal = context, journal
        self._retries = context.device.memory().alloc_retries

    def after_step(self, step: int, *, clean: bool) -> None:
        """Adapt the budget; `clean`: no allocation failed and the update was applied. All ranks call this."""
        context = self.context
        # A failed allocation empties the cache, too, so the retries that it adds are no sign of thrashing.
        before, self._retries = self._retries, context.device.memory().alloc_retries
        room_here = context.device.available_bytes - context.static_bytes
        received = context.ranks.all_gather_object([self._retries - before, room_here])
        if not clean:
            return
        if self._slowed_down(max(retries for retries, _ in received)):
            return
        room_bytes = min(room for _, room in received)
        context.budget.record_clean_step(room_bytes, context.may_grow)
        if context.may_grow and context.active_remedies and self._may_lift(context.active_remedies[-1], room_bytes):
            self._lift(step, context.active_remedies.pop())

    def _slowed_down(self, retries: int) -> bool:
        """Lower the budget, with a warning, if the allocator emptied its cache in several steps in a row."""
        budget = self.context.budget
        before = budget.budget_bytes
        if not budget.record_thrashing(retries):
            return False
        self.journal.warn(
            "thrashing",
            "the allocator had to release its cached memory in several consecutive steps, which is slow: "
            f"micro-batches get smaller (budget {before / 2**20:.0f} -> {budget.budget_bytes / 2**20:.0f} "
            "MiB)",
            'device.allocator = "expandable_segments:True" in the profile often helps',
        )
        return True

    def _may_lift(self, remedy: ActiveRemedy, room_bytes: int) -> bool:
        """Whether the remedy's cause was temporary, and `room_bytes` suffice for the cost that failed."""
        if not remedy.passing:
            return False
        now = self.context.budget
        waited = {"clean_steps": now.clean_steps, "patience_steps": now.patience_steps}
        budget_then = MicroBatchBudget.from_json({**remedy.learned, **waited})
        return budget_then.room_is_back(room_bytes - remedy.moved_bytes, remedy.failed_bytes, remedy.room_bytes)

    def _lift(self, step: int, remedy: ActiveRemedy) -> None:
        """Undo the remedy on all ranks; if optimizer state does not fit back somewhere, it stays and is tried again
        later."""
        context = self.context
        settings = current_settings(context)
        lifted = settings.with_value(remedy.name, remedy.before)
        failure = catch_oom(partial(apply_settings, context, lifted), context.device, "lift")
        if any(context.ranks.all_gather_object(failure is not None)):
            apply_settings(context, settings)
            context.budget.wait_longer()
            context.active_remedies.append(remedy)
        else:
            context.budget.recall(remedy.learned)
            self._record(step, remedy)
        context.device.release_cached()
        context.static_bytes = context.device.memory().allocated_bytes

    def _record(self, step: int, remedy: ActiveRemedy) -> None:
        self.journal.write(
            "remedy_lifted",
            step=step,
            remedy=remedy.name,
            before=remedy.after,
            after=remedy.before,
            reason="memory is available again",
        )
