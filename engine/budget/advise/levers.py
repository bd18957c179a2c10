"""Lists levers: changes of recipe or profile keys that lower a run's memory, each with its cost in speed and quality.

Costs in speed are rough estimates from common practice on GPUs, good enough for ranking; they are not measurements.
Levers that change the same key are listed in the order of the memory they save, the least first.

Try: `tunedeck fit -p 24gb -r full --set model.id=Qwen/Qwen2.5-7B`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.budget.advise.changes import value_of
from engine.budget.advise.plan import Plan
from engine.budget.architecture.lookup import find_architecture
from engine.spec.check.parallel import device_count
from engine.spec.schema.run import RunSpec

LEARNING_COST = 10_000.0
"""Added to the cost of each lever that changes what is learned, so that sets with the fewest such levers come first."""
FEWEST_IMAGE_TOKENS = 64
"""Images of fewer tokens are not suggested."""
SHORTEST = 256
"""Sequences shorter than this are not suggested."""
LOWEST_RANK = 4
"""LoRA ranks lower than this are not suggested."""


@dataclass(frozen=True, eq=False)
class Lever:
    """A change of one or several keys, and its cost. Levers are compared by identity, because values may be lists."""

    changes: tuple[tuple[str, Any], ...]
    slower_percent: float
    note: str
    changes_learning: bool = False
    """The lever changes what the run learns, or the data it learns from."""
    changes_arithmetic: bool = False
    """The lever lowers the precision of numbers or changes how they are rounded: results differ by more than the order
    of summation explains."""
    quality: float = 0.0
    """Rough estimate of lost quality, as percent that `cost` adds to `slower_percent`."""

    @property
    def cost(self) -> float:
        """The cost by which the search sorts levers: `slower_percent` plus `quality`, plus LEARNING_COST if learning
        changes."""
        return self.slower_percent + self.quality + (LEARNING_COST if self.changes_learning else 0.0)

    @property
    def keys(self) -> frozenset[str]:
        """The dotted keys that the lever changes."""
        return frozenset(key for key, _ in self.changes)


def levers_of(spec: RunSpec, plan: Plan) -> list[Lever]:
    """All levers for a run, including some that its other settings or its hardware rule out; the search tests each."""
    return [
        *_micro_batch_levers(spec, plan), *_offload_levers(spec, plan), *_parallel_levers(spec),
        *_arithmetic_levers(spec, plan), *_learning_levers(spec, plan),
    ]  # fmt: skip


def _micro_batch_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    train = spec.recipe.train
    if train.micro_batch != "auto" and plan.micro_batch > 1:
        yield Lever((("train.micro_batch", "auto"),), 2.0, "the same batch in smaller pieces")
    if train.loss == "plain":
        yield Lever((("train.loss", "auto"),), 1.0, "logits are made and dropped in chunks; the same loss")
    if not train.gradient_checkpointing:
        note = "activations are computed again in backward; the same gradients"
        yield Lever((("train.gradient_checkpointing", True),), 30.0, note)


def _offload_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    """Yield levers that switch offloads on; if the host's memory is too small for the run's offloads, yield levers that
    switch them off."""
    offloads = {
        "train.activation_offload": (45.0, "activations wait in host memory until backward; the same gradients"),
        "train.optimizer_offload": (35.0, "optimizer state in host memory between steps; the same updates"),
    }
    for key, (slower, note) in offloads.items():
        if value_of(spec, key) and not plan.host_fits:
            yield Lever(((key, False),), 0.0, "what the host cannot hold stays on the device")
        elif not value_of(spec, key) and spec.profile.device.kind != "cpu":
            yield Lever(((key, True),), slower, note)


def _parallel_levers(spec: RunSpec) -> Iterator[Lever]:
    """Yield levers for several devices: sharded instead of replicated weights, sharded parameters, and sequence
    parallelism."""
    devices, parallel = device_count(spec.profile), spec.profile.parallel
    if devices == 1:
        return
    if parallel.strategy == "replicated":
        changes: tuple[tuple[str, Any], ...] = (("parallel.strategy", "sharded"),)
        if parallel.shard != "parameters":
            changes += (("parallel.shard", "parameters"),)
        note = "each device holds a part of weights, gradients and optimizer state; the same updates"
        yield Lever(changes, 20.0, note)
    elif parallel.shard == "gradients":
        note = "weights are gathered for every use; the same updates"
        yield Lever((("parallel.shard", "parameters"),), 15.0, note)
    for size in range(parallel.sequence + 1, devices + 1):
        if devices % size == 0:
            note = f"{size} devices share each sequence; the same gradients"
            yield Lever((("parallel.sequence", size),), 10.0 + size, note)


def _arithmetic_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    """Yield levers that lower the precision of numbers or change how they are rounded."""
    method, train, wide = spec.recipe.method, spec.recipe.train, plan.config.base_bytes == 4
    if method.adapter_dtype == "float32" and not wide:
        note = "adapters in bf16: half of their bytes and gradients; updates are rounded as train.rounding says"
        yield Lever((("method.adapter_dtype", "bfloat16"),), 0.0, note, changes_arithmetic=True, quality=8.0)
    by_chance = "rounded up or down by chance: right on average, each step off by less than 1/128 of itself"
    rounds = plan.config.trains_in_bfloat16 or not wide
    if rounds and train.rounding == "exact":
        note = f"2 bytes a weight less: weights trained in bf16 are {by_chance}"
        yield Lever((("train.rounding", "stochastic"),), 1.0, note, changes_arithmetic=True, quality=4.0)
    if rounds and train.state_dtype == "float32":
        note = f"4 bytes a weight less with adamw, for weights trained in bf16: moments {by_chance}"
        yield Lever((("train.state_dtype", "bfloat16"),), 2.0, note, changes_arithmetic=True, quality=4.0)
    if train.optimizer == "adamw":
        note = "optimizer state in 8 bits (bitsandbytes): moments are rounded to one of 256 values"
        if plan.config.trains_in_bfloat16 and train.rounding == "exact":
            note += "; weights stay exact"
        yield Lever((("train.optimizer", "adamw_8bit"),), 2.0, note, changes_arithmetic=True, quality=5.0)
    if spec.recipe.model.quantize == "none":
        note = "the frozen base in 4 bits (nf4, bitsandbytes)"
        yield Lever((("model.quantize", "nf4"),), 25.0, note, changes_arithmetic=True, quality=15.0)


def _learning_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    """Yield levers that change what is learned: LoRA instead of full fine-tuning, lower ranks, smaller images, shorter
    sequences."""
    method, longest = spec.recipe.method, plan.length
    if method.kind == "full":
        changes: list[tuple[str, Any]] = [("method.kind", "lora"), ("method.train_only", []), ("method.freeze", [])]
        kept = tuple(change for change in changes if value_of(spec, change[0]) != change[1])
        note = "adapters instead of all weights; raise the learning rate about tenfold"
        yield Lever(kept, 0.0, note, True, quality=20.0)
    rank = method.rank // 2
    while method.kind == "lora" and rank >= LOWEST_RANK:
        note, quality = f"rank {rank}: smaller adapters", 10.0 * method.rank / rank
        yield Lever((("method.rank", rank),), 0.0, note, True, quality=quality)
        rank //= 2
    yield from _image_levers(spec, plan)
    length = longest // 2
    while length >= SHORTEST:
        note = f"samples longer than {length} tokens are dropped or cut"
        yield Lever((("data.max_length", length),), 0.0, note, True, quality=15.0 * longest / length)
        length //= 2


def _image_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    """Yield levers for smaller images, if the model takes images of any size."""
    if plan.predictor == "simulated":
        return
    encoder = find_architecture(spec).vision_encoder
    if encoder is None or encoder.patches is not None:
        return
    tokens = plan.image_tokens // 2
    while tokens >= FEWEST_IMAGE_TOKENS:
        note = f"images of at most {tokens} tokens each: larger ones are scaled down"
        changes = (("data.image_max_pixels", tokens * encoder.pixels_per_token),)
        yield Lever(changes, 0.0, note, True, quality=12.0 * plan.image_tokens / tokens)
        tokens //= 2


def room_levers(spec: RunSpec) -> Iterator[Lever]:
    """Yield levers that use the unused memory of a run that fits; each is meant to be applied without the others."""
    recipe = spec.recipe
    if recipe.train.gradient_checkpointing:
        yield Lever((("train.gradient_checkpointing", False),), -25.0, "nothing is computed twice; the same gradients")
    if recipe.train.micro_batch != "auto" and recipe.train.micro_batch < recipe.train.batch_size:
        yield Lever((("train.micro_batch", "auto"),), -5.0, "as many sequences at once as fit")
    yield Lever((("data.max_length", 2 * recipe.data.max_length),), 0.0, "longer samples are kept", True)
    if recipe.method.kind == "lora":
        yield Lever((("method.rank", 2 * recipe.method.rank),), 0.0, "adapters of twice the rank", True)
