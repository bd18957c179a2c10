"""The records of an allocation failure above the device: what happened on a rank, what was done, what stays on.

Plain values. The failure itself, as the device reports it, is `engine.device.oom.OutOfMemory`.

Try: `pytest tests/train/recovery/test_ladder.py`
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.batching.micro_batches import MicroBatch
from engine.device.oom import MemoryBreakdown, OutOfMemory

TEXT_CHARACTERS = 2000
"""Of the error's message, as the other ranks get it: what a rank sends in a vote has limited room."""


@dataclass(frozen=True)
class RankOom:
    """An allocation failure on one rank, as every rank knows it."""

    failure: OutOfMemory
    rank: int = 0
    micro_batch: MicroBatch | None = None
    """The micro-batch that was being computed; None outside micro-batches."""
    capacity_bytes: int = 0
    """Of that rank's device."""
    elsewhere_bytes: int = 0
    """Held on that device by other processes."""

    @property
    def rows(self) -> int:
        """Sequences in the micro-batch; 0 outside micro-batches."""
        return self.micro_batch.rows if self.micro_batch else 0

    @property
    def cost_bytes(self) -> int:
        """Predicted bytes of the micro-batch; 0 outside micro-batches."""
        return self.micro_batch.cost_bytes if self.micro_batch else 0

    def as_json(self) -> dict[str, Any]:
        """What the other ranks get: everything but the allocator's snapshot."""
        failure, held = self.failure, self.failure.held
        plain = asdict(replace(self, failure=replace(failure, held=None, text=failure.text[:TEXT_CHARACTERS])))
        plain["failure"]["held"] = held and {"components": held.components, "largest": held.largest}
        return plain

    @classmethod
    def from_json(cls, sent: dict[str, Any]) -> RankOom:
        """The record that `as_json` described."""
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
    """Most sequences of a micro-batch in the next attempt; 0 when there is none, None where nothing is cut."""
    before: Any = None
    """The memory setting that the remedy changed, before it; None where none was changed."""
    after: Any = None
    """The same setting after it."""


@dataclass(frozen=True)
class ActiveRemedy:
    """A remedy that stays on, and what must be known to lift it again. Checkpoints keep these fields."""

    name: str
    before: Any
    """The memory setting before the remedy."""
    after: Any
    """The same setting under the remedy."""
    failed_bytes: int
    """Predicted cost of the micro-batch that failed."""
    room_bytes: int
    """Room above the static level when it failed."""
    passing: bool
    """Whether a co-tenant caused the failure, so that the remedy may be lifted later."""
    learned: dict[str, Any]
    """The micro-batch budget before the remedy, as JSON."""
    moved_bytes: int = 0
    """Bytes that the remedy moved from the device to the host, which need room there when it is lifted."""
