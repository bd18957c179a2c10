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
CLEAN_STEPS_TO_FORGET = 100
"""A failure at a cost that had succeeded before was a neighbour's doing; its ceiling is forgotten after these many."""


@dataclass
class CostBudget:
    """The budget and what it was learned from. Bytes are predicted bytes unless named measured."""

    budget_bytes: int
    top_bytes: int
    """Never grown above: the starting budget the user asked for, or the cost of a whole step at once."""
    proven_bytes: int = 0
    """The dearest micro-batch that succeeded."""
    ceiling_bytes: int | None = None
    """The cheapest micro-batch that failed for want of room."""
    ceiling_is_passing: bool = False
    """The ceiling lies below what had succeeded before: a neighbour took the memory."""
    slope: float = 0.0
    """Most measured bytes above static per predicted byte, over successes."""
    expected_slope: float = 0.0
    """What `slope` is taken for until something was measured: 1 where costs are the budget's predictions in bytes, 0
    where they only order micro-batches."""
    clean_steps: int = 0

    def record_success(self, cost_bytes: int, measured_bytes: int) -> None:
        """A micro-batch of `cost_bytes` succeeded, taking `measured_bytes` above the static level (0: not measured)."""
        self.proven_bytes = max(self.proven_bytes, cost_bytes)
        if cost_bytes and measured_bytes:
            self.slope = max(self.slope, measured_bytes / cost_bytes)

    def cut(self, failed_bytes: int, room_bytes: int) -> None:
        """Lower the budget after a micro-batch of `failed_bytes` failed; `room_bytes` is capacity minus static."""
        self.ceiling_is_passing = failed_bytes <= self.proven_bytes
        self.ceiling_bytes = failed_bytes if self.ceiling_bytes is None else min(self.ceiling_bytes, failed_bytes)
        self.proven_bytes = min(self.proven_bytes, failed_bytes - 1)
        self.clean_steps = 0
        slope = self.slope or self.expected_slope
        by_slope = int(SAFETY * room_bytes / slope) if slope else failed_bytes
        self.budget_bytes = max(1, min(int(CUT * failed_bytes), by_slope))

    def record_clean_step(self, room_bytes: int, may_grow: bool) -> bool:
        """Count a step without failure; True when the budget grew. `room_bytes` is capacity minus the static level."""
        self.clean_steps += 1
        if self.ceiling_is_passing and self.clean_steps >= CLEAN_STEPS_TO_FORGET:
            self.ceiling_bytes, self.ceiling_is_passing = None, False
        if not may_grow or not self.slope or self.clean_steps % CLEAN_STEPS_TO_GROW:
            return False
        limits = [int(self.budget_bytes * GROWTH), self.top_bytes, int(SAFETY * room_bytes / self.slope)]
        if self.ceiling_bytes is not None:
            limits.append(int(BELOW_CEILING * self.ceiling_bytes))
        grown = min(limits)
        if grown <= self.budget_bytes:
            return False
        self.budget_bytes = grown
        return True

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> CostBudget:
        """What `as_json` gave."""
        return cls(**saved)
