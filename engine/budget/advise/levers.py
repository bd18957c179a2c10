"""Levers: changes of recipe or profile keys that lower a run's memory, each with its cost in speed and quality, how
they are applied, and those that lower the peak of a given plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from engine.architecture.lookup import ModelFacts, find_facts
from engine.budget.advise.model_rules import refuse_with_model
from engine.budget.advise.plan import PLANNED_TILES, Plan, find_predictor, may_tile, recomputes_all
from engine.budget.predict.prediction import in_whole_samples
from engine.config.changes import Changes, value_of, with_changes
from engine.config.check.hardware_rules import device_count, problems_of_profile, problems_on_device
from engine.config.check.notes import refuse_unsupported
from engine.config.check.rules import problems_of_recipe
from engine.config.files.caches import keeps_all_lengths
from engine.config.schema.run import RunSpec
from engine.errors import NotSimulatedError, TunedeckError, UsageError


def breaks_a_rule(spec: RunSpec) -> bool:
    """Whether a rule of `recipes check` or `profiles check`, or one about both together, is violated."""
    of_files = any(problems_of_recipe(spec.recipe)) or any(problems_of_profile(spec.profile))
    return of_files or any(problems_on_device(spec.profile, spec.recipe))


def is_refused(spec: RunSpec, facts: ModelFacts) -> bool:
    """Whether `plan` and `train` would refuse a run spec: because it breaks a rule (`breaks_a_rule`), needs a feature
    that this version lacks, or would compute wrong results or train nothing with its model (`facts`)."""
    if breaks_a_rule(spec):
        return True
    try:
        refuse_unsupported(spec)
        refuse_with_model(spec, facts)
    except TunedeckError:
        return True
    return False


LEARNING_COST = 10_000.0
"""Added to the cost of each lever that changes the training result, so that sets with the fewest such levers come
first."""
FEWEST_IMAGE_TOKENS = 64
SHORTEST = 256
"""Shorter sequences, in tokens, are not suggested."""
LOWEST_RANK = 4


@dataclass(frozen=True, eq=False)
class Lever:
    """A change of one or several keys, and its cost. Levers are compared by identity, because values may be lists."""

    changes: tuple[tuple[str, Any], ...]
    slower_percent: float
    """Rough estimate of a step; negative if it is faster."""
    note: str
    changes_learning: bool = False
    """What the run learns, or the data it learns from."""
    changes_arithmetic: bool = False
    """Lower precision or other rounding: results differ by more than the order of summation explains."""
    timed: bool = False
    """The model of time predicts the effect on a step, where it knows the device's speed; `slower_percent` then only
    orders the search."""
    quality: float = 0.0
    """Rough estimate of lost quality, as percent that `cost` adds to `slower_percent`."""

    @property
    def cost(self) -> float:
        """By which the search sorts levers."""
        return self.slower_percent + self.quality + (LEARNING_COST if self.changes_learning else 0.0)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for key, _ in self.changes)


def levers_of(spec: RunSpec, plan: Plan, facts: ModelFacts) -> list[Lever]:
    """All levers for a run, including some that its other settings or its hardware rule out; the search tests each."""
    return [
        *_micro_batch_levers(spec, plan), *_tile_levers(spec, facts), *_offload_levers(spec, plan),
        *_parallel_levers(spec), *_arithmetic_levers(spec, plan), *_learning_levers(spec, plan, facts),
    ]  # fmt: skip


def _micro_batch_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    train = spec.recipe.train
    if train.micro_batch != "auto" and plan.micro_batch > 1:
        yield Lever((("train.micro_batch", "auto"),), 2.0, "the same batch in smaller micro-batches", timed=True)
    if train.loss == "plain":
        yield Lever((("train.loss", "auto"),), 1.0, "logits are computed and freed in chunks; the same loss")
    if not recomputes_all(train.gradient_checkpointing):
        note = "activations are recomputed in the backward pass; the same gradients"
        yield Lever((("train.gradient_checkpointing", True),), 30.0, note, timed=True)


def _tile_levers(spec: RunSpec, facts: ModelFacts) -> Iterator[Lever]:
    if may_tile(spec, facts.architecture):
        note = f"feed-forward blocks in {PLANNED_TILES} pieces of each sequence; the same gradients"
        yield Lever((("train.mlp_tiles", PLANNED_TILES),), 12.0, note, timed=True)


def _offload_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    """Offloads switched on; or off, if the host's memory is too small for the run's offloads."""
    offloads = {
        "train.activation_offload": (
            45.0,
            ("activations are kept in host memory until the backward pass; the same gradients"),
        ),
        "train.optimizer_offload": (35.0, "optimizer state in host memory between steps; the same updates"),
    }
    for key, (slower, note) in offloads.items():
        if value_of(spec, key) and not plan.host_fits:
            yield Lever(((key, False),), 0.0, "what does not fit in host memory stays on the device")
        elif not value_of(spec, key) and spec.profile.device.kind != "cpu":
            yield Lever(((key, True),), slower, note, timed=key == "train.activation_offload")


def _parallel_levers(spec: RunSpec) -> Iterator[Lever]:
    """For several devices: sharded instead of replicated weights, sharded parameters, and sequence parallelism."""
    devices, parallel = device_count(spec.profile), spec.profile.parallel
    if devices == 1:
        return
    if parallel.strategy == "replicated":
        changes: tuple[tuple[str, Any], ...] = (("parallel.strategy", "sharded"),)
        if parallel.shard != "parameters":
            changes += (("parallel.shard", "parameters"),)
        note = "each device holds part of the weights, gradients and optimizer state; the same updates"
        yield Lever(changes, 20.0, note)
    elif parallel.shard == "gradients":
        note = "weights are gathered for every use; the same updates"
        yield Lever((("parallel.shard", "parameters"),), 15.0, note)
    for size in range(parallel.sequence + 1, devices + 1):
        if devices % size == 0:
            note = f"{size} devices share each sequence; the same gradients"
            yield Lever((("parallel.sequence", size),), 10.0 + size, note)


def _arithmetic_levers(spec: RunSpec, plan: Plan) -> Iterator[Lever]:
    """Levers that lower the precision of numbers or change how they are rounded."""
    method, train, wide = spec.recipe.method, spec.recipe.train, plan.config.base_bytes == 4
    if method.adapter_dtype == "float32" and not wide:
        note = (
            "adapters in bf16: half the memory of adapters and their gradients; updates are rounded as set by "
            "train.rounding"
        )
        yield Lever((("method.adapter_dtype", "bfloat16"),), 0.0, note, changes_arithmetic=True, quality=8.0)
    by_chance = "rounded up or down at random: exact on average, each step off by less than 1/128 of its value"
    rounds = plan.config.trains_in_bfloat16 or not wide
    if rounds and train.rounding == "exact":
        note = f"2 bytes less per weight: weights trained in bf16 are {by_chance}"
        yield Lever((("train.rounding", "stochastic"),), 1.0, note, changes_arithmetic=True, quality=4.0)
    if rounds and train.state_dtype == "float32":
        note = f"4 bytes less per weight with adamw, for weights trained in bf16: moments {by_chance}"
        yield Lever((("train.state_dtype", "bfloat16"),), 2.0, note, changes_arithmetic=True, quality=4.0)
    if train.optimizer == "adamw":
        note = "optimizer state in 8 bits (bitsandbytes): moments are rounded to one of 256 values"
        if plan.config.trains_in_bfloat16 and train.rounding == "exact":
            note += "; weights stay exact"
        yield Lever((("train.optimizer", "adamw_8bit"),), 2.0, note, changes_arithmetic=True, quality=5.0)
    if spec.recipe.model.quantize == "none":
        note = "the frozen base in 4 bits (nf4, bitsandbytes)"
        yield Lever((("model.quantize", "nf4"),), 25.0, note, changes_arithmetic=True, quality=15.0)


def _learning_levers(spec: RunSpec, plan: Plan, facts: ModelFacts) -> Iterator[Lever]:
    """Yield levers that change the training result: LoRA instead of full fine-tuning, lower ranks, smaller images,
    shorter sequences."""
    method, longest = spec.recipe.method, plan.length
    if method.kind == "full":
        changes: list[tuple[str, Any]] = [("method.kind", "lora"), ("method.train_only", []), ("method.freeze", [])]
        kept = tuple(change for change in changes if value_of(spec, change[0]) != change[1])
        note = "adapters instead of all weights; raise the learning rate about ten times"
        yield Lever(kept, 0.0, note, True, timed=True, quality=20.0)
    rank = method.rank // 2
    while method.kind == "lora" and rank >= LOWEST_RANK:
        note, quality = f"rank {rank}: smaller adapters", 10.0 * method.rank / rank
        yield Lever((("method.rank", rank),), 0.0, note, True, timed=True, quality=quality)
        rank //= 2
    yield from _image_levers(plan, facts)
    length = longest // 2
    while length >= SHORTEST:
        note = f"samples longer than {length} tokens are dropped or truncated"
        yield Lever((("data.max_length", length),), 0.0, note, True, timed=True, quality=15.0 * longest / length)
        length //= 2


def _image_levers(plan: Plan, facts: ModelFacts) -> Iterator[Lever]:
    """Yield levers for smaller images, if the model takes images of any size."""
    if plan.predictor == "simulated":
        return
    encoder = facts.require_architecture().vision_encoder
    if encoder is None or encoder.patches is not None:
        return
    tokens = plan.image_tokens // 2
    while tokens >= FEWEST_IMAGE_TOKENS:
        note = f"images of at most {tokens} tokens; larger ones are scaled down"
        changes = (("data.image_max_pixels", tokens * encoder.pixels_per_token),)
        yield Lever(changes, 0.0, note, True, quality=12.0 * plan.image_tokens / tokens)
        tokens //= 2


def room_levers(spec: RunSpec) -> Iterator[Lever]:
    """Levers that use the unused memory of a run that fits, each without the others."""
    recipe = spec.recipe
    if recipe.train.gradient_checkpointing not in (False, "auto"):
        note = "nothing is recomputed; the same gradients"
        yield Lever((("train.gradient_checkpointing", False),), -25.0, note, timed=True)
    if recipe.train.micro_batch != "auto" and recipe.train.micro_batch < recipe.sequences_per_step:
        yield Lever((("train.micro_batch", "auto"),), -5.0, "as many sequences per micro-batch as fit", timed=True)
    if not keeps_all_lengths(recipe):
        length = 2 * recipe.data.max_length
        yield Lever((("data.max_length", length),), 0.0, "longer samples are kept", True, timed=True)
    if recipe.method.kind == "lora":
        yield Lever((("method.rank", 2 * recipe.method.rank),), 0.0, "adapters with twice the rank", True, timed=True)


MOST_NAMED = 2
"""Changes named at most."""
LAST_RESORT = "a smaller model.id, or a device with more memory"
SIMULATE_CHANGES = "tunedeck advise with the same arguments simulates changes one by one"
"""Stands for the changes of a simulated run, if this machine keeps no simulation of a changed one."""


class _Offer(NamedTuple):
    """A change of keys that may lower the peak. `rows`: sequences of a micro-batch; None: as in the plan."""

    text: str
    changes: Changes
    rows: int | None = None


def lever_of(plan: Plan, spec: RunSpec) -> str:
    """Text for the user that names up to MOST_NAMED changes. All of them lower one component of the peak: the largest
    for which a change is known. If there is none, the text is LAST_RESORT, or SIMULATE_CHANGES for a simulated plan.

    Weights are tried first if they alone exceed capacity, or if adapters or buffers are the largest other component;
    else last.
    """
    facts = find_facts(spec.recipe.model)
    for component in _components(plan):
        offers = (offer for offer in _offers(component, plan, spec, facts) if _lowers(offer, plan, spec, facts))
        if named := [offer.text for offer in islice(offers, MOST_NAMED)]:
            return ", or ".join(named)
    return LAST_RESORT if plan.predictor == "closed_form" else SIMULATE_CHANGES


def _components(plan: Plan) -> list[str]:
    """Components of the peak that changes may lower, in the order to try them."""
    row = plan.prediction.phases[plan.prediction.deciding_phase]
    if plan.prediction.deciding_phase == "generate":
        return ["answers", "weights"]
    largest_first = sorted((name for name in row if name != "weights"), key=lambda name: -row[name])
    if row["weights"] > plan.capacity_bytes or largest_first[:1] in ([], ["adapters"], ["buffers"]):
        return ["weights", *largest_first]
    return [*largest_first, "weights"]


def _offers(component: str, plan: Plan, spec: RunSpec, facts: ModelFacts) -> Iterator[_Offer]:
    """Changes that may lower `component`, the cheapest first; whether they do is not checked here."""
    if component == "answers":
        yield from _of_answers(spec)
    elif component == "weights":
        yield _Offer('model.quantize = "nf4" (changes arithmetic)', {"model.quantize": "nf4"})
        yield _Offer('parallel.strategy = "sharded"', {"parallel.strategy": "sharded", "parallel.shard": "parameters"})
        yield _Offer('parallel.shard = "parameters"', {"parallel.shard": "parameters"})
    elif component == "optimizer":
        yield _Offer('train.optimizer = "adamw_8bit" (changes arithmetic)', {"train.optimizer": "adamw_8bit"})
        yield _Offer("train.optimizer_offload = true", {"train.optimizer_offload": True})
        yield from _of_trained(spec)
    elif component in ("gradients", "adapters"):
        yield from _of_trained(spec)
    elif component in ("activations", "recompute", "loss"):
        yield from _of_activations(plan, spec, facts, component)


def _of_answers(spec: RunSpec) -> Iterator[_Offer]:
    if "exact_match" not in spec.recipe.eval.metrics:
        yield _Offer("eval.samples = 0", {"eval.samples": 0})
    else:
        rest = [metric for metric in spec.recipe.eval.metrics if metric != "exact_match"] or ["loss"]
        yield _Offer("eval.samples = 0 without exact_match", {"eval.samples": 0, "eval.metrics": rest})
    fewer = max(1, spec.recipe.generate.max_new_tokens // 2)
    yield _Offer("a lower generate.max_new_tokens", {"generate.max_new_tokens": fewer})


def _of_trained(spec: RunSpec) -> Iterator[_Offer]:
    method = spec.recipe.method
    if method.kind == "full":
        yield _Offer('method.kind = "lora"', {"method.kind": "lora", "method.train_only": [], "method.freeze": []})
    elif method.rank > 1:
        yield _Offer("a lower method.rank", {"method.rank": method.rank // 2})


def _of_activations(plan: Plan, spec: RunSpec, facts: ModelFacts, component: str) -> Iterator[_Offer]:
    train = spec.recipe.train
    if component == "loss" and train.loss == "plain":
        yield _Offer('train.loss = "auto"', {"train.loss": "auto"})
    if not recomputes_all(train.gradient_checkpointing):
        yield _Offer("train.gradient_checkpointing = true", {"train.gradient_checkpointing": True})
        return
    if plan.micro_batch > 1:
        yield _Offer(
            f"train.micro_batch below {plan.micro_batch}", {}, rows=in_whole_samples(spec.recipe, plan.micro_batch // 2)
        )
        return
    if may_tile(spec, facts.architecture):
        yield _Offer(f"train.mlp_tiles = {PLANNED_TILES}", {"train.mlp_tiles": PLANNED_TILES})
    if (sequence := 2 * spec.profile.parallel.sequence) <= plan.ranks:
        yield _Offer(f"parallel.sequence = {sequence}", {"parallel.sequence": sequence})
    yield _Offer(f"data.max_length below {plan.length}", {"data.max_length": max(1, plan.length // 2)})


def _lowers(offer: _Offer, plan: Plan, spec: RunSpec, facts: ModelFacts) -> bool:
    """Whether an offer is worth showing: it changes something, `train` would accept the changed run, and that run has a
    lower predicted peak with the offer's micro-batch (else the plan's) and offloads that fit on the host. A change that
    would have to be simulated first is not."""
    changed = with_changes(spec, offer.changes)
    if (offer.changes and changed == spec) or is_refused(changed, facts):
        return False
    try:
        predictor = find_predictor(changed, facts, plan.row_targets)
    except (NotSimulatedError, UsageError):  # not simulated yet, or its simulation refused it
        return False
    rows, length = offer.rows or plan.micro_batch, min(plan.length, changed.recipe.data.max_length)
    found = predictor.predict(rows, length)
    return found.device_bytes < plan.prediction.device_bytes and predictor.host_fits(rows, length)
