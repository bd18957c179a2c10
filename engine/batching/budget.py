"""The micro-batch budget: the largest predicted cost that a micro-batch may have. It starts from the memory prediction
and is learned from successes and failures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.batching.micro_batches import LAUNCH_TOKENS

CUT = 0.8
"""A failure lowers the budget to at most this share of the cost that failed."""
SAFETY = 0.97
"""Share of the room that a budget fills when cut by the measured slope or grown: micro-batches of equal predicted cost
differed by about 2 % in measured bytes (padding, other kernels)."""
GROWTH = 1.05
BELOW_CEILING = 0.95
"""A budget grows to at most this share of a cost that failed."""
CLEAN_STEPS_TO_GROW = 10
"""Steps before growing to a cost that never succeeded; below one proven before a co-tenant came, it grows each step."""
CLEAN_STEPS_TO_FORGET = 100
"""Steps until a cost that failed beside a co-tenant is retried without evidence of free memory. Doubled each time."""
LONGEST_PATIENCE_STEPS = 400
"""Most clean steps to wait before such a try. A failed try costs part of a micro-batch, little against 400 steps."""
ROOM_BACK = 1.05
"""Memory counts as available again when the room is this many times the room at the failure."""
THRASHING_STEPS = 3
"""Successive steps in which the allocator had to empty its cache, after which the budget is lowered."""
SLOWED = 0.9
"""Share of the budget that remains when the allocator thrashes."""


@dataclass
class MicroBatchBudget:
    """The micro-batch budget, and the successes and failures it was learned from.

    Bytes are predicted bytes; those named room or measured are real ones. Room is what a step may allocate above the
    static level (weights and optimizer state). A prediction that is 10 % off still orders micro-batches correctly, and
    the budget learns the correction. All values are plain numbers, saved in checkpoints and equal on all ranks.
    """

    budget_bytes: int
    top_bytes: int
    """Upper limit: the starting budget that the user asked for, or the cost of a whole step in one micro-batch."""
    proven_bytes: int = 0
    """The largest cost that succeeded, if no smaller one has failed since."""
    since_cut_bytes: int = 0
    """The largest cost that succeeded since the budget was last cut."""
    ceiling_bytes: int | None = None
    """The smallest cost that failed while no co-tenant held memory."""
    passing_bytes: int | None = None
    """The smallest cost that failed because a co-tenant held memory: a ceiling that is forgotten later."""
    passing_room_bytes: int = 0
    """The room at the failure that set `passing_bytes`."""
    known_bytes: int = 0
    """The largest cost that had ever succeeded when the budget was last cut."""
    patience_steps: int = CLEAN_STEPS_TO_FORGET
    """Clean steps to wait before `passing_bytes` is forgotten without evidence of free memory."""
    slope: float = 0.0
    """Largest ratio of measured bytes above the static level to predicted bytes, over all successes; 0: unmeasured."""
    expected_slope: float = 0.0
    """Smallest slope that a cut assumes: 1 where costs are predicted bytes, 0 where they only order micro-batches."""
    clean_steps: int = 0
    """Steps without failure since the last cut."""
    thrashed_steps: int = 0
    """Steps in a row in which the allocator emptied its cache."""
    floor_tokens: int = 0
    """A micro-batch of fewer tokens takes as long as this many (`micro_batches.floor_tokens`); 0: not measured."""
    launch_tokens: int = LAUNCH_TOKENS
    """The fixed time of one more micro-batch, in tokens of work (`micro_batches.launch_tokens`)."""

    def record_success(self, cost_bytes: int, measured_bytes: int) -> None:
        """`measured_bytes` are those above the static level; 0: not measured."""
        self.proven_bytes = max(self.proven_bytes, cost_bytes)
        self.since_cut_bytes = max(self.since_cut_bytes, cost_bytes)
        if cost_bytes and measured_bytes:
            self.slope = max(self.slope, measured_bytes / cost_bytes)

    def bytes_after_failure(self, failed_bytes: int, room_bytes: int) -> int:
        """The budget that `cut` would set after a cost of `failed_bytes` failed with `room_bytes` available."""
        # Small micro-batches that took less than predicted say little about large ones, where fixed parts matter less.
        slope = max(self.slope, self.expected_slope)
        by_slope = int(SAFETY * room_bytes / slope) if slope else failed_bytes
        return max(1, min(int(CUT * failed_bytes), by_slope))

    def cut(self, failed_bytes: int, room_bytes: int, *, beside_co_tenant: bool = False) -> None:
        """Lower the budget after a cost of `failed_bytes` failed with `room_bytes` available.

        A co-tenant is blamed if it holds memory now (`beside_co_tenant`), or if this cost had succeeded before.
        """
        self.budget_bytes = self.bytes_after_failure(failed_bytes, room_bytes)
        self.known_bytes = max(self.known_bytes, self.proven_bytes)
        if beside_co_tenant or failed_bytes <= self.known_bytes:
            self.passing_bytes = min(failed_bytes, self.passing_bytes or failed_bytes)
            self.passing_room_bytes = room_bytes
        else:
            self.ceiling_bytes = min(failed_bytes, self.ceiling_bytes or failed_bytes)
        self.proven_bytes = min(self.proven_bytes, failed_bytes - 1)
        self.clean_steps = self.since_cut_bytes = 0

    def record_clean_step(self, room_bytes: int, may_grow: bool) -> bool:
        """Count a step without failure, after which `room_bytes` are available; raise the budget if that is due and
        `may_grow`. Returns whether the budget grew."""
        self.clean_steps += 1
        passing_bytes = self.passing_bytes
        if passing_bytes is not None and self.room_is_back(room_bytes, passing_bytes, self.passing_room_bytes):
            self._end_patience()
            self.passing_bytes = None
        due = self.clean_steps % CLEAN_STEPS_TO_GROW == 0 or self._recovers()
        if not may_grow or not self.slope or not due:
            return False
        # A budget may be below the cost of one sequence, which then runs alone; if that succeeded, grow from there.
        grown = min(int(max(self.budget_bytes, self.since_cut_bytes) * GROWTH), self._limit(room_bytes))
        if grown <= self.budget_bytes:
            return False
        self.budget_bytes = grown
        return True

    def record_thrashing(self, retries: int) -> bool:
        """Lower the budget after THRASHING_STEPS successive steps in which the allocator emptied its cache (`retries` >
        0), and return whether that was done."""
        self.thrashed_steps = self.thrashed_steps + 1 if retries else 0
        if self.thrashed_steps < THRASHING_STEPS:
            return False
        self.thrashed_steps = self.clean_steps = 0
        self.ceiling_bytes = min(self.budget_bytes, self.ceiling_bytes or self.budget_bytes)
        self.budget_bytes = max(1, int(SLOWED * self.budget_bytes))
        return True

    def room_is_back(self, room_bytes: int, failed_bytes: int, failed_room_bytes: int) -> bool:
        """Whether a cost that failed with `failed_room_bytes` available may be tried again with `room_bytes`: there is
        more room than then, enough for it by the measured slope, or `patience_steps` clean steps have passed."""
        enough = self.slope > 0.0 and failed_bytes * self.slope <= room_bytes
        given_back = room_bytes >= ROOM_BACK * failed_room_bytes and enough
        return given_back or self.clean_steps >= self.patience_steps

    def _recovers(self) -> bool:
        """The budget is below a cost that once succeeded, and no failure beside a co-tenant is remembered."""
        return self.passing_bytes is None and self.budget_bytes < self.known_bytes

    def _limit(self, room_bytes: int) -> int:
        """The largest budget that `record_clean_step` may set with `room_bytes` real bytes available."""
        by_room = int(SAFETY * room_bytes / self.slope)
        if self.known_bytes * self.slope <= room_bytes:
            by_room = max(by_room, self.known_bytes)
        ceilings = (self.ceiling_bytes, self.passing_bytes)
        return min(self.top_bytes, by_room, *(int(BELOW_CEILING * each) for each in ceilings if each is not None))

    def forget_measurements(self) -> dict[str, Any]:
        """Reset all but the budget, because a remedy changes the memory that a micro-batch takes; `recall` undoes it
        with the fields returned."""
        learned = self.as_json()
        self.proven_bytes = self.known_bytes = self.passing_room_bytes = 0
        self.ceiling_bytes = self.passing_bytes = None
        self.slope = self.expected_slope = 0.0
        return learned

    def recall(self, learned: dict[str, Any]) -> None:
        """Restore what `forget_measurements` returned, including the budget, when the remedy is lifted."""
        self._end_patience()
        kept = {"patience_steps": self.patience_steps, "passing_bytes": None, "clean_steps": 0}
        vars(self).update(learned | kept)

    def wait_longer(self) -> None:
        self.patience_steps = min(2 * self.patience_steps, LONGEST_PATIENCE_STEPS)
        self.clean_steps = 0

    def _end_patience(self) -> None:
        """A wait of `patience_steps` without OOM is over: a cost that failed is about to be tried again."""
        if self.clean_steps >= self.patience_steps:
            self.wait_longer()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> MicroBatchBudget:
        return cls(**saved)
