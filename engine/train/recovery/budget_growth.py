"""Larger micro-batches and fewer remedies when memory is available again; smaller ones when the allocator thrashes,
that is, keeps emptying its cache to serve requests.

Called after each step, when the step's tensors are freed. How far a budget may grow is decided in
`engine.batching.budget`.

Try: `pytest tests/train/recovery/test_budget_growth.py`
"""

from __future__ import annotations

from functools import partial

from engine.batching.budget import MicroBatchBudget
from engine.device.catch_oom import catch_oom
from engine.train.monitor.journal import Journal
from engine.train.recovery.memory_settings import apply_settings, current_settings
from engine.train.recovery.records import ActiveRemedy
from engine.train.step.context import StepContext


class BudgetGrowth:
    """After each step, adapts the micro-batch budget to the available memory, and lifts remedies."""

    def __init__(self, context: StepContext, journal: Journal) -> None:
        self.context, self.journal = context, journal
        self._retries = context.device.memory().alloc_retries

    def after_step(self, step: int, *, clean: bool) -> None:
        """Adapt the budget after a finished step; `clean` if no allocation failed in the step and its update was
        applied. All ranks call this."""
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
        """Lower the budget and write a warning, if the allocator emptied its cache in several steps in a row; returns
        whether that was done. `retries`: how often it emptied its cache in this step."""
        budget = self.context.budget
        before = budget.budget_bytes
        if not budget.record_thrashing(retries):
            return False
        self.journal.warn(
            "thrashing",
            "the allocator had to give its cached memory back in several steps in a row, which is slow: micro-batches "
            f"get smaller (budget {before / 2**20:.0f} -> {budget.budget_bytes / 2**20:.0f} MiB)",
            'device.allocator = "expandable_segments:True" in the profile often helps',
        )
        return True

    def _may_lift(self, remedy: ActiveRemedy, room_bytes: int) -> bool:
        """Whether `remedy` may be lifted: its cause was temporary, and `room_bytes`, which are available now, suffice
        for the cost that failed, as the budget's measurements from before the remedy predict."""
        if not remedy.passing:
            return False
        now = self.context.budget
        waited = {"clean_steps": now.clean_steps, "patience_steps": now.patience_steps}
        budget_then = MicroBatchBudget.from_json({**remedy.learned, **waited})
        return budget_then.room_is_back(room_bytes - remedy.moved_bytes, remedy.failed_bytes, remedy.room_bytes)

    def _lift(self, step: int, remedy: ActiveRemedy) -> None:
        """Undo the remedy on all ranks, and record that in the journal. If optimizer state does not fit back on the
        device of some rank, the remedy stays on everywhere and is tried again later."""
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
            reason="the memory that was short is free again",
        )
