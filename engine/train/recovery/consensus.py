"""What the ranks of a run exchange about memory: which ranks failed in a stage of a step, and what they measured in a
step.

Ranks act on the failure of the cheapest micro-batch, because a remedy that suffices there suffices elsewhere
(`engine.train.recovery.ladder`). A run of one process makes the same calls.

Try: `pytest tests/distributed/test_rank_faults.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import MicroBatch
from engine.device.base import Device
from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.errors import MemoryExhaustedError
from engine.train.recovery.records import RankOom


def gather_failures(
    ranks: Ranks, failure: OutOfMemory | None, micro_batch: MicroBatch | None, device: Device
) -> list[RankOom]:
    """Gather the failures of all ranks in the stage of the step that just ran; empty if it succeeded everywhere.
    `failure` and `micro_batch` are this rank's, None if it succeeded here. All ranks call this. Raises LostRankError.
    """
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
    """The failure that the ranks act on: that of the cheapest micro-batch, and among equals that of the lowest rank."""
    return min(failed, key=lambda oom: (oom.cost_bytes if oom.micro_batch else float("inf"), oom.rank))


def all_gather_step_stats(ranks: Ranks, budget: MicroBatchBudget, stats: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather every rank's `stats` (JSON) after a step or probe that succeeded, in the order of ranks. Also makes
    `budget` equal on all ranks: a cost counts as proven if it succeeded on every rank, and the largest measurement of
    any rank counts. All ranks call this. Raises LostRankError."""
    if ranks.size == 1:
        return [stats]
    sent = {"proven": budget.proven_bytes, "since_cut": budget.since_cut_bytes, "slope": budget.slope, "stats": stats}
    received = ranks.all_gather_object(sent)
    budget.proven_bytes = min(each["proven"] for each in received)
    budget.since_cut_bytes = min(each["since_cut"] for each in received)
    budget.slope = max(each["slope"] for each in received)
    return [each["stats"] for each in received]


def memory_exhausted(oom: RankOom, advice: str) -> MemoryExhaustedError:
    """Build the error to raise when no remedy is left. `advice` is a sentence on what would help; if it is empty, a
    profile with more memory is advised. All ranks build the same error."""
    failure = oom.failure
    where = f" on rank {oom.rank}" if oom.rank else ""
    if failure.kind != "device":
        return MemoryExhaustedError(
            f"host memory ran out in {failure.phase}{where}: {failure.text}",
            fix="close other programs, or set data.workers = 0; a smaller micro-batch would not help",
        )
    length = f" of {oom.micro_batch.length} tokens" if oom.micro_batch else ""
    co_tenants = f", and {oom.elsewhere_bytes / 2**20:.1f} MiB by other processes" if oom.elsewhere_bytes > 0 else ""
    return MemoryExhaustedError(
        f"out of memory in {failure.phase}{where} with one sequence{length} and every remedy used "
        f"({failure.allocated_bytes / 2**20:.1f} of {oom.capacity_bytes / 2**20:.1f} MiB held{co_tenants})",
        fix=advice or "a profile with more memory",
    )
