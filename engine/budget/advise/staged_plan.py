"""Plans a staged run: verdict, memory and disk of each enabled stage, before any of them starts.

A stage that starts from an earlier stage is planned with the model at the start of that chain of stages, which has the
same shapes.

Try: `tunedeck plan -p demo -r RECIPE` with a recipe that has [[stages]].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.budget.advise.plan import Plan, Verdict, make_plan
from engine.budget.advise.stage_memory import (
    device_bytes_of_hidden_router,
    disk_bytes_of_assembly,
    disk_bytes_of_training,
    host_bytes_of_assembly,
    host_bytes_of_training,
)
from engine.budget.architecture.assembled import ASSEMBLED_PREFIX, parse_assembled
from engine.budget.architecture.lookup import find_architecture, find_config
from engine.errors import ConfigNotHereError, UnknownArchitectureError
from engine.spec.schema.recipe import Stage
from engine.spec.schema.run import RunSpec
from engine.spec.stages import enabled_stages, origins, stage_spec, weights_chain

WORST: dict[Verdict, int] = {"fits": 0, "fits_smaller": 1, "does_not_fit": 2}


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage. Bytes are None where the model's memory cannot be predicted."""

    number: int
    name: str
    kind: str
    spec: RunSpec
    """The stage's run spec, with the model that the plan is made for (`planning_spec`)."""
    plan: Plan | None = None
    """The plan of a stage that trains; None for a stage that assembles, and where the model's memory cannot be
    predicted."""
    unknown: str = ""
    """Why the stage's memory cannot be predicted; empty if it can."""
    verdict: Verdict | None = None
    peak_bytes: int | None = None
    """Bytes of the device at the peak; of a stage that trains, those that torch allocates."""
    host_bytes: int | None = None
    """Most bytes that the stage's tensors take in host memory at once."""
    disk_bytes: int | None = None
    """Most bytes that the stage's checkpoints and result take on disk."""

    def as_json(self) -> dict[str, Any]:
        """The stage's entry in plan.json and `tunedeck plan --json`."""
        return {
            "name": self.name,
            "kind": self.kind,
            "verdict": self.verdict,
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "plan": self.plan.as_json() if self.plan else None,
        }


@dataclass(frozen=True)
class StagedPlan:
    """The plans of all enabled stages."""

    stages: list[StagePlan]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any stage, without stages that have none; "fits" if no stage has one."""
        verdicts = [stage.verdict for stage in self.stages if stage.verdict]
        return max(verdicts, key=WORST.__getitem__, default="fits")

    @property
    def disk_bytes(self) -> int:
        """Most bytes that checkpoints and results of all stages take on disk, as far as they can be predicted."""
        return sum(stage.disk_bytes or 0 for stage in self.stages)

    @property
    def worst(self) -> StagePlan | None:
        """The stage with the least capacity left at its peak; None if no stage has a plan."""
        planned = [stage for stage in self.stages if stage.plan]
        return min(planned, key=lambda stage: stage.plan.margin_bytes if stage.plan else 0, default=None)

    def as_json(self) -> dict[str, Any]:
        """The plans of all stages as a JSON object: the content of plan.json, and what `tunedeck plan --json`
        prints."""
        return {"verdict": self.verdict, "stages": [stage.as_json() for stage in self.stages]}


def make_staged_plan(spec: RunSpec) -> StagedPlan:
    """Plan every enabled stage of a run. Raises UsageError when a model folder does not exist."""
    return StagedPlan([_plan_stage(spec, number, stage) for number, stage in enabled_stages(spec.recipe)])


def disk_warnings(planned: StagedPlan, free: int | None) -> list[str]:
    """A list with a warning if all stages together need more than `free` bytes of disk; nothing of a stage is removed
    before the run ends. Empty if they do not, or if `free` is None (unknown)."""
    if free is None or planned.disk_bytes <= free:
        return []
    needed, there = planned.disk_bytes / 2**30, free / 2**30
    return [
        f"checkpoints and results of all stages take up to {needed:.3g} GiB, {there:.3g} GiB of disk are free where "
        "the run is kept: a full disk pauses the run; lower checkpoint.keep, or choose another place with --runs"
    ]


def _plan_stage(spec: RunSpec, number: int, stage: Stage) -> StagePlan:
    planned_on = planning_spec(spec, stage)
    make = _plan_assembly if stage.kind == "assemble" else _plan_training
    try:
        return make(StagePlan(number, stage.name, stage.kind, planned_on), stage)
    except (UnknownArchitectureError, ConfigNotHereError) as error:
        return StagePlan(number, stage.name, stage.kind, planned_on, unknown=error.found)


def _plan_training(unplanned: StagePlan, _stage: Stage) -> StagePlan:
    spec = unplanned.spec
    plan = make_plan(spec)
    planned = replace(unplanned, plan=plan, verdict=plan.verdict, peak_bytes=plan.peak_bytes)
    if plan.predictor == "simulated":
        return planned  # what it takes of host and disk is not known
    arch = find_architecture(spec)
    return replace(
        planned,
        host_bytes=host_bytes_of_training(arch, spec),
        disk_bytes=disk_bytes_of_training(arch, spec),
    )


def _plan_assembly(unplanned: StagePlan, stage: Stage) -> StagePlan:
    """A copy of `unplanned`, the plan of a stage that assembles a mixture, with verdict and bytes filled in. Such a
    stage needs the device only for router = "hidden", which runs the recipe's own model there. Raises
    UnknownArchitectureError or ConfigNotHereError."""
    _, _, own = parse_assembled(unplanned.spec.recipe.model.id)
    spec = with_model(unplanned.spec, {"id": own})
    arch, config = find_architecture(spec), find_config(own, spec.recipe.model.revision)
    peak_bytes = device_bytes_of_hidden_router(arch, spec) if stage.router == "hidden" else 0
    return replace(
        unplanned,
        verdict="fits" if peak_bytes <= spec.profile.device.capacity_bytes else "does_not_fit",
        peak_bytes=peak_bytes,
        host_bytes=host_bytes_of_assembly(arch, spec),
        disk_bytes=disk_bytes_of_assembly(
            arch, spec, len(origins(stage)), shared_expert=config["model_type"] == "qwen2"
        ),
    )


def planning_specs(spec: RunSpec) -> list[RunSpec]:
    """The run specs to plan: of a staged run, those of the enabled stages that train; of any other run, only its
    own."""
    if not spec.recipe.stages:
        return [spec]
    return [planning_spec(spec, stage) for _, stage in enabled_stages(spec.recipe) if stage.kind == "train"]


def planning_spec(spec: RunSpec, stage: Stage) -> RunSpec:
    """The run spec of a stage, in which the model is the one at the start of its chain of stages: the recipe's own, or
    the mixture that is going to be assembled from models of the same shape."""
    first = list(weights_chain(spec.recipe, stage))[-1]
    start = spec.recipe.model if first.kind == "assemble" else stage_spec(spec, first).recipe.model
    model_id = start.id
    if first.kind == "assemble":
        model_id = f"{ASSEMBLED_PREFIX}{len(origins(first))}:{first.experts_per_token or 2}:{start.id}"
    changes = {"id": model_id, "revision": start.revision, "init": start.init, "adapter": None}
    return with_model(stage_spec(spec, stage), changes)


def with_model(spec: RunSpec, changes: dict[str, Any]) -> RunSpec:
    """A copy of the run spec in which keys of [model] have the values in `changes`; the copy is not checked."""
    model = spec.recipe.model.model_copy(update=changes)
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"model": model})})
