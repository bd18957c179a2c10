"""Rules across the keys of a hardware profile, and rules about the hardware that a recipe needs.

As in `engine.spec.check.rules`, each rule is a small function that yields problems; a table at the end lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from engine.spec.attention_kernels import FLASH_CHOICES, flash_kernels
from engine.spec.files.document import Problem, Problems
from engine.spec.files.lines import Place
from engine.spec.files.text import quoted
from engine.spec.schema.profile import Profile
from engine.spec.schema.recipe import Recipe

PLAIN_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:,@+-]*")
"""Text that is safe in a shell script without quotes: names of partitions and clouds, times such as 2-12:00:00."""

AMPERE = 8.0
"""The first compute capability whose matrix units have bf16."""


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
            place, f'"single" with {count} devices', '"auto", "replicated" or "sharded" uses them', beside
        )
    if count == 1 and strategy not in ("auto", "single"):
        allowed = '"auto" or "single", or device.count above 1'
        yield Problem(place, f"{quoted(strategy)} with one device", allowed, beside)


def sequence_divides_devices(profile: Profile) -> Problems:
    count, sequence = profile.device.count * profile.nodes.count, profile.parallel.sequence
    if count % sequence:
        yield Problem(
            ("parallel", "sequence"),
            f"{sequence} with {count} devices",
            f"a divisor of {count} is allowed",
            (("device", "count"),),
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
    """Yield a problem for each value of [nodes] that is not a plain word: such values become lines of a shell
    script, and a profile may come from someone else."""
    for key in ("partition", "account", "time_limit", "cloud", "accelerators"):
        value = getattr(profile.nodes, key)
        if value is not None and not PLAIN_WORD.fullmatch(value):
            yield Problem(
                ("nodes", key), quoted(value), "letters, digits and any of . _ : , @ + - are allowed, without spaces"
            )


def problems_on_device(profile: Profile, recipe: Recipe) -> Problems:
    """Problems of a recipe on the hardware of a profile; the place of each problem is in the recipe."""
    needs_cuda: dict[Place, tuple[str, tuple[str, ...]]] = {
        ("model", "quantize"): (recipe.model.quantize, ("nf4",)),
        ("model", "attention"): (recipe.model.attention, FLASH_CHOICES),
        ("train", "optimizer"): (recipe.train.optimizer, ("adamw_8bit",)),
        ("train", "loss"): (recipe.train.loss, ("fused",)),
    }
    for place, (written, choices) in needs_cuda.items():
        if written in choices and profile.device.kind != "cuda":
            yield Problem(
                place,
                f"{quoted(written)} on device.kind = {quoted(profile.device.kind)}",
                "it needs a CUDA device; choose another value or profile",
            )
    if recipe.model.attention_dropout == "keep" and recipe.model.attention != "eager" and profile.device.kind != "cuda":
        yield Problem(
            ("model", "attention_dropout"),
            f'"keep" on device.kind = {quoted(profile.device.kind)}',
            'kernels other than "eager" drop on CUDA devices only; set model.attention = "eager", or leave it out',
        )
    yield from _bfloat16_is_native(profile, recipe)
    yield from _flash_runs_on_the_gpu(profile, recipe)


def _bfloat16_is_native(profile: Profile, recipe: Recipe) -> Problems:
    """Yield a problem for bf16 on GPUs before Ampere, which compute it in software, many times slower."""
    capability = profile.device.compute_capability
    if profile.device.kind != "cuda" or capability is None or capability >= AMPERE:
        return
    if recipe.model.dtype == "bfloat16":
        yield Problem(
            ("model", "dtype"),
            f'"bfloat16" on device.compute_capability = {capability:g}',
            f'it needs {AMPERE:g} or newer; "auto" or "float16" is allowed',
        )


def _flash_runs_on_the_gpu(profile: Profile, recipe: Recipe) -> Problems:
    """Yield a problem for flash attention that does not run on GPUs of the profile's compute capability."""
    capability, asked = profile.device.compute_capability, recipe.model.attention
    if profile.device.kind != "cuda" or capability is None or asked not in FLASH_CHOICES:
        return
    able = flash_kernels(capability)
    if asked in able or (asked == "flash" and able):
        return
    allowed = ", ".join(quoted(choice) for choice in ("auto", *able, "sdpa"))
    yield Problem(
        ("model", "attention"),
        f"{quoted(asked)} on device.compute_capability = {capability:g}, for which it has no kernels",
        f"one of these is allowed: {allowed}",
    )


PROFILE_RULES: tuple[Callable[[Profile], Iterable[Problem]], ...] = (
    reserve_within_memory,
    strategy_matches_count,
    sequence_divides_devices,
    cuda_facts_are_cuda,
    words_for_launchers_are_plain,
)


def problems_of_profile(profile: Profile) -> list[Problem]:
    """All problems of a hardware profile that can be found without a recipe."""
    return [problem for rule in PROFILE_RULES for problem in rule(profile)]
