"""How dear a micro-batch may be, learned from what succeeded and what failed.

One number in predicted bytes (the unit of `Cost`), so a prediction that is 10 % off still orders micro-batches rightly
and the correction is learned here. Pure values: saved in checkpoints, the same on every rank, no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CUT = 0.8
"""A capacity failure lowers the budget to at most this share of the cost that failed."""
SAFETY = 0.97
"""Share of the measured room that a slope-based cut or a growth may fill: two micro-batches of one predicted cost were
seen to differ by about 2 % in what they really take (padding, other kernels)."""
GROWTH = 1.05
BELOW_CEILING = 0.95
CLEAN_STEPS_TO_GROW = 10
"""Into what was never tried. Back to what had succeeded before a neighbour came, the budget grows at every step."""
CLEAN_STEPS_TO_FORGET = 100
"""Until a neighbour's ceiling is tried again where no free memory was seen to come back. Doubled each time."""
LONGEST_PATIENCE_STEPS = 400
"""A try that fails costs part of a micro-batch: in so many steps it does not show."""
ROOM_BACK = 1.05
"""Room counts as given back when there is this much more of it than at the failure."""
THRASHING_STEPS = 3
"""So many steps in a row in which the allocator had to empty its cache are no coincidence."""
SLOWED = 0.9
"""What a thrashing allocator leaves of the budget."""


@dataclass
class CostBudget:
    """The budget and what it was learned from. Bytes are predicted bytes unless named measured; room is what may be
    held above the static level, in real bytes."""

    budget_bytes: int
    top_bytes: int
    """Never grown above: the starting budget the user asked for, or the cost of a whole step at once."""
    proven_bytes: int = 0
    """The dearest micro-batch that succeeded, and nothing cheaper failed since."""
    since_cut_bytes: int = 0
    """The dearest one that succeeded since the budget was last cut."""
    ceiling_bytes: int | None = None
    """The cheapest micro-batch that failed for want of room while the device was ours alone."""
    passing_bytes: int | None = None
    """The cheapest one that failed because a neighbour held memory: a ceiling to be forgotten in time."""
    passing_room_bytes: int = 0
    """The room there was at that failure."""
    known_bytes: int = 0
    """The dearest micro-batch that had ever succeeded when the budget was last cut."""
    patience_steps: int = CLEAN_STEPS_TO_FORGET
    slope: float = 0.0
    """Most measured bytes above static per predicted byte, over successes."""
    expected_slope: float = 0.0
    """What a cut takes `slope` for at least: 1 where costs are predictions in bytes, 0 where they only order
    micro-batches."""
    clean_steps: int = 0
    thrashed_steps: int = 0

    def record_success(self, cost_bytes: int, measured_bytes: int) -> None:
        """A micro-batch of `cost_bytes` succeeded, taking `measured_bytes` above the static level (0: not measured)."""
        self.proven_bytes = max(self.proven_bytes, cost_bytes)
        self.since_cut_bytes = max(self.since_cut_bytes, cost_bytes)
        if cost_bytes and measured_bytes:
            self.slope = max(self.slope, measured_bytes / cost_bytes)

    def cut(self, failed_bytes: int, room_bytes: int, *, squeezed: bool = False) -> None:
        """Lower the budget after a micro-batch of `failed_bytes` failed with `room_bytes` to use.

        It was a neighbour's doing when one is seen to hold memory (`squeezed`), or when as much had succeeded before.
        """
        self.known_bytes = max(self.known_bytes, self.proven_bytes)
        if squeezed or failed_bytes <= self.known_bytes:
            self.passing_bytes = min(failed_bytes, self.passing_bytes or failed_bytes)
            self.passing_room_bytes = room_bytes
        else:
            self.ceiling_bytes = min(failed_bytes, self.ceiling_bytes or failed_bytes)
        self.proven_bytes = min(self.proven_bytes, failed_bytes - 1)
        self.clean_steps = self.since_cut_bytes = 0
        # What cheaper micro-batches took less than predicted is no promise for dear ones: fixed parts weigh otherwise.
        slope = max(self.slope, self.expected_slope)
        by_slope = int(SAFETY * room_bytes / slope) if slope else failed_bytes
        self.budget_bytes = max(1, min(int(CUT * failed_bytes), by_slope))

    def record_clean_step(self, room_bytes: int, may_grow: bool) -> bool:
        """Count a step without failure; True when the budget grew. `room_bytes` is there to use now."""
        self.clean_steps += 1
        if self.passing_bytes is not None:
            self._forget_neighbour(room_bytes)
        due = self.clean_steps % CLEAN_STEPS_TO_GROW == 0 or self._way_back()
        if not may_grow or not self.slope or not due:
            return False
        # A budget may be cut below one sequence, which then runs alone all the same.
        grown = min(int(max(self.budget_bytes, self.since_cut_bytes) * GROWTH), self._limit(room_bytes))
        if grown <= self.budget_bytes:
            return False
        self.budget_bytes = grown
        return True

    def record_thrashing(self, retries: int) -> bool:
        """Count a step in which the allocator emptied its cache `retries` times to go on; True when it was one too many
        and the budget was lowered."""
        self.thrashed_steps = self.thrashed_steps + 1 if retries else 0
        if self.thrashed_steps < THRASHING_STEPS:
            return False
        self.thrashed_steps = self.clean_steps = 0
        self.ceiling_bytes = min(self.budget_bytes, self.ceiling_bytes or self.budget_bytes)
        self.budget_bytes = max(1, int(SLOWED * self.budget_bytes))
        return True

    def room_is_back(self, room_bytes: int, failed_bytes: int, failed_room_bytes: int) -> bool:
        """Whether what failed for want of room has it now: more than there was, and as much as it was measured to take,
        or clean steps enough to try it."""
        enough = self.slope > 0.0 and failed_bytes * self.slope <= room_bytes
        given_back = room_bytes >= ROOM_BACK * failed_room_bytes and enough
        return given_back or self.clean_steps >= self.patience_steps

    def _forget_neighbour(self, room_bytes: int) -> None:
        assert self.passing_bytes is not None
        if not self.room_is_back(room_bytes, self.passing_bytes, self.passing_room_bytes):
            return
        if self.clean_steps >= self.patience_steps:
            self.wait_longer()
        self.passing_bytes = None

    def _way_back(self) -> bool:
        """No neighbour is known of, and what had succeeded before one came is not reached again."""
        return self.passing_bytes is None and self.budget_bytes < self.known_bytes

    def _limit(self, room_bytes: int) -> int:
        by_room = int(SAFETY * room_bytes / self.slope)
        if self.known_bytes * self.slope <= room_bytes:
            by_room = max(by_room, self.known_bytes)
        limits = [self.top_bytes, by_room]
        for ceiling in (self.ceiling_bytes, self.passing_bytes):
            if ceiling is not None:
                limits.append(int(BELOW_CEILING * ceiling))
        return min(limits)

    def start_over(self) -> dict[str, Any]:
        """A remedy changes what micro-batches take: forget what was measured, keep the budget. Returns what
        `think_back` needs when the remedy is lifted."""
        learned = self.as_json()
        self.proven_bytes = self.known_bytes = self.passing_room_bytes = 0
        self.ceiling_bytes = self.passing_bytes = None
        self.slope = self.expected_slope = 0.0
        return learned

    def think_back(self, learned: dict[str, Any]) -> None:
        """The remedy was lifted: what held before it holds again, and the budget it was forced at."""
        if self.clean_steps >= self.patience_steps:
            self.wait_longer()
        kept = {"patience_steps": self.patience_steps, "passing_bytes": None, "clean_steps": 0}
        vars(self).update(learned | kept)

    def wait_longer(self) -> None:
        """Memory was tried for on suspicion: the next time after more clean steps."""
        self.patience_steps = min(2 * self.patience_steps, LONGEST_PATIENCE_STEPS)
        self.clean_steps = 0

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> CostBudget:
        """What `as_json` gave."""
        return cls(**saved)
