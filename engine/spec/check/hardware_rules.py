"""Rules that span fields of a hardware profile, and what a recipe asks of the hardware.

Like `engine.spec.check.rules`: small functions that yield problems, gathered in a table at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from engine.spec.check.rules import Problems
from engine.spec.files.document import Problem
from engine.spec.files.lines import Place
from engine.spec.files.text import quoted
from engine.spec.schema.profile import Profile
from engine.spec.schema.recipe import Recipe

PLAIN_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:,@+-]*")
"""What may stand in a script without quotes: names of partitions and clouds, and times such as 2-12:00:00."""

AMPERE = 8.0
"""First compute capability with bf16 in its matrix units and with flash attention."""


def reserve_within_memory(profile: Profile) -> Problems:
    device = profile.device
    if device.reserve_gib >= device.memory_gib:
        yield Problem(
            ("device", "reserve_gib"),
            f"{device.reserve_gib:g} of memory_gib = {device.memory_gib:g}: nothing is left",
            f"less than {device.memory_gib:g} is allowed",
            (("device", "memory_gib"),),
        )


def strategy_matches_count(profile: Profile) -> Problems:
    count, strategy = profile.device.count * profile.nodes.count, profile.parallel.strategy
    place, beside = ("parallel", "strategy"), (("device", "count"), ("nodes", "count"))
    if count > 1 and strategy == "single":
        yield Problem(
            place, f'"single" with {count} devices', '"replicated" or "sharded" is needed to use them', beside
        )
    if count == 1 and strategy != "single":
        yield Problem(place, f"{quoted(strategy)} with one device", '"single", or device.count above 1', beside)


def sequence_divides_devices(profile: Profile) -> Problems:
    count, sequence = profile.device.count * profile.nodes.count, profile.parallel.sequence
    if count % sequence:
        yield Problem(
            ("parallel", "sequence"),
            f"{sequence} with {count} devices",
            f"a divisor of {count} is allowed",
            (("device", "count"),),
        )


def deepspeed_has_whole_sequences(profile: Profile) -> Problems:
    if profile.parallel.strategy == "deepspeed" and profile.parallel.sequence > 1:
        yield Problem(
            ("parallel", "sequence"),
            f'{profile.parallel.sequence} with strategy = "deepspeed"',
            '1 is allowed; strategy = "sharded" shares sequences, too',
            (("parallel", "strategy"),),
        )


def cuda_facts_are_cuda(profile: Profile) -> Problems:
    for key in ("compute_capability", "allocator"):
        if profile.device.kind != "cuda" and getattr(profile.device, key) is not None:
            yield Problem(
                ("device", key),
                f"{key} with kind = {quoted(profile.device.kind)}",
                'kind = "cuda" is needed',
                (("device", "kind"),),
            )


def words_for_launchers_are_plain(profile: Profile) -> Problems:
    """They become lines of a shell script, and a profile may come from someone else."""
    for key in ("partition", "account", "time_limit", "cloud", "accelerators"):
        value = getattr(profile.nodes, key)
        if value is not None and not PLAIN_WORD.fullmatch(value):
            yield Problem(
                ("nodes", key), quoted(value), "letters, digits and any of . _ : , @ + - are allowed, without spaces"
            )


def device_can(profile: Profile, recipe: Recipe) -> Problems:
    """What a recipe asks of the hardware, with places in the recipe."""
    needs_cuda: dict[Place, tuple[str, str]] = {
        ("model", "quantize"): (recipe.model.quantize, "nf4"),
        ("model", "attention"): (recipe.model.attention, "flash"),
        ("train", "optimizer"): (recipe.train.optimizer, "adamw_8bit"),
        ("train", "loss"): (recipe.train.loss, "fused"),
    }
    for place, (written, choice) in needs_cuda.items():
        if written == choice and profile.device.kind != "cuda":
            yield Problem(
                place,
                f"{quoted(choice)} on device.kind = {quoted(profile.device.kind)}",
                "it needs a CUDA device; choose another value or profile",
            )
    yield from _before_ampere(profile, recipe)
    if profile.parallel.strategy == "deepspeed":
        yield from _under_deepspeed(profile, recipe)


def _under_deepspeed(profile: Profile, recipe: Recipe) -> Problems:
    """What the extra does not do. Experts and vision towers are refused by `engine.budget.zero`, which knows models."""
    model, method, train = recipe.model, recipe.method, recipe.train
    answers = recipe.eval.samples > 0 or "exact_match" in recipe.eval.metrics
    narrow = model.dtype == "float16" or (model.dtype == "auto" and _lacks_bf16(profile))
    table: dict[Place, tuple[bool, Any, str]] = {
        ("model", "dtype"): (narrow, model.dtype, '"float32" is allowed, and "bfloat16" where the device has it'),
        ("model", "quantize"): (model.quantize != "none", model.quantize, '"none" is allowed'),
        ("method", "dora"): (method.dora, True, "false is allowed"),
        ("method", "also_train"): (bool(method.also_train), method.also_train, "adapters alone are trained"),
        ("train", "optimizer"): (train.optimizer not in ("adamw", "sgd"), train.optimizer, '"adamw" or "sgd"'),
        ("train", "optimizer_offload"): (train.optimizer_offload, True, "false is allowed"),
        ("train", "activation_offload"): (train.activation_offload, True, "false is allowed"),
        ("eval", "samples"): (
            answers and profile.parallel.shard == "parameters", recipe.eval.samples,
            '0 without the metric exact_match is allowed, or parallel.shard = "gradients"',
        ),
    }  # fmt: skip
    for place, (refused, written, instead) in table.items():
        if refused:
            fix = f'{instead}; parallel.strategy = "sharded" or "replicated" may do more'
            yield Problem(place, f'{quoted(written)} beside parallel.strategy = "deepspeed"', fix)


def _lacks_bf16(profile: Profile) -> bool:
    capability = profile.device.compute_capability
    return profile.device.kind == "cuda" and capability is not None and capability < AMPERE


def _before_ampere(profile: Profile, recipe: Recipe) -> Problems:
    """Turing and older multiply bf16 in software, many times slower, and have no kernels for flash attention."""
    capability = profile.device.compute_capability
    if profile.device.kind != "cuda" or capability is None or capability >= AMPERE:
        return
    needs_ampere = {
        ("model", "dtype"): (recipe.model.dtype, "bfloat16", '"auto" or "float16"'),
        ("model", "attention"): (recipe.model.attention, "flash", '"auto" or "sdpa"'),
    }
    for place, (written, choice, instead) in needs_ampere.items():
        if written == choice:
            yield Problem(
                place,
                f"{quoted(choice)} on device.compute_capability = {capability:g}",
                f"it needs {AMPERE:g} or newer; {instead} is allowed",
            )


PROFILE_RULES: tuple[Callable[[Profile], Iterable[Problem]], ...] = (
    reserve_within_memory,
    strategy_matches_count,
    sequence_divides_devices,
    deepspeed_has_whole_sequences,
    cuda_facts_are_cuda,
    words_for_launchers_are_plain,
)


def problems_of_profile(profile: Profile) -> list[Problem]:
    """Every rule a hardware profile breaks by itself."""
    return [problem for rule in PROFILE_RULES for problem in rule(profile)]
