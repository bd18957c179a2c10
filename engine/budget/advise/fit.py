"""Searches for changes that make a run fit, cheapest first; for a run that fits, for uses of its unused memory.

A lever is a change of recipe keys with its cost in speed and quality. The search tries sets of levers in order of cost
and returns those whose plan fits, except sets that contain a smaller one that fits. Costs in speed are rough estimates
from common practice on GPUs, good enough for ranking; they are not measurements.

Try: `tunedeck fit -p 24gb -r full --set model.id=Qwen/Qwen2.5-7B`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from engine.budget.advise.plan import Plan, make_plan
from engine.budget.architecture.lookup import find_architecture
from engine.spec.check.hardware_rules import problems_on_device
from engine.spec.check.rules import state_has_a_dtype
from engine.spec.files.known_lengths import known_longest
from engine.spec.schema.recipe import Recipe
from engine.spec.schema.run import RunSpec

LEARNING_COST = 100.0
"""Added to the cost of every lever that changes what is learned, so that such advice comes last."""
MAX_LEVERS = 4
MAX_SUGGESTIONS = 5
FEWEST_IMAGE_TOKENS = 64
"""Images of fewer tokens are not suggested."""
SHORTEST = 256
"""Sequences shorter than this are not suggested."""


@dataclass(frozen=True, eq=False)
class Lever:
    """One change of recipe keys and its cost. Levers are compared by identity, because values may be lists."""

    changes: tuple[tuple[str, Any], ...]
    slower_percent: float
    note: str
    changes_learning: bool = False
    quality: float = 0.0
    """How much quality the change may cost; ranks levers of equal cost in speed."""

    @property
    def cost(self) -> float:
        """The cost by which the search sorts levers."""
        return self.slower_percent + self.quality + (LEARNING_COST if self.changes_learning else 0.0)

    @property
    def keys(self) -> frozenset[str]:
        """The recipe keys that the lever changes."""
        return frozenset(key for key, _ in self.changes)


@dataclass(frozen=True)
class Suggestion:
    """Levers that together make the run fit (or use its unused memory), and the plan with these changes."""

    levers: tuple[Lever, ...]
    changes: dict[str, tuple[Any, Any]]
    """Recipe key = (before, after)."""
    plan: Plan

    @property
    def changes_learning(self) -> bool:
        """Whether the changes affect what the run learns, or the data it learns from."""
        return any(lever.changes_learning for lever in self.levers)

    def as_json(self) -> dict[str, Any]:
        """One entry of `tunedeck fit --json`."""
        return {
            "changes": {key: {"from": before, "to": after} for key, (before, after) in self.changes.items()},
            "peak_bytes": self.plan.peak_bytes,
            "margin_bytes": self.plan.margin_bytes,
            "micro_batch": self.plan.micro_batch,
            "slower_percent": sum(lever.slower_percent for lever in self.levers),
            "changes_learning": self.changes_learning,
            "notes": [lever.note for lever in self.levers],
        }


@dataclass(frozen=True)
class Advice:
    """The plan of a run, suggestions that make it fit, and suggestions that use its unused memory."""

    plan: Plan
    suggestions: list[Suggestion]
    room: list[Suggestion]

    def as_json(self) -> dict[str, Any]:
        """The document of `tunedeck fit --json`."""
        return {
            "plan": self.plan.as_json(),
            "suggestions": [suggestion.as_json() for suggestion in self.suggestions],
            "room": [suggestion.as_json() for suggestion in self.room],
        }


def advise(spec: RunSpec, *, longest: int | None = None) -> Advice:
    """Plan a run and search for suggestions. Raises the errors of `make_plan`."""
    longest = longest or known_longest(spec.recipe)
    plan = make_plan(spec, longest=longest)
    if plan.verdict == "fits":
        return Advice(plan, [], list(_room(spec, longest)))
    return Advice(plan, _search(spec, list(_levers(spec, plan)), longest), [])


def with_changes(spec: RunSpec, changes: dict[str, Any]) -> RunSpec:
    """The run spec with other values under dotted recipe keys such as "train.loss"."""
    recipe = spec.recipe
    for key, value in changes.items():
        table, _, name = key.partition(".")
        part = getattr(recipe, table).model_copy(update={name: value})
        recipe = recipe.model_copy(update={table: part})
    return spec.model_copy(update={"recipe": recipe})


def value_of(recipe: Recipe, key: str) -> Any:
    """The value under a dotted recipe key."""
    table, _, name = key.partition(".")
    return getattr(getattr(recipe, table), name)


def _levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    """The levers that apply to this run and that its hardware supports."""
    for lever in (*_free_levers(spec, plan), *_learning_levers(spec, plan)):
        if not any(problems_on_device(spec.profile, with_changes(spec, dict(lever.changes)).recipe)):
            yield lever


def _free_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    """Levers that change nothing about what is learned."""
    recipe, train, cuda = spec.recipe, spec.recipe.train, spec.profile.device.kind == "cuda"
    if train.micro_batch != "auto" and plan.micro_batch > 1:
        yield Lever((("train.micro_batch", "auto"),), 2.0, "the same batch in smaller pieces")
    if train.loss == "plain":
        yield Lever((("train.loss", "auto"),), 1.0, "logits are made and dropped in chunks; the same loss")
    if not train.gradient_checkpointing:
        note = "activations are computed again in backward; the same gradients"
        yield Lever((("train.gradient_checkpointing", True),), 30.0, note)
    if not train.activation_offload and spec.profile.device.kind != "cpu":
        note = "activations wait in host memory until backward; the same gradients"
        yield Lever((("train.activation_offload", True),), 45.0, note)
    if not train.optimizer_offload and spec.profile.device.kind != "cpu":
        note = "optimizer state in host memory between steps; the same updates"
        yield Lever((("train.optimizer_offload", True),), 35.0, note)
    if recipe.method.kind == "lora" and recipe.method.adapter_dtype == "float32" and plan.config.base_bytes < 4:
        note = "adapters in bf16: half of their bytes and gradients; updates are rounded as train.rounding says"
        yield Lever((("method.adapter_dtype", "bfloat16"),), 0.0, note, quality=8.0)
    if plan.config.trains_in_bfloat16:
        yield from _rounding_levers(spec)
    if cuda and train.optimizer == "adamw" and spec.profile.parallel.strategy != "sharded":  # refused in shards
        note = "optimizer state in 8 bits (bitsandbytes): moments are rounded to one of 256 values"
        if plan.config.trains_in_bfloat16 and train.rounding == "exact":
            note += "; weights stay exact"
        yield Lever((("train.optimizer", "adamw_8bit"),), 2.0, note, quality=5.0)
    if cuda and recipe.method.kind == "lora" and recipe.model.quantize == "none":
        note = "the frozen base in 4 bits (nf4, bitsandbytes)"
        yield Lever((("model.quantize", "nf4"),), 25.0, note, quality=15.0)


def _rounding_levers(spec: RunSpec) -> Iterator[Lever]:
    """Levers that give up exactness of weights that are trained in bf16, or of their optimizer's state."""
    train = spec.recipe.train
    by_chance = "rounded up or down by chance: right on average, each step off by less than 1/128 of itself"
    has_state = train.optimizer == "adamw" or (train.optimizer == "sgd" and train.momentum > 0)
    stochastic = ("train.rounding", "stochastic")
    narrow = ("train.state_dtype", "bfloat16")
    if train.rounding == "exact":
        yield Lever((stochastic,), 1.0, f"2 bytes a weight less: weights {by_chance}", quality=4.0)
    if has_state and train.state_dtype == "float32":
        yield Lever((narrow,), 2.0, f"4 bytes a weight less with adamw: moments {by_chance}", quality=4.0)


def _learning_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    """Levers that change what is learned; they cost more than all others and are marked in the advice."""
    method, longest = spec.recipe.method, spec.recipe.data.max_length
    if method.kind == "full":
        changes: list[tuple[str, Any]] = [("method.kind", "lora"), ("method.train_only", []), ("method.freeze", [])]
        kept = tuple(change for change in changes if value_of(spec.recipe, change[0]) != change[1])
        yield Lever(kept, 0.0, "adapters instead of all weights; raise the learning rate about tenfold", True, 20.0)
    rank = method.rank // 2
    while method.kind == "lora" and rank >= 4:
        yield Lever((("method.rank", rank),), 0.0, f"rank {rank}: smaller adapters", True, 10.0 * method.rank / rank)
        rank //= 2
    yield from _image_levers(spec, plan)
    length = longest // 2
    while length >= SHORTEST:
        note = f"samples longer than {length} tokens are dropped or cut"
        yield Lever((("data.max_length", length),), 0.0, note, True, 15.0 * longest / length)
        length //= 2


def _image_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    """Levers for smaller images, if the model takes images of any size."""
    encoder = find_architecture(spec).vision_encoder
    if encoder is None or encoder.patches is not None:
        return
    tokens = plan.image_tokens // 2
    while tokens >= FEWEST_IMAGE_TOKENS:
        note = f"images of at most {tokens} tokens each: larger ones are scaled down"
        changes = (("data.image_max_pixels", tokens * encoder.pixels_per_token),)
        yield Lever(changes, 0.0, note, True, 12.0 * plan.image_tokens / tokens)
        tokens //= 2


def _search(spec: RunSpec, levers: list[Lever], longest: int | None) -> list[Suggestion]:
    """The cheapest sets of levers whose plan fits, in order of cost; a set that contains an earlier one is skipped."""
    found: list[tuple[frozenset[Lever], Suggestion]] = []
    for chosen in _sets_by_cost(levers):
        if len(found) == MAX_SUGGESTIONS or any(earlier <= set(chosen) for earlier, _ in found):
            continue
        if any(state_has_a_dtype(with_changes(spec, _changes(chosen)).recipe)):
            continue  # an 8-bit optimizer beside state in bf16
        suggestion = _try(spec, chosen, longest)
        if suggestion.plan.verdict == "fits":
            found.append((frozenset(chosen), suggestion))
    return [suggestion for _, suggestion in found]


def _sets_by_cost(levers: list[Lever]) -> list[tuple[Lever, ...]]:
    """Every set of up to MAX_LEVERS levers that change different keys, in order of cost."""
    sets = [
        chosen
        for count in range(1, MAX_LEVERS + 1)
        for chosen in combinations(levers, count)
        if len(frozenset[str]().union(*(lever.keys for lever in chosen))) == sum(len(lever.keys) for lever in chosen)
    ]
    return sorted(sets, key=lambda chosen: (sum(lever.cost for lever in chosen), len(chosen)))


def _try(spec: RunSpec, levers: tuple[Lever, ...], longest: int | None) -> Suggestion:
    """Apply these levers and plan the run again."""
    changes = _changes(levers)
    changed = with_changes(spec, changes)
    length = min(longest, changed.recipe.data.max_length) if longest else None
    moved = {key: (value_of(spec.recipe, key), value) for key, value in changes.items()}
    return Suggestion(levers, moved, make_plan(changed, longest=length))


def _changes(levers: tuple[Lever, ...]) -> dict[str, Any]:
    """The recipe keys that these levers change, with their new values."""
    return {key: value for lever in levers for key, value in lever.changes}


def _room(spec: RunSpec, longest: int | None) -> Iterator[Suggestion]:
    """Suggestions for a run that fits: no recomputation, a larger micro-batch, longer sequences, a higher rank."""
    for lever in _room_levers(spec):
        suggestion = _try(spec, (lever,), None if "data.max_length" in lever.keys else longest)
        if suggestion.plan.verdict == "fits":
            yield suggestion


def _room_levers(spec: RunSpec) -> Iterator[Lever]:
    """The levers that use unused memory; each is tried alone."""
    recipe = spec.recipe
    if recipe.train.gradient_checkpointing:
        yield Lever((("train.gradient_checkpointing", False),), -25.0, "nothing is computed twice; the same gradients")
    if recipe.train.micro_batch != "auto" and recipe.train.micro_batch < recipe.train.batch_size:
        yield Lever((("train.micro_batch", "auto"),), -5.0, "as many sequences at once as fit")
    yield Lever((("data.max_length", 2 * recipe.data.max_length),), 0.0, "longer samples are kept", True)
    if recipe.method.kind == "lora":
        yield Lever((("method.rank", 2 * recipe.method.rank),), 0.0, "adapters of twice the rank", True)
