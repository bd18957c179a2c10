"""The backoff ladder: rungs tried in order until one offers a remedy for an allocation failure.

A rung is a pure function of the failure and the state of the run. It returns new memory settings, or None when it has
nothing to offer. No rung changes what is learned, except those that the recipe allows by name. The order is the
recipe's: `backoff.ladder`, then `backoff.allow_learning_changes`.

`back_off` chooses and applies a remedy on the rank that failed. That rank broadcasts its memory settings, learned
budget and active remedies, and the other ranks adopt them.

Try: `pytest tests/train/recovery/test_ladder.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.batching.budget import MicroBatchBudget
from engine.device.catch_oom import ATTEMPTS
from engine.train.recovery.memory_settings import (
    MemorySettings,
    adopt_memory,
    apply_settings,
    current_settings,
    memory_as_json,
)
from engine.train.recovery.records import ActiveRemedy, RankOom
from engine.train.step.context import StepContext

SMALLEST_CHUNK_TOKENS = 16
SHORTEST_TOKENS = 16


@dataclass(frozen=True)
class BackoffContext:
    """The information on which a rung decides."""

    oom: RankOom
    settings: MemorySettings
    budget: MicroBatchBudget
    """Rungs must not change it."""
    tried: Sequence[str]
    """Remedies already tried in this step for failures of the same rank, by name."""
    available_bytes: int
    """Bytes that the run could have allocated on the device in total now."""
    static_bytes: int
    """Bytes allocated between steps, by weights and optimizer state."""
    on_plain_cpu: bool
    """Whether the device's memory is host memory, so that moving anything to the host gains nothing."""
    can_checkpoint: bool
    has_optimizer_state: bool
    planned_chunk_tokens: int
    """Tokens per chunk that plans assume, for a loss that is not yet computed in chunks."""

    @property
    def room_bytes(self) -> int:
        """Bytes that a step could allocate now in addition to `static_bytes`."""
        return self.available_bytes - self.static_bytes

    @property
    def beside_co_tenant(self) -> bool:
        """Whether another process holds memory of the device now."""
        return self.available_bytes < self.oom.capacity_bytes


def retry(now: BackoffContext) -> MemorySettings | None:
    """Once per step and rank: the settings unchanged, to repeat a micro-batch whose cost has succeeded before, because
    the shortage was temporary. None if the cost never succeeded, or a co-tenant now holds the memory needed."""
    cost_bytes = now.oom.cost_bytes
    if "retry" in now.tried or cost_bytes > now.budget.proven_bytes:
        return None
    if now.beside_co_tenant and cost_bytes * now.budget.slope > now.room_bytes:
        return None
    return now.settings


def defragment(now: BackoffContext) -> MemorySettings | None:
    """Once per step and rank: the settings unchanged, if the failed request would have fitted into memory that was
    reserved but free; else None.

    Recovery has already returned cached blocks to the driver, so only the repetition is left to do.
    """
    failure = now.oom.failure
    unused_bytes = failure.reserved_bytes - failure.allocated_bytes
    if "defragment" in now.tried or failure.requested_bytes is None or unused_bytes < failure.requested_bytes:
        return None
    return now.settings


def cut(now: BackoffContext) -> MemorySettings | None:
    """The settings with a lower micro-batch budget, so that fewer sequences go through the model at once; None if the
    failed micro-batch has one sequence, or the failure was outside micro-batches."""
    if now.oom.rows <= 1:
        return None
    return replace(now.settings, micro_batch_budget=now.budget.bytes_after_failure(now.oom.cost_bytes, now.room_bytes))


def checkpointing(now: BackoffContext) -> MemorySettings | None:
    """The settings with activations recomputed in backward instead of stored; None if they are already, the model
    cannot do it, or the failure was outside micro-batches."""
    if now.oom.micro_batch is None or now.settings.checkpointing or not now.can_checkpoint:
        return None
    return replace(now.settings, checkpointing=True)


def chunk_loss(now: BackoffContext) -> MemorySettings | None:
    """The settings with the loss computed in chunks, or over fewer tokens at a time; None if the chunks are as small as
    allowed already, or the failure was outside micro-batches."""
    before, micro_batch = now.settings.chunk_tokens, now.oom.micro_batch
    if micro_batch is None or (before is not None and before <= SMALLEST_CHUNK_TOKENS):
        return None
    if before is None:
        return replace(now.settings, chunk_tokens=now.planned_chunk_tokens)
    # Halving a chunk that is larger than the micro-batch would change nothing.
    used = min(before, micro_batch.rows * micro_batch.length)
    return replace(now.settings, chunk_tokens=max(SMALLEST_CHUNK_TOKENS, used // 2))


def activation_offload(now: BackoffContext) -> MemorySettings | None:
    """The settings with activations kept in host memory until backward; None if they are already, on the plain CPU, and
    if the failure was outside micro-batches."""
    if now.oom.micro_batch is None or now.settings.activation_offload or now.on_plain_cpu:
        return None
    return replace(now.settings, activation_offload=True)


def optimizer_offload(now: BackoffContext) -> MemorySettings | None:
    """The settings with optimizer state kept in host memory between steps; None if it is already or there is no state,
    and on the plain CPU. The last rung of the default ladder, because it makes every step slower."""
    if now.on_plain_cpu or now.settings.optimizer_offload or not now.has_optimizer_state:
        return None
    return replace(now.settings, optimizer_offload=True)


def max_length(now: BackoffContext) -> MemorySettings | None:
    """The settings with all sequences truncated to three quarters of the length that failed; None if that length is too
    short, or the failed micro-batch has several sequences. This changes what is learned, so the recipe must allow it.
    """
    micro_batch = now.oom.micro_batch
    if micro_batch is None or micro_batch.rows > 1 or micro_batch.length <= SHORTEST_TOKENS:
        return None
    return replace(now.settings, max_length=max(SHORTEST_TOKENS, micro_batch.length * 3 // 4))


RUNGS: dict[str, Callable[[BackoffContext], MemorySettings | None]] = {
    "retry": retry,
    "defragment": defragment,
    "cut": cut,
    "checkpointing": checkpointing,
    "chunk_loss": chunk_loss,
    "activation_offload": activation_offload,
    "optimizer_offload": optimizer_offload,
    "max_length": max_length,
}


def choose(ladder: Sequence[str], now: BackoffContext) -> tuple[str, MemorySettings] | None:
    """The first rung of `ladder` that offers a remedy, as (name, settings); None when no remedy is left.

    If no rung offers one, the step is retried unchanged a few times before giving up, because a temporary shortage may
    cause two failures in a row. If host memory ran out on a machine with device memory, only retries are offered,
    because every other rung frees device memory.
    """
    for name in ladder:
        if name in RUNGS and (now.oom.failure.kind == "device" or name == "retry"):
            settings = RUNGS[name](now)
            if settings is not None:
                return name, settings
    may_retry = "retry" in ladder and now.tried.count("retry") < ATTEMPTS - 1
    return ("retry", now.settings) if may_retry else None


def back_off(context: StepContext, oom: RankOom, tried: Sequence[str]) -> str | None:
    """Choose a remedy for `oom` on the rank that failed, and apply its settings on all ranks; returns the remedy's
    name, or None when no remedy is left. `tried` has the names of the remedies tried for that rank in this step. All
    ranks call this."""
    ranks = context.ranks
    remedy = _choose_and_apply(context, oom, tried) if ranks.rank == oom.rank else None
    if ranks.size > 1:
        received = ranks.all_gather_object(remedy and {"remedy": remedy, "memory": memory_as_json(context)})[oom.rank]
        remedy = received and received["remedy"]
        if received is not None:
            adopt_memory(context, received["memory"])
    return remedy


def _choose_and_apply(context: StepContext, oom: RankOom, tried: Sequence[str]) -> str | None:
    now = BackoffContext(
        oom,
        current_settings(context),
        context.budget,
        tried,
        context.device.available_bytes,
        context.static_bytes,
        on_plain_cpu=context.device.kind == "cpu",
        can_checkpoint=context.loaded.base.supports_gradient_checkpointing,
        has_optimizer_state=not context.guard.host_state.empty,
        planned_chunk_tokens=context.loss.chunk_tokens,
    )
    chosen = choose(context.ladder, now)
    if chosen is None:
        return None
    name, settings = chosen
    if name == "cut":  # undone when the budget grows, so it is no active remedy
        context.budget.cut(oom.cost_bytes, now.room_bytes, beside_co_tenant=now.beside_co_tenant)
    apply_settings(context, settings)
    if settings != now.settings and name != "cut":
        context.active_remedies.append(_active_remedy(name, now, settings, context))
    return name


def _active_remedy(name: str, now: BackoffContext, settings: MemorySettings, context: StepContext) -> ActiveRemedy:
    """Build the record of a remedy that was just applied, and reset the budget's measurements, which are no longer
    valid.

    For a failure outside micro-batches (clipping, the optimizer step), `failed_bytes` is the largest cost that
    succeeded, and the shortage counts as temporary if any step was finished before.
    """
    succeeded_bytes = max(now.budget.proven_bytes, now.budget.known_bytes)
    if now.oom.micro_batch is None:
        failed_bytes, succeeded_before = succeeded_bytes, context.guard.steps > 0
    else:
        failed_bytes = now.oom.cost_bytes
        succeeded_before = failed_bytes <= succeeded_bytes
    return ActiveRemedy(
        name,
        before=now.settings.value_of(name),
        after=settings.value_of(name),
        failed_bytes=failed_bytes,
        room_bytes=now.room_bytes,
        passing=now.beside_co_tenant or succeeded_before,
        learned=context.budget.forget_measurements(),
        moved_bytes=now.static_bytes - context.static_bytes,
    )
