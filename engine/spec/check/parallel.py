"""Merges a recipe's [parallel] over the profile's, and checks the result.

A run spec's profile holds the merged values, so that everything else reads them in one place. `strategy = "auto"` and
`sequence = "auto"` are decided later, from the memory plan (`engine.budget.advise.strategy`).

Try: `tunedeck plan -p demo-2 -r demo --set parallel.sequence=auto`
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.spec.check.hardware_rules import sequence_divides_devices, strategy_matches_count
from engine.spec.files.document import Problem
from engine.spec.files.text import quoted
from engine.spec.schema.profile import Profile
from engine.spec.schema.recipe import Recipe


class MergedParallel(NamedTuple):
    """A profile with the recipe's [parallel] merged into its own, a notice for the user, and the text for
    `provenance.parallel`; both texts may be empty."""

    profile: Profile
    notice: str
    provenance: str


def device_count(profile: Profile) -> int:
    """The number of devices of a profile, on all its machines together."""
    return profile.device.count * profile.nodes.count


def merge_parallel(profile: Profile, recipe: Recipe) -> MergedParallel:
    """Merge the recipe's [parallel] over the profile's. With one device the strategy is "single", with a notice if the
    recipe asks for several devices."""
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
    if asked.get("strategy", "single") == "single" and asked.get("sequence", 1) == 1:
        return ""
    written = ", ".join(f"{key} = {quoted(value)}" for key, value in asked.items())
    return f"the recipe's [parallel] ({written}) is left out: profile {profile.name} has one device"


def problems_of_parallel(profile: Profile, recipe: Recipe) -> list[Problem]:
    """The problems of the recipe's [parallel] on the devices of the profile; their places are in the recipe."""
    merged = merge_parallel(profile, recipe).profile
    written = recipe.parallel.model_dump(exclude_none=True)
    found = [*strategy_matches_count(merged), *sequence_divides_devices(merged)]
    return [problem for problem in found if problem.place[-1] in written]
