"""How all ranks of a run live through one rank's failure together: told to all, decided by one, adopted by the rest.

What is learned of memory (budget, remedies in force) is the same on every rank at every moment between attempts. The
rank whose dearest micro-batch was the cheapest to fail decides, because what suits it suits the others; a run of one
process decides for itself with the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import MicroBatch
from engine.device.base import Device
from engine.device.oom import MemoryBreakdown, OutOfMemory
from engine.distributed.ranks import Ranks
from engine.errors import MemoryExhaustedError
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.train.recovery.ladder import Remedy, Standing
from engine.train.step.optimizer import StepGuard


@dataclass(frozen=True)
class Struck:
    """One rank's failure, as every rank knows it."""

    rank: int
    failure: OutOfMemory
    micro_batch: MicroBatch | None
    """What was in flight there."""
    capacity_bytes: int
    """Of that rank's device."""
    elsewhere_bytes: int
    """Held there by other processes."""

    @property
    def rows(self) -> int:
        """Sequences in flight; 0 when none was."""
        return self.micro_batch.rows if self.micro_batch else 0


@dataclass
class Knowledge:
    """What all ranks must agree on about memory; `adopt` and `pool` keep it equal."""

    budget: MicroBatchBudget
    loaded: LoadedModel
    loss: LossFunction
    guard: StepGuard
    standing: list[Standing]

    def as_json(self) -> dict[str, Any]:
        """For the other ranks."""
        return {
            "budget": self.budget.as_json(),
            "checkpointing": self.loaded.checkpointing,
            "chunk_tokens": self.loss.chunk_tokens,
            "activation_offload": self.loss.offload.on,
            "optimizer_offload": self.guard.host_state.on,
            "standing": [asdict(remedy) for remedy in self.standing],
        }

    def adopt(self, told: dict[str, Any]) -> None:
        """Take over what the deciding rank knows."""
        vars(self.budget).update(told["budget"])
        if self.loaded.checkpointing != told["checkpointing"]:
            self.loaded.set_checkpointing(told["checkpointing"])
        self.loss.chunk_tokens = told["chunk_tokens"]
        self.loss.offload.on = told["activation_offload"]
        self.guard.host_state.move(to_host=told["optimizer_offload"])
        self.standing[:] = [Standing(**remedy) for remedy in told["standing"]]


def tell_failure(
    ranks: Ranks, failure: OutOfMemory | None, micro_batch: MicroBatch | None, device: Device
) -> list[Struck]:
    """Who failed in this stage of the step; empty when nobody did. A vote of all ranks."""
    mine = Struck(
        ranks.rank, failure, micro_batch, device.capacity_bytes, device.capacity_bytes - device.available_bytes
    ) if failure else None
    if ranks.size == 1:
        return [mine] if mine else []
    told = ranks.tell(mine and as_told(mine))
    struck = [from_told(rank, each) for rank, each in enumerate(told) if each is not None]
    # Of its own failure a rank knows more than it told: the allocator's snapshot.
    return [mine if mine and each.rank == ranks.rank else each for each in struck]


def deciding(struck: Sequence[Struck]) -> Struck:
    """Whose failure is acted upon: the cheapest micro-batch's; then the lowest rank's."""
    return min(struck, key=lambda each: (each.micro_batch.cost_bytes if each.micro_batch else float("inf"), each.rank))


def decide(ranks: Ranks, knowledge: Knowledge, decider: int, remedy: Remedy | None) -> Remedy | None:
    """The remedy that rank `decider` chose, with what it made of the budget, on every rank; None when it has none."""
    if ranks.size == 1:
        return remedy
    mine = None
    if ranks.rank == decider and remedy is not None:
        mine = {"remedy": asdict(remedy), "knowledge": knowledge.as_json()}
    told = ranks.tell(mine)[decider]
    if told is None:
        return None
    knowledge.adopt(told["knowledge"])
    return Remedy(**told["remedy"])


def pool(ranks: Ranks, budget: MicroBatchBudget, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """After a step without failure: what succeeded on every rank is proven, the dearest measurement counts.

    Returns every rank's `facts` about the step.
    """
    if ranks.size == 1:
        return [facts]
    mine = {"proven": budget.proven_bytes, "since_cut": budget.since_cut_bytes, "slope": budget.slope, "facts": facts}
    told = ranks.tell(mine)
    budget.proven_bytes = min(each["proven"] for each in told)
    budget.since_cut_bytes = min(each["since_cut"] for each in told)
    budget.slope = max(each["slope"] for each in told)
    return [each["facts"] for each in told]


def exhausted(struck: Struck, advice: str) -> MemoryExhaustedError:
    """The error when no remedy is left; the same on every rank."""
    failure = struck.failure
    where = f" on rank {struck.rank}" if struck.rank else ""
    if failure.kind != "device":
        return MemoryExhaustedError(
            f"host memory ran out in {failure.phase}{where}: {failure.text}",
            fix="close other programs, or set data.workers = 0; a smaller micro-batch would not help",
        )
    length = f" of {struck.micro_batch.length} tokens" if struck.micro_batch else ""
    elsewhere = struck.elsewhere_bytes
    neighbour = f", and {elsewhere / 2**20:.1f} MiB by other processes" if elsewhere > 0 else ""
    return MemoryExhaustedError(
        f"out of memory in {failure.phase}{where} with one sequence{length} and every remedy used "
        f"({failure.allocated_bytes / 2**20:.1f} of {struck.capacity_bytes / 2**20:.1f} MiB held{neighbour})",
        fix=advice or "a profile with more memory",
    )


def as_told(struck: Struck) -> dict[str, Any]:
    """A failure as JSON."""
    failure, micro_batch = struck.failure, struck.micro_batch
    held = failure.held and {"components": failure.held.components, "largest": failure.held.largest}
    plain = asdict(replace(failure, held=None, text=failure.text[:2000])) | {"held": held}
    group = micro_batch and asdict(micro_batch)
    return {"failure": plain, "micro_batch": group, "capacity_bytes": struck.capacity_bytes,
            "elsewhere_bytes": struck.elsewhere_bytes}


def from_told(rank: int, told: dict[str, Any]) -> Struck:
    """What `as_told` gave."""
    plain, group = told["failure"], told["micro_batch"]
    held = plain["held"] and MemoryBreakdown(**plain["held"], snapshot=None)
    micro_batch = group and MicroBatch(tuple(group["members"]), group["length"], group["cost_bytes"])
    failure = OutOfMemory(**{**plain, "held": held})
    return Struck(rank, failure, micro_batch, told["capacity_bytes"], told["elsewhere_bytes"])
