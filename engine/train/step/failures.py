"""Allocation failures: their records, what ranks exchange about them, and those that a rank recovers from by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.batching.micro_batches import MicroBatch
from engine.device.oom import MemoryBreakdown, OutOfMemory
from engine.errors import MemoryExhaustedError
from engine.journal.event_text import PHASE_NAMES

if TYPE_CHECKING:
    from engine.batching.budget import MicroBatchBudget
    from engine.device.base import Device
    from engine.distributed.ranks import Ranks

TEXT_CHARACTERS = 2000
"""Characters of the error's message that are sent to other ranks: what a rank sends in a vote has limited room."""


@dataclass(frozen=True)
class RankOom:
    """An allocation failure on one rank, in the form that ranks exchange."""

    failure: OutOfMemory
    rank: int = 0
    micro_batch: MicroBatch | None = None
    """None outside micro-batches."""
    capacity_bytes: int = 0
    elsewhere_bytes: int = 0
    """Held by other processes on that device."""

    @property
    def rows(self) -> int:
        """Sequences in the micro-batch; 0 outside micro-batches."""
        return self.micro_batch.rows if self.micro_batch else 0

    @property
    def cost_bytes(self) -> int:
        """Predicted bytes of the micro-batch; 0 outside micro-batches."""
        return self.micro_batch.cost_bytes if self.micro_batch else 0

    def as_json(self) -> dict[str, Any]:
        """For other ranks: without the allocator's snapshot, and with a message of limited length."""
        failure, held = self.failure, self.failure.held
        plain = asdict(replace(self, failure=replace(failure, held=None, text=failure.text[:TEXT_CHARACTERS])))
        plain["failure"]["held"] = held and {"components": held.components, "largest": held.largest}
        return plain

    @classmethod
    def from_json(cls, sent: dict[str, Any]) -> RankOom:
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
    """Sequences in the next attempt's largest micro-batch: 0 without one, None in evaluations and checkpoints."""
    before: Any = None
    """The memory setting before the remedy; None where none was changed."""
    after: Any = None


@dataclass(frozen=True)
class ActiveRemedy:
    """A remedy in force, and what is needed to lift it later. Checkpoints save these fields."""

    name: str
    before: Any
    after: Any
    failed_bytes: int
    """Predicted cost of the micro-batch that failed."""
    room_bytes: int
    """What a step could allocate in addition to weights and optimizer state, at the time of the failure."""
    passing: bool
    """Whether the cause was temporary (a co-tenant, say), so that the remedy may be lifted later."""
    learned: dict[str, Any]
    """The micro-batch budget before the remedy, as JSON."""
    moved_bytes: int = 0
    """Moved by the remedy from device to host: they need room on the device when it is lifted."""


def gather_failures(
    ranks: Ranks, failure: OutOfMemory | None, micro_batch: MicroBatch | None, device: Device
) -> list[RankOom]:
    """The failures of all ranks in the stage that just ran; empty if it succeeded everywhere. `failure` is None where
    it succeeded. All ranks call this. Raises LostRankError."""
    here = None
    if failure is not None:
        elsewhere_bytes = device.capacity_bytes - device.available_bytes
        here = RankOom(failure, ranks.rank, micro_batch, device.capacity_bytes, elsewhere_bytes)
    if ranks.size == 1:
        return [here] if here else []
    failed = [RankOom.from_json(sent) for sent in ranks.all_gather_object(here and here.as_json()) if sent is not None]
    # This rank's own record also holds the allocator's snapshot, which is not sent.
    return [here if here and oom.rank == ranks.rank else oom for oom in failed]


def smallest_failed(failed: Sequence[RankOom]) -> RankOom:
    """The failure that the ranks act on: of the cheapest micro-batch, among equals of the lowest rank. A remedy that
    suffices there suffices elsewhere."""
    return min(failed, key=lambda oom: (oom.cost_bytes if oom.micro_batch else float("inf"), oom.rank))


def all_gather_step_stats(ranks: Ranks, budget: MicroBatchBudget, stats: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's `stats` (JSON), in order. Makes `budget` equal on all ranks: a cost counts as proven if it succeeded
    on every rank, and the largest measurement counts. All ranks call this. Raises LostRankError."""
    if ranks.size == 1:
        return [stats]
    sent = {"proven": budget.proven_bytes, "since_cut": budget.since_cut_bytes, "slope": budget.slope, "stats": stats}
    received = ranks.all_gather_object(sent)
    budget.proven_bytes = min(each["proven"] for each in received)
    budget.since_cut_bytes = min(each["since_cut"] for each in received)
    budget.slope = max(each["slope"] for each in received)
    return [each["stats"] for each in received]


def memory_exhausted(oom: RankOom, advice: str) -> MemoryExhaustedError:
    """The error to raise when no remedy is left, the same on all ranks. Empty `advice`: a profile with more memory."""
    failure = oom.failure
    place = PHASE_NAMES.get(failure.phase, failure.phase) + (f" on rank {oom.rank}" if oom.rank else "")
    if failure.kind != "device":
        return MemoryExhaustedError(
            f"host memory ran out in {place}: {failure.text}",
            fix="end other programs, or set data.workers = 0; a smaller micro-batch would not help",
        )
    held = ""
    if oom.micro_batch:
        sequences = "one sequence" if oom.rows == 1 else f"{oom.rows} sequences"
        held = f" with {sequences} of {oom.micro_batch.length} tokens"
    co_tenants = f", and {oom.elsewhere_bytes / 2**20:.1f} MiB by other processes" if oom.elsewhere_bytes > 0 else ""
    return MemoryExhaustedError(
        f"out of memory in {place}{held}, and no remedy that backoff.ladder allows is left "
        f"({failure.allocated_bytes / 2**20:.1f} of {oom.capacity_bytes / 2**20:.1f} MiB held{co_tenants})",
        fix=advice or "a profile with more memory",
    )


MOST = 8
"""Failures sent at a time; the rest is sent at the next exchange. What a rank sends has limited room."""

EVENT_TEXT_CHARACTERS = 400


class LocalRecoveries:
    """Recoveries in which no other rank takes part. Rank 0 alone writes the journal, so other ranks keep theirs until
    the next exchange."""

    def __init__(self, ranks: Ranks, record: Callable[[RecoveredOom], None]) -> None:
        """`record` writes a failure to the journal; it is called on rank 0 alone."""
        self._ranks, self._record = ranks, record
        self._kept: list[RecoveredOom] = []

    def note(self, failure: OutOfMemory, remedy: str, attempt: int, *, step: int = 0) -> None:
        """Record a failure that `remedy` ended; `attempt` is the one that failed, from 1, `step` is 0 outside of steps.
        Rank 0 writes it at once, other ranks keep it until `take`."""
        recovered = RecoveredOom(step, RankOom(failure, self._ranks.rank), remedy, attempt, rows_after=0)
        if self._ranks.is_rank0:
            self._record(recovered)
        else:
            self._kept.append(recovered)

    def take(self) -> list[dict[str, Any]]:
        """Remove and return this rank's unsent failures, as JSON for the next exchange."""
        now, self._kept = self._kept[:MOST], self._kept[MOST:]
        return [_as_json(recovered) for recovered in now]

    def record(self, received: Sequence[list[dict[str, Any]]]) -> None:
        """On rank 0: write what every rank sent to the journal, in the order of ranks."""
        if self._ranks.is_rank0:
            for sent in (each for failures in received for each in failures):
                self._record(RecoveredOom(**{**sent, "oom": RankOom.from_json(sent["oom"])}))


def _as_json(recovered: RecoveredOom) -> dict[str, Any]:
    failure = replace(recovered.oom.failure, held=None, text=recovered.oom.failure.text[:EVENT_TEXT_CHARACTERS])
    return {**vars(recovered), "oom": replace(recovered.oom, failure=failure).as_json()}
