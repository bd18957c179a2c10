"""Rules about hardware: across the keys of a profile, what a recipe needs of it, how a run is spread over devices, and
the devices that a start names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from engine.config.attention import FLASH_CHOICES, flash_kernels
from engine.config.files.document import Place, Problem, Problems
from engine.config.files.text import quoted
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile, RunSpec
from engine.errors import UsageError

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
        yield Problem(place, f'"single" with {count} devices', '"auto", "replicated" or "sharded" uses them', beside)
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


def accelerators_are_gpus(profile: Profile) -> Problems:
    if profile.nodes.accelerators is not None and profile.device.kind != "cuda":
        yield Problem(
            ("nodes", "accelerators"),
            f"{quoted(profile.nodes.accelerators)} with device.kind = {quoted(profile.device.kind)}",
            'device.kind = "cuda" is needed',
            (("device", "kind"),),
        )


def words_for_launchers_are_plain(profile: Profile) -> Problems:
    """These words become lines of a shell script, and a profile may come from someone else."""
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
            'kernels other than "eager" support dropout only on CUDA devices; set model.attention = '
            '"eager", or leave out model.attention_dropout',
        )
    yield from _bfloat16_is_native(profile, recipe)
    yield from _flash_runs_on_the_gpu(profile, recipe)


def _bfloat16_is_native(profile: Profile, recipe: Recipe) -> Problems:
    """GPUs before Ampere compute bf16 in software, many times slower."""
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
    accelerators_are_gpus,
    words_for_launchers_are_plain,
)


def problems_of_profile(profile: Profile) -> list[Problem]:
    return [problem for rule in PROFILE_RULES for problem in rule(profile)]


class MergedParallel(NamedTuple):
    """The profile with the recipe's [parallel] merged in, a notice for the user, and the text for
    `provenance.parallel`; both texts may be empty."""

    profile: Profile
    notice: str
    provenance: str


def device_count(profile: Profile) -> int:
    """Those of all machines together."""
    return profile.device.count * profile.nodes.count


def merge_parallel(profile: Profile, recipe: Recipe) -> MergedParallel:
    """With one device the strategy is "single", with a notice if the recipe asks for several devices."""
    asked = {key: value for key, value in recipe.parallel.model_dump(exclude_none=True).items() if value != "auto"}
    if device_count(profile) == 1:
        return MergedParallel(_on_one_device(profile), _one_device_notice(profile, asked), "")
    own = profile.parallel.model_dump()
    changes = {key: value for key, value in asked.items() if value != own[key]}
    replaced = [f"{key} = {quoted(value)} (profile: {quoted(own[key])})" for key, value in changes.items()]
    parallel = profile.parallel.model_copy(update=changes)
    return MergedParallel(profile.model_copy(update={"parallel": parallel}), "", ", ".join(replaced))


def _on_one_device(profile: Profile) -> Profile:
    if profile.parallel.strategy != "auto":
        return profile
    parallel = profile.parallel.model_copy(update={"strategy": "single"})
    return profile.model_copy(update={"parallel": parallel})


def _one_device_notice(profile: Profile, asked: dict[str, Any]) -> str:
    if asked.get("strategy", "single") == "single" and asked.get("sequence", 1) == 1 and "shard" not in asked:
        return ""
    written = ", ".join(f"{key} = {quoted(value)}" for key, value in asked.items())
    return f"the recipe's [parallel] ({written}) is not used: profile {profile.name} has one device"


def problems_of_parallel(profile: Profile, recipe: Recipe) -> list[Problem]:
    """Problems of the recipe's [parallel] on the profile's devices; their places are in the recipe."""
    merged = merge_parallel(profile, recipe).profile
    written = recipe.parallel.model_dump(exclude_none=True)
    found = [*strategy_matches_count(merged), *sequence_divides_devices(merged)]
    return [problem for problem in found if problem.place[-1] in written]


def parse_device_indices(text: str | None) -> list[int]:
    """Parse device indices such as `2,3`; None gives an empty list. Raises UsageError for any other text."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(parts)) != len(parts):
        raise UsageError(f"--devices {text!r} is not a list of devices", expected="different indices such as 0 or 2,3")
    return [int(part) for part in parts]


def require_matching_devices(spec: RunSpec) -> None:
    """Raise UsageError where `--devices` does not match the kind or the number of the profile's devices."""
    given, count = spec.limits.devices, spec.profile.device.count
    if given and spec.profile.device.kind != "cuda":
        raise UsageError(
            f"--devices selects GPUs, but profile {spec.profile.name!r} has device.kind = {spec.profile.device.kind!r}",
            fix="leave out --devices, or choose a profile for GPUs",
        )
    if given and len(given) != count:
        raise UsageError(
            f"--devices lists {len(given)}, but profile {spec.profile.name!r} has device.count = {count}",
            expected=f"{count} {'index' if count == 1 else 'indices'}",
            fix=f"list {count}, or choose another profile",
        )


def require_launcher(spec: RunSpec) -> None:
    """Raise UsageError for a profile of several machines: Tunedeck starts no process on another machine."""
    machines = spec.profile.nodes.count
    if machines > 1:
        raise UsageError(
            f"profile {spec.profile.name!r} has {machines} machines, but this command starts processes on one",
            fix="write a script that starts the run on all machines: tunedeck launch with the same -p and -r",
        )
