"""The micro-batch budget: the largest predicted cost that a micro-batch may have, learned from successes and failures.

The budget is one number in predicted bytes, the unit of `MicroBatchCost.cost`. A prediction that is 10 % off still
orders micro-batches correctly, and the budget learns the correction. All values are plain numbers, saved in checkpoints
and equal on all ranks.

Try: `pytest tests/batching/test_budget.py`
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.batching.micro_batches import LAUNCH_TOKENS

CUT = 0.8
"""A failure lowers the budget to at most this share of the cost that failed."""
SAFETY = 0.97
"""Share of the available room that a budget may fill when it is cut by the measured slope or grows. Micro-batches of
equal predicted cost were seen to differ by about 2 % in measured bytes (padding, other kernels)."""
GROWTH = 1.05
"""A budget grows by this factor at a time."""
BELOW_CEILING = 0.95
"""A budget grows to at most this share of a cost that failed."""
CLEAN_STEPS_TO_GROW = 10
"""Steps without failure before a budget grows to a cost that never succeeded. A budget below a cost that had succeeded
before a co-tenant came grows at every step."""
CLEAN_STEPS_TO_FORGET = 100
"""Steps without failure after which a cost that failed beside a co-tenant is tried again, even if no free memory was
seen to come back. Doubled each time."""
LONGEST_PATIENCE_STEPS = 400
"""Most clean steps to wait before such a try. A failed try costs part of a micro-batch, little against 400 steps."""
ROOM_BACK = 1.05
"""Memory counts as available again when the room is this many times the room at the failure."""
THRASHING_STEPS = 3
"""Number of successive steps in which the allocator had to empty its cache after which the budget is lowered."""
SLOWED = 0.9
"""Share of the budget that remains when the allocator thrashes."""


@dataclass
class MicroBatchBudget:
    """The micro-batch budget, and the successes and failures that it was learned from.

    Fields in bytes are predicted bytes. Those named room or measured are real bytes; room is what a step may allocate
    above the static level (weights and optimizer state).
    """

    budget_bytes: int
    top_bytes: int
    """The budget never grows above this: the starting budget that the user asked for, or the cost of a whole step in
    one micro-batch."""
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
    """The largest ratio of measured bytes above the static level to predicted bytes, over all successes; 0 if nothing
    was measured."""
    expected_slope: float = 0.0
    """The smallest slope that a cut assumes: 1 where costs are predictions in bytes, 0 where costs only order
    micro-batches."""
    clean_steps: int = 0
    """Steps without failure since the last cut."""
    thrashed_steps: int = 0
    """Steps in a row in which the allocator emptied its cache."""
    floor_tokens: int = 0
    """Any micro-batch of fewer tokens takes as long as one of this many (`micro_batches.floor_tokens`); 0: not
    measured."""
    launch_tokens: int = LAUNCH_TOKENS
    """The fixed time of one more micro-batch, in tokens of work: measured with the floor
    (`micro_batches.launch_tokens`), else assumed."""

    def record_success(self, cost_bytes: int, measured_bytes: int) -> None:
        """Record that a micro-batch of `cost_bytes` took `measured_bytes` above the static level (0: not measured)."""
        self.proven_bytes = max(self.proven_bytes, cost_bytes)
        self.since_cut_bytes = max(self.since_cut_bytes, cost_bytes)
        if cost_bytes and measured_bytes:
            self.slope = max(self.slope, measured_bytes / cost_bytes)

    def bytes_after_failure(self, failed_bytes: int, room_bytes: int) -> int:
        """The budget, in predicted bytes, that `cut` would set after a micro-batch of cost `failed_bytes` failed with
        `room_bytes` real bytes available. Changes nothing."""
        # Small micro-batches that took less than predicted say little about large ones, where fixed parts matter less.
        slope = max(self.slope, self.expected_slope)
        by_slope = int(SAFETY * room_bytes / slope) if slope else failed_bytes
        return max(1, min(int(CUT * failed_bytes), by_slope))

    def cut(self, failed_bytes: int, room_bytes: int, *, beside_co_tenant: bool = False) -> None:
        """Record that a micro-batch of cost `failed_bytes` failed with `room_bytes` available, and lower the budget.

        The failure counts as caused by a co-tenant if a co-tenant holds memory now (`beside_co_tenant`), or if a
        micro-batch of this cost had succeeded before.
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
        """Count a step without failure, after which `room_bytes` are available, and raise the budget if that is due and
        `may_grow` allows it; returns whether the budget grew."""
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
        """Record how often the allocator emptied its cache in a step (`retries`); a step with 0 ends the row of such
        steps. After THRASHING_STEPS of them in a row the budget is lowered. Returns whether that was done."""
        self.thrashed_steps = self.thrashed_steps + 1 if retries else 0
        if self.thrashed_steps < THRASHING_STEPS:
            return False
        self.thrashed_steps = self.clean_steps = 0
        self.ceiling_bytes = min(self.budget_bytes, self.ceiling_bytes or self.budget_bytes)
        self.budget_bytes = max(1, int(SLOWED * self.budget_bytes))
        return True

    def room_is_back(self, room_bytes: int, failed_bytes: int, failed_room_bytes: int) -> bool:
        """Whether a cost of `failed_bytes`, which failed with `failed_room_bytes` available, may be tried again now
        that `room_bytes` are available.

        It may if there is more room than then, and enough for this cost by the measured slope, or if `patience_steps`
        clean steps have passed.
        """
        enough = self.slope > 0.0 and failed_bytes * self.slope <= room_bytes
        given_back = room_bytes >= ROOM_BACK * failed_room_bytes and enough
        return given_back or self.clean_steps >= self.patience_steps

    def _recovers(self) -> bool:
        """Whether the budget may grow after every clean step: it is below a cost that once succeeded, and no failure
        caused by a co-tenant is remembered."""
        return self.passing_bytes is None and self.budget_bytes < self.known_bytes

    def _limit(self, room_bytes: int) -> int:
        """The largest budget, in predicted bytes, that `record_clean_step` may set with `room_bytes` real bytes
        available."""
        by_room = int(SAFETY * room_bytes / self.slope)
        if self.known_bytes * self.slope <= room_bytes:
            by_room = max(by_room, self.known_bytes)
        ceilings = (self.ceiling_bytes, self.passing_bytes)
        return min(self.top_bytes, by_room, *(int(BELOW_CEILING * each) for each in ceilings if each is not None))

    def forget_measurements(self) -> dict[str, Any]:
        """Reset all measurements but not the budget, because a remedy changes the memory that a micro-batch takes.

        Returns the former fields; pass them to `recall` when the remedy is lifted.
        """
        learned = self.as_json()
        self.proven_bytes = self.known_bytes = self.passing_room_bytes = 0
        self.ceiling_bytes = self.passing_bytes = None
        self.slope = self.expected_slope = 0.0
        return learned

    def recall(self, learned: dict[str, Any]) -> None:
        """Restore the fields that `forget_measurements` returned, including the budget, when the remedy is lifted."""
        self._end_patience()
        kept = {"patience_steps": self.patience_steps, "passing_bytes": None, "clean_steps": 0}
        vars(self).update(learned | kept)

    def wait_longer(self) -> None:
        """Double `patience_steps`, and count clean steps from 0 again."""
        self.patience_steps = min(2 * self.patience_steps, LONGEST_PATIENCE_STEPS)
        self.clean_steps = 0

    def _end_patience(self) -> None:
        """Lengthen `patience_steps`, by `wait_longer`, when the present wait is over: `clean_steps` steps without an
        OOM have passed, so a cost that failed is about to be tried again."""
        if self.clean_steps >= self.patience_steps:
            self.wait_longer()

    def as_json(self) -> dict[str, Any]:
        """All fields as a JSON-compatible dict, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> MicroBatchBudget:
        """Create a budget from the dict that `as_json` returned."""
        return cls(**saved)
