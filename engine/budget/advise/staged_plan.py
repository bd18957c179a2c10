"""Plans a staged run: one plan for each enabled stage that trains, made before any of them starts.

A stage that starts from an earlier one is planned on the model at the start of that chain, which has the same shapes.

Try: `tunedeck plan -p demo -r RECIPE` with a recipe that has [[stages]].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.budget.advise.plan import Plan, Verdict, make_plan
from engine.budget.advise.preflight import checkpoints_bytes
from engine.budget.architecture.assembled import ASSEMBLED_PREFIX
from engine.budget.architecture.lookup import find_architecture
from engine.errors import ConfigNotHereError, UnknownArchitectureError
from engine.spec.schema.recipe import Stage
from engine.spec.schema.run import RunSpec
from engine.spec.stages import enabled_stages, origins, stage_spec, weights_chain

WORST: dict[Verdict, int] = {"fits": 0, "fits_smaller": 1, "does_not_fit": 2}


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage."""

    number: int
    name: str
    kind: str
    spec: RunSpec
    """The stage's run spec with the model it is planned on."""
    plan: Plan | None
    """None where the model's memory cannot be predicted."""
    unknown: str
    """Why there is no plan."""
    disk_bytes: int
    """Most bytes that the stage's checkpoints take on disk."""

    def as_json(self) -> dict[str, Any]:
        """The stage's entry in plan.json and `tunedeck plan --json`."""
        return {
            "name": self.name,
            "kind": self.kind,
            "verdict": self.plan.verdict if self.plan else None,
            "peak_bytes": self.plan.peak_bytes if self.plan else None,
            "disk_bytes": self.disk_bytes,
            "plan": self.plan.as_json() if self.plan else None,
        }


@dataclass(frozen=True)
class StagedPlan:
    """The plans of all enabled stages."""

    stages: list[StagePlan]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any stage; stages without a plan do not count."""
        verdicts: list[Verdict] = [stage.plan.verdict for stage in self.stages if stage.plan]
        return max(verdicts, key=WORST.__getitem__, default="fits")

    @property
    def worst(self) -> StagePlan | None:
        """The stage with the least memory left; None if no stage has a plan."""
        planned = [stage for stage in self.stages if stage.plan]
        return min(planned, key=lambda stage: stage.plan.margin_bytes if stage.plan else 0, default=None)

    def as_json(self) -> dict[str, Any]:
        """The document of plan.json and of `tunedeck plan --json`."""
        return {"verdict": self.verdict, "stages": [stage.as_json() for stage in self.stages]}


def make_staged_plan(spec: RunSpec) -> StagedPlan:
    """Plan every enabled stage of a run. Raises UsageError when a model folder does not exist."""
    return StagedPlan([_plan_stage(spec, number, stage) for number, stage in enabled_stages(spec.recipe)])


def _plan_stage(spec: RunSpec, number: int, stage: Stage) -> StagePlan:
    if stage.kind == "assemble":
        return StagePlan(number, stage.name, stage.kind, spec, None, "copies tensors on the host", 0)
    planned_on = planning_spec(spec, stage)
    try:
        plan, unknown = make_plan(planned_on), ""
        disk_bytes = checkpoints_bytes(find_architecture(planned_on), planned_on)
    except (UnknownArchitectureError, ConfigNotHereError) as error:
        plan, unknown, disk_bytes = None, error.found, 0
    return StagePlan(number, stage.name, stage.kind, planned_on, plan, unknown, disk_bytes)


def planning_spec(spec: RunSpec, stage: Stage) -> RunSpec:
    """The run spec of a stage, in which the model is the one at the start of its chain of stages: the recipe's own, or
    the mixture that is going to be assembled from models of the same shape."""
    alone = stage_spec(spec, stage)
    first = list(weights_chain(spec.recipe, stage))[-1]
    start = spec.recipe.model if first.kind == "assemble" else stage_spec(spec, first).recipe.model
    model_id = start.id
    if first.kind == "assemble":
        model_id = f"{ASSEMBLED_PREFIX}{len(origins(first))}:{first.experts_per_token or 2}:{start.id}"
    changes = {"id": model_id, "revision": start.revision, "init": start.init, "adapter": None}
    model = alone.recipe.model.model_copy(update=changes)
    return alone.model_copy(update={"recipe": alone.recipe.model_copy(update={"model": model})})
