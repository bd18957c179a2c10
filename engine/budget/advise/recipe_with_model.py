"""Checks a recipe against its model's config, without a hardware profile: what `recipes check` adds to the rules about
keys.

Try: `tunedeck recipes check lora`
"""

from __future__ import annotations

from engine.budget.advise.preflight import refuse_unsafe_recipe
from engine.budget.advise.staged_plan import planning_specs
from engine.errors import ConfigNotHereError, TunedeckError
from engine.spec.schema.profile import Device, Profile
from engine.spec.schema.recipe import Recipe
from engine.spec.schema.run import RunSpec

ANY_PROFILE = Profile(schema=1, name="any", device=Device(kind="cpu", memory_gib=1.0))
"""The hardware that a run spec needs, and that these checks do not look at."""


def problems_with_model(recipe: Recipe) -> list[str]:
    """Why a recipe, or a stage of it, cannot be trained with its model, a line for each reason: what is wrong, and the
    fix. Empty where the model's config is not on this machine."""
    found: list[str] = []
    for part in planning_specs(RunSpec(schema=1, name="check", profile=ANY_PROFILE, recipe=recipe)):
        try:
            refuse_unsafe_recipe(part.recipe)
        except ConfigNotHereError:
            continue
        except TunedeckError as error:
            found.append("; ".join(text for text in (error.found, error.fix) if text))
    return list(dict.fromkeys(found))
