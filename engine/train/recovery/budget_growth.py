"""What a run makes of memory that is there again: a larger budget, remedies lifted; or of an allocator that thrashes.

Called after each step, when nothing of it is alive any more. How much is safe is `engine.batching.budget`'s knowledge.

Try: `pytest tests/train/test_growth.py`
"""

from __future__ import annotations

from engine.batching.budget import MicroBatchBudget
from engine.device.catch_oom import catch_oom
from engine.train.monitor.journal import Journal
from engine.train.recovery.ladder import LIFTS, Standing
from engine.train.step.context import Parts


class Growth:
    """Looks at the room after each step."""

    def __init__(self, parts: Parts, journal: Journal) -> None:
        self.parts, self.journal = parts, journal
        self._retries = parts.device.memory().alloc_retries

    def after_step(self, step: int, *, clean: bool) -> None:
        """Take note of a finished step; `clean` when no allocation failed in it and it was applied."""
        parts = self.parts
        # A failure empties the cache as well, so what it adds to the count is no sign of thrashing.
        before, self._retries = self._retries, parts.device.memory().alloc_retries
        told = parts.ranks.tell([self._retries - before, parts.device.available_bytes - parts.static_bytes])
        if not clean:
            return
        if self._slowed_down(max(retries for retries, _ in told)):
            return
        room_bytes = min(room for _, room in told)
        parts.budget.record_clean_step(room_bytes, parts.may_grow)
        if parts.may_grow and parts.standing and self._may_lift(parts.standing[-1], room_bytes):
            self._lift(step, parts.standing.pop())

    def _slowed_down(self, retries: int) -> bool:
        budget = self.parts.budget
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

    def _may_lift(self, remedy: Standing, room_bytes: int) -> bool:
        """Whether what a neighbour forced has the room it lacked. The budget of the time knows what it takes."""
        if not remedy.passing:
            return False
        now = self.parts.budget
        waited = {"clean_steps": now.clean_steps, "patience_steps": now.patience_steps}
        knew = MicroBatchBudget.from_json({**remedy.learned, **waited})
        return knew.room_is_back(room_bytes - remedy.moved_bytes, remedy.failed_bytes, remedy.room_bytes)

    def _lift(self, step: int, remedy: Standing) -> None:
        """Take the remedy back on every rank, or on none: what left the device may not find room to come back."""
        parts = self.parts
        lift = LIFTS[remedy.name]
        failure = catch_oom(lambda: lift(parts, remedy.before), parts.device, "lift")
        if any(parts.ranks.tell(failure is not None)):
            lift(parts, remedy.after)
            parts.budget.wait_longer()
            parts.standing.append(remedy)
        else:
            parts.budget.recall(remedy.learned)
            self._tell(step, remedy)
        parts.device.release_cached()
        parts.static_bytes = parts.device.memory().allocated_bytes

    def _tell(self, step: int, remedy: Standing) -> None:
        self.journal.write(
            "remedy_lifted",
            step=step,
            remedy=remedy.name,
            before=remedy.after,
            after=remedy.before,
            reason="the memory that was short is free again",
        )
