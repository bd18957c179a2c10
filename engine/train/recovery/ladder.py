"""The backoff ladder: what is done about an allocation failure, as a table of small rungs tried in order.

A rung looks at the failure and the state of the run and either acts, returning what changed in words, or declines with
None. None changes what is learned but those that the recipe allows by name. The order is the recipe's
(`backoff.ladder`, then `backoff.allow_learning_changes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import MicroBatch
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.device.catch_oom import ATTEMPTS
from engine.device.oom import OutOfMemory
from engine.model.load import LoadedModel
from engine.model.loss import LossFunction
from engine.train.step.optimizer import StepGuard

if TYPE_CHECKING:
    from engine.train.step.context import Parts

SMALLEST_CHUNK_TOKENS = 16
SHORTEST_TOKENS = 16


@dataclass
class Situation:
    """What a rung may look at and change."""

    device: Device
    loaded: LoadedModel
    loss: LossFunction
    budget: MicroBatchBudget
    failure: OutOfMemory
    micro_batch: MicroBatch | None
    """The micro-batch that was in flight; None in clipping, the optimizer step and elsewhere."""
    static_bytes: int
    guard: StepGuard
    data: TokenData
    tried: list[str]
    """Rungs already used in this step on account of the rank that failed."""
    standing: list[Standing] = field(default_factory=list)
    """Remedies that are on, first to last."""

    @property
    def room_bytes(self) -> int:
        """What the step could hold above the static level right now."""
        return self.device.available_bytes - self.static_bytes

    @property
    def squeezed(self) -> bool:
        """A neighbour is seen to hold memory of this device."""
        return self.device.available_bytes < self.device.capacity_bytes


@dataclass(frozen=True)
class Remedy:
    """What a rung did: its name, and the setting before and after."""

    name: str
    before: Any = None
    after: Any = None


@dataclass(frozen=True)
class Standing:
    """A remedy that stays on, and what has to be known to lift it again."""

    name: str
    before: Any
    """The setting it replaced."""
    after: Any
    failed_bytes: int
    """Predicted cost of the micro-batch that forced it."""
    room_bytes: int
    """Room above the static level at that moment."""
    passing: bool
    """A neighbour forced it."""
    learned: dict[str, Any]
    """What the budget knew before."""
    moved_bytes: int = 0
    """What left the device for good and would have to come back."""

    @classmethod
    def of(cls, now: Situation, remedy: Remedy, moved_bytes: int) -> Standing:
        """The record of a remedy that was just applied. From here on the budget learns anew.

        A failure outside micro-batches (clipping, the optimizer step) had room beside the dearest of them before, if a
        step was ever finished.
        """
        dearest_bytes = max(now.budget.proven_bytes, now.budget.known_bytes)
        if now.micro_batch is None:
            failed_bytes, worked_before = dearest_bytes, now.guard.steps > 0
        else:
            failed_bytes = now.micro_batch.cost_bytes
            worked_before = failed_bytes <= dearest_bytes
        room_bytes = now.room_bytes - moved_bytes
        passing = now.squeezed or worked_before
        learned = now.budget.forget_measurements()
        return cls(remedy.name, remedy.before, remedy.after, failed_bytes, room_bytes, passing, learned, moved_bytes)


def retry(now: Situation) -> Remedy | None:
    """Once a step and rank, redo unchanged what has succeeded before: the cause was passing. Not beside a neighbour
    that is seen to have taken the room it needs."""
    cost = now.micro_batch.cost_bytes if now.micro_batch else 0
    if "retry" in now.tried or cost > now.budget.proven_bytes:
        return None
    if now.squeezed and cost * now.budget.slope > now.room_bytes:
        return None
    return Remedy("retry")


def defragment(now: Situation) -> Remedy | None:
    """Once a step, redo unchanged when the request would have fitted into memory that was reserved but free.

    Recovery has already returned cached blocks to the driver, so there is nothing left to do here but try again.
    """
    unused = now.failure.reserved_bytes - now.failure.allocated_bytes
    if "defragment" in now.tried or now.failure.requested_bytes is None or unused < now.failure.requested_bytes:
        return None
    return Remedy("defragment")


def cut(now: Situation) -> Remedy | None:
    """Fewer or shorter sequences at a time: down to one sequence."""
    if now.micro_batch is None or now.micro_batch.rows == 1:
        return None
    before = now.budget.budget_bytes
    now.budget.cut(now.micro_batch.cost_bytes, now.room_bytes, beside_co_tenant=now.squeezed)
    return Remedy("cut", before, now.budget.budget_bytes)


def checkpointing(now: Situation) -> Remedy | None:
    """Recompute activations in backward instead of keeping them."""
    if now.micro_batch is None or now.loaded.checkpointing:
        return None
    now.loaded.set_checkpointing(True)
    return Remedy("checkpointing", False, True) if now.loaded.checkpointing else None


def chunk_loss(now: Situation) -> Remedy | None:
    """Compute the loss over fewer tokens at a time."""
    before = now.loss.chunk_tokens
    if now.micro_batch is None or before is None or before <= SMALLEST_CHUNK_TOKENS:
        return None
    # A chunk larger than the micro-batch is no chunk: halving it would change nothing.
    held = min(before, now.micro_batch.rows * now.micro_batch.length)
    now.loss.chunk_tokens = max(SMALLEST_CHUNK_TOKENS, held // 2)
    return Remedy("chunk_loss", before, now.loss.chunk_tokens)


def activation_offload(now: Situation) -> Remedy | None:
    """Keep activations in host memory until backward. On the plain CPU that is where they are."""
    offload = now.loss.offload
    if now.micro_batch is None or offload.on or now.device.kind == "cpu":
        return None
    offload.on = True
    return Remedy("activation_offload", False, True)


def optimizer_offload(now: Situation) -> Remedy | None:
    """Keep optimizer state in host memory between steps. Last, because every step pays for it."""
    host_state = now.guard.host_state
    if now.device.kind == "cpu" or host_state.on or host_state.empty:
        return None
    host_state.move(to_host=True)
    now.device.release_cached()
    now.static_bytes = now.device.memory().allocated_bytes
    return Remedy("optimizer_offload", False, True)


def max_length(now: Situation) -> Remedy | None:
    """End every sequence a quarter earlier. Changes what is learned, so it is there only where the recipe allows it."""
    if now.micro_batch is None or now.micro_batch.rows > 1 or now.micro_batch.length <= SHORTEST_TOKENS:
        return None
    before = now.data.limit
    now.data = now.data.shortened(max(SHORTEST_TOKENS, now.micro_batch.length * 3 // 4))
    return Remedy("max_length", before, now.data.limit)


RUNGS: dict[str, Callable[[Situation], Remedy | None]] = {
    "retry": retry,
    "defragment": defragment,
    "cut": cut,
    "checkpointing": checkpointing,
    "chunk_loss": chunk_loss,
    "activation_offload": activation_offload,
    "optimizer_offload": optimizer_offload,
    "max_length": max_length,
}


LIFTS: dict[str, Callable[[Parts, Any], None]] = {
    "checkpointing": lambda parts, before: parts.loaded.set_checkpointing(before),
    "chunk_loss": lambda parts, before: setattr(parts.loss, "chunk_tokens", before),
    "activation_offload": lambda parts, before: setattr(parts.loss.offload, "on", before),
    "optimizer_offload": lambda parts, before: parts.guard.host_state.move(to_host=before),
    "max_length": lambda parts, before: setattr(parts, "data", parts.data.shortened(before)),
}
"""How remedies that stay on are taken back, given the setting before (and put on again, given the one after). Optimizer
state that comes back may find no room; it then stays where it is."""


def choose(ladder: Sequence[str], now: Situation) -> Remedy | None:
    """The first rung of the recipe's ladder that has something to offer; None when all are used up.

    Where nothing is left to make smaller, or nothing that would help (host memory ran out beside a device with its
    own), the same is tried again a few times before giving up: a passing shortage may strike twice.
    """
    static_bytes = now.static_bytes
    for name in ladder:
        remedy = RUNGS[name](now) if name in RUNGS and _helps(name, now.failure) else None
        if remedy is not None:
            if name in LIFTS:
                now.standing.append(Standing.of(now, remedy, static_bytes - now.static_bytes))
            return remedy
    return Remedy("retry") if "retry" in ladder and now.tried.count("retry") < ATTEMPTS - 1 else None


def _helps(name: str, failure: OutOfMemory) -> bool:
    """Every rung makes room on the device; host memory has only time on its side."""
    return failure.kind == "device" or name == "retry"
