"""Records of an allocation failure: what happened on a rank, what was done about it, and which remedies stay in force.

Plain values. The failure itself, as the device reports it, is `engine.device.oom.OutOfMemory`.

Try: `pytest tests/train/recovery/test_ladder.py`
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.batching.micro_batches import MicroBatch
from engine.device.oom import MemoryBreakdown, OutOfMemory

TEXT_CHARACTERS = 2000
"""Characters of the error's message that are sent to other ranks: what a rank sends in a vote has limited room."""


@dataclass(frozen=True)
class RankOom:
    """An allocation failure on one rank, in the form that ranks exchange."""

    failure: OutOfMemory
    rank: int = 0
    micro_batch: MicroBatch | None = None
    """The micro-batch that was being computed; None outside micro-batches."""
    capacity_bytes: int = 0
    """Capacity of that rank's device."""
    elsewhere_bytes: int = 0
    """Bytes that other processes hold on that device."""

    @property
    def rows(self) -> int:
        """Sequences in the micro-batch; 0 outside micro-batches."""
        return self.micro_batch.rows if self.micro_batch else 0

    @property
    def cost_bytes(self) -> int:
        """Predicted bytes of the micro-batch; 0 outside micro-batches."""
        return self.micro_batch.cost_bytes if self.micro_batch else 0

    def as_json(self) -> dict[str, Any]:
        """The record as JSON for other ranks: without the allocator's snapshot, and with a message of limited
        length."""
        failure, held = self.failure, self.failure.held
        plain = asdict(replace(self, failure=replace(failure, held=None, text=failure.text[:TEXT_CHARACTERS])))
        plain["failure"]["held"] = held and {"components": held.components, "largest": held.largest}
        return plain

    @classmethod
    def from_json(cls, sent: dict[str, Any]) -> RankOom:
        """Rebuild a record from the result of `as_json`."""
        held, group = sent["failure"]["held"], sent["micro_batch"]
        breakdown = MemoryBreakdown(**held, snapshot=None) if held else None
        micro_batch = MicroBatch(tuple(group["members"]), group["length"], group["cost_bytes"]) if group else None
        failure = OutOfMemory(**{**sent["failure"], "held": breakdown})
        return cls(**{**sent, "failure": failure, "micro_batch": micro_batch})


@dataclass(frozen=True)
class RecoveredOom:
    """An allocation failure and what was done about it: the event `backoff`."""

    step: int
    oom: RankOom
    remedy: str
    """A rung of the ladder, "retry", "reload" or "give_up"."""
    attempt: int
    """Number of the attempt that failed, from 1."""
    rows_after: int | None = None
    """Sequences in the largest micro-batch of the next attempt; 0 if there is no next attempt or it has no
    micro-batches, None in evaluations and checkpoints."""
    before: Any = None
    """The memory setting that the remedy changed, before it; None where none was changed."""
    after: Any = None
    """The same setting after it."""


@dataclass(frozen=True)
class ActiveRemedy:
    """A remedy in force, and what is needed to lift it later. Checkpoints save these fields."""

    name: str
    before: Any
    """The memory setting before the remedy."""
    after: Any
    """The same setting under the remedy."""
    failed_bytes: int
    """Predicted cost of the micro-batch that failed."""
    room_bytes: int
    """Bytes that a step could allocate in addition to weights and optimizer state, at the time of the failure."""
    passing: bool
    """Whether the cause was temporary (a co-tenant, say), so that the remedy may be lifted later."""
    learned: dict[str, Any]
    """The micro-batch budget before the remedy, as JSON."""
    moved_bytes: int = 0
    """Bytes that the remedy moved from the device to the host. They need room on the device when the remedy is lifted.
    """
