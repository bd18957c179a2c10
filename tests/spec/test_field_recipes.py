"""The shipped recipes of real-world systems: the checker reports no problem, and each is planned for the profile that
it names and fits there."""

from __future__ import annotations

import pytest

from engine.budget.advise.plan import make_plan
from engine.budget.advise.preflight import refuse_unsafe
from engine.budget.advise.staged_plan import planning_specs
from engine.budget.advise.strategy import settle_parallel
from engine.spec.check.unsupported import refuse_unsupported
from engine.spec.files.find import find_spec_file
from engine.spec.load import load_spec_file, resolve
from engine.spec.schema.recipe import Recipe
from engine.spec.schema.run import RunSpec
from engine.spec.stages import enabled_stages

PLANNED_GIB = {
    "qwen2.5-7b-lora": {"": 19.54},
    "qwen2-vl-detect": {"language": 27.60, "vision": 40.36, "two-stage": 27.60, "joint": 34.40},
    "expert-merge": {"expert-truthfulqa": 16.73, "expert-qmsum": 16.73},
    "qwen3-4b-longcontext": {"": 33.24},
    "mixtral-8x7b-attention": {"": 130.49},
}
"""Memory of torch's tensors on a device by stage, in GiB, as `tunedeck plan` prints it for the recipe's own profile;
without the stages that have no closed form."""


def resolved(name: str) -> RunSpec:
    recipe = load_spec_file("recipe", find_spec_file("recipe", name))
    assert isinstance(recipe, Recipe) and recipe.profile is not None
    return settle_parallel(resolve(recipe.profile, name).spec).spec


@pytest.mark.parametrize("name", PLANNED_GIB)
def test_a_recipe_of_the_field_fits_the_profile_that_it_names(name: str) -> None:
    spec = resolved(name)
    refuse_unsupported(spec)
    refuse_unsafe(spec)
    stages = [stage.name for _, stage in enabled_stages(spec.recipe) if stage.kind == "train"] or [""]
    specs = zip(stages, planning_specs(spec), strict=True)
    plans = {stage: make_plan(part) for stage, part in specs if stage in PLANNED_GIB[name]}
    assert all(plan.verdict == "fits" for plan in plans.values())
    found = {stage: plan.peak_bytes / 2**30 for stage, plan in plans.items()}
    assert found == pytest.approx(PLANNED_GIB[name], rel=0.02)
