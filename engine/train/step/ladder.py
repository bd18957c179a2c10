"""The backoff ladder: rungs tried in order until one offers a remedy for an out-of-memory error; and the memory
settings that remedies change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.batching.budget import SAFETY
from engine.config.changes import with_changes
from engine.device.oom import ATTEMPTS
from engine.train.step.failures import ActiveRemedy

if TYPE_CHECKING:
    from engine.batching.budget import MicroBatchBudget
    from engine.batching.micro_batches import Cost
    from engine.config.schema.run import RunSpec
    from engine.train.step.context import StepContext
    from engine.train.step.failures import RankOom

SETTING_OF_REMEDY = {
    "cut": "micro_batch_budget",
    "checkpointing": "checkpointing",
    "chunk_loss": "chunk_tokens",
    "tile_mlp": "mlp_tiles",
    "activation_offload": "activation_offload",
    "optimizer_offload": "optimizer_offload",
    "max_length": "max_length",
}
"""Remedies that are not named here change no setting."""


@dataclass(frozen=True)
class MemorySettings:
    """Undone by applying the settings as they were. All ranks have the same between two attempts at a step."""

    micro_batch_budget: int
    """Predicted bytes that a micro-batch may cost."""
    checkpointing: int
    """Gradient checkpointing: how many layers recompute their activations in backward. Checkpoints of earlier versions
    say true or false, for all or none."""
    chunk_tokens: int | None
    """Tokens that the loss is computed over at a time; None where its implementation has no such setting."""
    activation_offload: bool
    """Whether activations are kept in host memory until backward."""
    optimizer_offload: bool
    """Whether optimizer state lies in host memory between steps."""
    max_length: int | None
    """Tokens after which every sequence ends; None leaves sequences whole."""
    mlp_tiles: int = 1
    """Pieces of a sequence in which feed-forward blocks are computed."""

    def value_of(self, remedy: str) -> Any:
        """None for a remedy that changes no setting."""
        return getattr(self, SETTING_OF_REMEDY[remedy]) if remedy in SETTING_OF_REMEDY else None

    def with_value(self, remedy: str, value: Any) -> MemorySettings:
        return replace(self, **{SETTING_OF_REMEDY[remedy]: value})

    def recipe_values(self, layers: int) -> dict[str, Any]:
        """Settings by recipe key, for a model of which so many layers may recompute; those without a recipe key are
        left out."""
        some = 0 < self.checkpointing < layers
        recomputed = {"train.gradient_checkpointing": self.checkpointing if some else self.checkpointing > 0}
        return {
            **(recomputed if layers else {}),  # the plan of a model that cannot is the same whatever the recipe says
            "train.mlp_tiles": self.mlp_tiles,
            "train.activation_offload": self.activation_offload,
            "train.optimizer_offload": self.optimizer_offload,
        }


def current_settings(context: StepContext) -> MemorySettings:
    return MemorySettings(
        micro_batch_budget=context.budget.budget_bytes,
        checkpointing=context.loaded.checkpointing,
        chunk_tokens=context.loss.chunks,
        activation_offload=context.loss.offload.on,
        optimizer_offload=context.guard.host_state.on,
        max_length=context.data.limit,
        mlp_tiles=context.loaded.mlp_tiles,
    )


def apply_settings(context: StepContext, settings: MemorySettings) -> None:
    """Put `settings` in force on this rank. Raises torch.OutOfMemoryError if optimizer state does not fit back on the
    device: it is still on the host then, and all other settings are applied."""
    context.budget.budget_bytes = settings.micro_batch_budget
    if context.loaded.checkpointing != settings.checkpointing:
        context.loaded.set_checkpointing(settings.checkpointing)
    context.loaded.set_mlp_tiles(settings.mlp_tiles)
    context.loss.set_chunks(settings.chunk_tokens)
    context.loss.offload.on = settings.activation_offload
    if context.data.limit != settings.max_length:
        context.data = context.data.shortened(settings.max_length)
    if context.guard.host_state.on != settings.optimizer_offload:
        context.guard.host_state.move(to_host=settings.optimizer_offload)
        context.device.release_cached()
        context.static_bytes = context.device.memory().allocated_bytes


def effective_spec(spec: RunSpec, context: StepContext) -> RunSpec:
    """`spec` with the memory settings in force, so that advice does not suggest what is already done."""
    return with_changes(spec, current_settings(context).recipe_values(context.loaded.recomputable_layers))


def memory_as_json(context: StepContext) -> dict[str, Any]:
    """Settings, learned micro-batch budget and active remedies, for checkpoints and other ranks."""
    settings = asdict(current_settings(context))
    del settings["micro_batch_budget"]  # the budget has it already
    return {
        "budget": context.budget.as_json(),
        "remedies": settings,
        "standing": [asdict(remedy) for remedy in context.active_remedies],
    }


def adopt_memory(context: StepContext, saved: dict[str, Any]) -> None:
    """Apply what `memory_as_json` returned on another rank, or a checkpoint saved."""
    vars(context.budget).update(saved["budget"])
    apply_settings(context, MemorySettings(saved["budget"]["budget_bytes"], **saved["remedies"]))
    context.active_remedies[:] = [ActiveRemedy(**remedy) for remedy in saved["standing"]]


LAYERS_SHARE = 1 / 8
"""Share of the layers that recompute their activations in addition at each failure, at least."""
SMALLEST_CHUNK_TOKENS = 16
SMALLEST_TILE_TOKENS = 16
FEWEST_TILES = 4
"""Two would leave the intermediate values of a block as large as its input."""
SHORTEST_TOKENS = 16


@dataclass(frozen=True)
class BackoffContext:
    """The information on which a rung decides."""

    oom: RankOom
    settings: MemorySettings
    budget: MicroBatchBudget
    """Rungs must not change it."""
    tried: Sequence[str]
    """Names of remedies already tried in this step for failures of the same rank."""
    available_bytes: int
    """What the run could have allocated on the device in total now."""
    static_bytes: int
    """Allocated between steps, by weights and optimizer state."""
    on_plain_cpu: bool
    """Whether device memory is host memory, so that moving anything to the host gains nothing."""
    layers: int
    """Decoder layers that may recompute their activations; 0 if the model cannot do it."""
    has_optimizer_state: bool
    tiles_mlp: bool
    """Whether the model has feed-forward blocks that can be computed in pieces."""
    planned_chunk_tokens: int
    """Tokens per chunk that plans assume, for a loss that is not yet computed in chunks."""
    row_targets: int | None = None
    """Most target tokens of one sequence; None: unknown."""
    cost_recomputing: Callable[[int], Cost] | None = None
    """The predicted cost if so many layers recompute; None for a model whose memory is predicted otherwise."""

    @property
    def room_bytes(self) -> int:
        """What a step could allocate now in addition to `static_bytes`."""
        return self.available_bytes - self.static_bytes

    @property
    def beside_co_tenant(self) -> bool:
        """Whether another process holds memory of the device now."""
        return self.available_bytes < self.oom.capacity_bytes


def retry(now: BackoffContext) -> MemorySettings | None:
    """Repeat unchanged, once per step and rank, a cost that succeeded before, unless a co-tenant took its memory."""
    cost_bytes = now.oom.cost_bytes
    if "retry" in now.tried or cost_bytes > now.budget.proven_bytes:
        return None
    if now.beside_co_tenant and cost_bytes * now.budget.slope > now.room_bytes:
        return None
    return now.settings


def defragment(now: BackoffContext) -> MemorySettings | None:
    """Repeat unchanged, once per step and rank, if the request would have fitted into memory that was reserved but
    free; recovery has already returned cached blocks to the driver."""
    failure = now.oom.failure
    unused_bytes = failure.reserved_bytes - failure.allocated_bytes
    if "defragment" in now.tried or failure.requested_bytes is None or unused_bytes < failure.requested_bytes:
        return None
    return now.settings


def cut(now: BackoffContext) -> MemorySettings | None:
    """Fewer sequences at once (a lower micro-batch budget); None for a single one, and outside micro-batches."""
    if now.oom.rows <= 1:
        return None
    return replace(now.settings, micro_batch_budget=now.budget.bytes_after_failure(now.oom.cost_bytes, now.room_bytes))


def checkpointing(now: BackoffContext) -> MemorySettings | None:
    """Gradient checkpointing of more layers: as many as the failed micro-batch needs by its prediction, at least
    LAYERS_SHARE of all. None if all recompute already, the model cannot do it, or outside micro-batches."""
    micro_batch, before = now.oom.micro_batch, now.settings.checkpointing
    if micro_batch is None or before >= now.layers:
        return None
    least = min(now.layers, before + math.ceil(LAYERS_SHARE * now.layers))
    if now.cost_recomputing is None:
        return replace(now.settings, checkpointing=least)
    # What was measured under other settings says nothing, but a prediction is never taken to be too high.
    room_bytes = SAFETY * now.room_bytes / max(1.0, now.budget.slope)
    for layers in range(least, now.layers):
        if now.cost_recomputing(layers)(micro_batch.rows, micro_batch.length) <= room_bytes:
            return replace(now.settings, checkpointing=layers)
    return replace(now.settings, checkpointing=now.layers)


def chunk_loss(now: BackoffContext) -> MemorySettings | None:
    """The loss in chunks, or in smaller ones; None if they are as small as allowed, or outside micro-batches."""
    before, micro_batch = now.settings.chunk_tokens, now.oom.micro_batch
    if micro_batch is None or (before is not None and before <= SMALLEST_CHUNK_TOKENS):
        return None
    if before is None:
        return replace(now.settings, chunk_tokens=now.planned_chunk_tokens)
    # Halving a chunk that is larger than the micro-batch's targets would change nothing.
    row_targets = micro_batch.length if now.row_targets is None else min(micro_batch.length, now.row_targets)
    used = min(before, micro_batch.rows * row_targets)
    return replace(now.settings, chunk_tokens=max(SMALLEST_CHUNK_TOKENS, used // 2))


def tile_mlp(now: BackoffContext) -> MemorySettings | None:
    """Feed-forward blocks in pieces of the sequence, or in twice as many; None if the pieces are as short as allowed,
    the model has no such blocks, or outside micro-batches."""
    micro_batch, tiles = now.oom.micro_batch, 2 * now.settings.mlp_tiles
    if micro_batch is None or not now.tiles_mlp or micro_batch.rows * micro_batch.length < tiles * SMALLEST_TILE_TOKENS:
        return None
    return replace(now.settings, mlp_tiles=min(max(tiles, FEWEST_TILES), micro_batch.length))


def activation_offload(now: BackoffContext) -> MemorySettings | None:
    """Activations in host memory until backward; None if already so, on the plain CPU, or outside micro-batches."""
    if now.oom.micro_batch is None or now.settings.activation_offload or now.on_plain_cpu:
        return None
    return replace(now.settings, activation_offload=True)


def optimizer_offload(now: BackoffContext) -> MemorySettings | None:
    """Optimizer state in host memory between steps; None if it is already or there is none, and on the plain CPU. The
    last rung of the default ladder, because it makes every step slower."""
    if now.on_plain_cpu or now.settings.optimizer_offload or not now.has_optimizer_state:
        return None
    return replace(now.settings, optimizer_offload=True)


def max_length(now: BackoffContext) -> MemorySettings | None:
    """Sequences truncated to three quarters of the length that failed, which the recipe must allow because it changes
    the training result; None if that is too short, or the failed micro-batch has several sequences."""
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
    "tile_mlp": tile_mlp,
    "activation_offload": activation_offload,
    "optimizer_offload": optimizer_offload,
    "max_length": max_length,
}
"""A rung is a pure function. None changes the training result, except those that the recipe allows by name; the order
is the recipe's: `backoff.ladder`, then `backoff.allow_learning_changes`."""


def choose(ladder: Sequence[str], now: BackoffContext) -> tuple[str, MemorySettings] | None:
    """The first remedy that `ladder` offers, as (name, settings); None when none is left.

    Else the step is retried unchanged a few times, because a temporary shortage may cause two failures in a row. If
    host memory ran out beside device memory, only retries are offered: every other rung frees device memory.
    """
    for name in ladder:
        if name in RUNGS and (now.oom.failure.kind == "device" or name == "retry"):
            settings = RUNGS[name](now)
            if settings is not None:
                return name, settings
    may_retry = "retry" in ladder and now.tried.count("retry") < ATTEMPTS - 1
    return ("retry", now.settings) if may_retry else None


def back_off(context: StepContext, oom: RankOom, tried: Sequence[str]) -> str | None:
    """Choose a remedy on the rank that failed, and apply its settings, budget and active remedies on all ranks; returns
    its name, None when none is left. `tried`: for that rank in this step. All ranks call this."""
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
        layers=context.loaded.recomputable_layers,
        has_optimizer_state=not context.guard.host_state.empty,
        tiles_mlp=context.loaded.tiles is not None,
        planned_chunk_tokens=context.loss.chunk_tokens,
        row_targets=context.bounds.targets,
        cost_recomputing=context.cost_recomputing,
    )
    chosen = choose(context.ladder, now)
    if chosen is None:
        return None
    name, settings = chosen
    if name == "cut":  # undone when the budget grows, so it is no active remedy
        context.budget.cut(oom.cost_bytes, now.room_bytes, beside_co_tenant=now.beside_co_tenant)
    apply_settings(context, settings)
    if settings != now.settings and name != "cut":
        _record(context, _active_remedy(name, now, settings, context))
    return name


def _record(context: StepContext, remedy: ActiveRemedy) -> None:
    """Add a remedy in force. Further layers that recompute before any micro-batch succeeded belong to the remedy
    before: they are lifted together, back to what worked."""
    last = context.active_remedies[-1] if context.active_remedies else None
    if last is not None and last.name == remedy.name == "checkpointing" and not remedy.learned["proven_bytes"]:
        remedy = replace(last, after=remedy.after)
        context.active_remedies.pop()
    context.active_remedies.append(remedy)


def _active_remedy(name: str, now: BackoffContext, settings: MemorySettings, context: StepContext) -> ActiveRemedy:
    """The record of a remedy just applied; resets the budget's measurements, which are no longer valid.

    For a failure outside micro-batches, `failed_bytes` is the largest cost that succeeded, and the shortage counts as
    temporary if any step was finished before.
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
