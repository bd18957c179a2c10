"""Plans a staged run: verdict, memory, host memory and disk of each enabled stage, before any of them starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.architecture.assembled import ASSEMBLED_PREFIX, SHARD_BYTES, SHARED_EXPERT_WIDTH, parse_assembled
from engine.architecture.facts import Architecture
from engine.architecture.lookup import ModelFacts, find_facts
from engine.architecture.parameters import elements, layer_parameters, outer_parameters, parameter_count
from engine.budget.advise.plan import Plan, Verdict, make_plan
from engine.budget.advise.preflight import checkpoints_bytes
from engine.budget.predict.inference import evaluation
from engine.budget.predict.non_torch_memory import non_torch_memory
from engine.budget.predict.static import Tensors, static_bytes
from engine.budget.trace.memory_config import DTYPE_BYTES, memory_config_of
from engine.budget.trace.polynomial import highest_value, shape_of
from engine.config.files.find import STAGE_PREFIX
from engine.config.schema.recipe import Model, Stage
from engine.config.schema.run import RunSpec
from engine.config.stages import enabled_stages, origins, stage_spec, weights_chain
from engine.errors import ConfigNotHereError, UnknownArchitectureError

MERGE_FACTOR = 1.15
"""Host memory of merging, relative to the weights: one layer in fp32 and buffers for files beside them."""


def host_bytes_of_training(arch: Architecture, spec: RunSpec) -> int:
    """Most bytes: one checkpoint while it is written (trained weights and optimizer state, offloaded or not), or the
    model that the adapter is merged into at the end."""
    total = _total(arch, spec)
    return max(total.gradients + total.optimizer, _merged_bytes(total, spec, MERGE_FACTOR))


def disk_bytes_of_training(arch: Architecture, spec: RunSpec) -> int:
    """Checkpoints, one of which holds the result, and a merged model."""
    return checkpoints_bytes(arch, spec) + _merged_bytes(_total(arch, spec), spec, 1.0)


def _total(arch: Architecture, spec: RunSpec) -> Tensors:
    """Optimizer state is counted even if it is offloaded; `gradients` is also the size of the trained weights."""
    return static_bytes(arch, replace(memory_config_of(arch, spec), optimizer_offload=False)).total


def _merged_bytes(total: Tensors, spec: RunSpec, factor: float) -> int:
    return round(factor * total.weights) if spec.recipe.finish.merge else 0


def host_bytes_of_assembly(arch: Architecture, spec: RunSpec) -> int:
    """For dense models: one file of the result, two experts' versions of the largest tensor, and their mean in fp32."""
    parameters = (*layer_parameters(arch, True), *outer_parameters(arch))
    largest = max(parameter.elements for parameter in parameters)
    return SHARD_BYTES + largest * (2 * _element_bytes(arch, spec) + DTYPE_BYTES["float32"])


def disk_bytes_of_assembly(arch: Architecture, spec: RunSpec, experts: int, *, shared_expert: bool) -> int:
    """For dense models: one model, the other experts' feed-forwards, routers, and Qwen2-MoE's shared expert."""
    feed_forward = elements(p for p in layer_parameters(arch, True) if p.name.startswith("mlp."))
    added = (experts - 1) * feed_forward + experts * arch.hidden
    added += (3 * SHARED_EXPERT_WIDTH + 1) * arch.hidden if shared_expert else 0
    return (parameter_count(arch) + arch.layers * added) * _element_bytes(arch, spec)


def device_bytes_of_hidden_router(arch: Architecture, spec: RunSpec) -> int:
    """With `router` "hidden": an evaluation of the recipe's own model on one sequence of data.max_length tokens."""
    config = memory_config_of(arch, spec)
    shape = shape_of(1, spec.recipe.data.max_length, config.chunk_tokens, patches=config.image_patches)
    peak_bytes = static_bytes(arch, config).total.weights + highest_value(evaluation(arch, config), shape)
    return peak_bytes + non_torch_memory(spec).total(peak_bytes)


def _element_bytes(arch: Architecture, spec: RunSpec) -> int:
    return DTYPE_BYTES[memory_config_of(arch, spec).dtype]


WORST: dict[Verdict, int] = {"fits": 0, "fits_smaller": 1, "does_not_fit": 2}


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage. Bytes are None where the model's memory cannot be predicted."""

    number: int
    name: str
    kind: str
    spec: RunSpec
    """With the model that the plan is made for (`planning_spec`)."""
    plan: Plan | None = None
    """None for a stage that assembles, and where the model's memory cannot be predicted."""
    unknown: str = ""
    """Why the stage's memory cannot be predicted; empty if it can."""
    verdict: Verdict | None = None
    peak_bytes: int | None = None
    """Of the device; of a stage that trains, what torch allocates."""
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
    stages: list[StagePlan]

    @property
    def verdict(self) -> Verdict:
        """The worst of any stage that has one; else "fits"."""
        verdicts = [stage.verdict for stage in self.stages if stage.verdict]
        return max(verdicts, key=WORST.__getitem__, default="fits")

    @property
    def disk_bytes(self) -> int:
        """As far as they can be predicted."""
        return sum(stage.disk_bytes or 0 for stage in self.stages)

    @property
    def worst(self) -> StagePlan | None:
        """The stage with the least capacity left at its peak; None if no stage has a plan."""
        planned = [stage for stage in self.stages if stage.plan]
        return min(planned, key=lambda stage: stage.plan.margin_bytes if stage.plan else 0, default=None)

    def as_json(self) -> dict[str, Any]:
        """The content of plan.json, and what `tunedeck plan --json` prints."""
        return {"verdict": self.verdict, "stages": [stage.as_json() for stage in self.stages]}


@dataclass(frozen=True)
class RunFacts:
    """What is known of every model of a run, found once: of its own, or of those that its stages start from."""

    models: Mapping[tuple[str, str | None], ModelFacts]
    """By id and revision."""

    def of(self, model: Model) -> ModelFacts:
        """The facts of a model of this run, as `planning_spec` names it."""
        return self.models[model.id, model.revision]


def find_run_facts(spec: RunSpec) -> RunFacts:
    """Find the facts of every model of a run, from what is on this machine; see `find_facts`."""
    stages = [planning_spec(spec, stage).recipe.model for _, stage in enabled_stages(spec.recipe)]
    models = stages or [spec.recipe.model]
    models += [_model_of_experts(model) for model in models if model.id.startswith(ASSEMBLED_PREFIX)]
    return RunFacts({(model.id, model.revision): find_facts(model) for model in models})


def _model_of_experts(mixture: Model) -> Model:
    """The model of whose shape the experts of a planned mixture are."""
    return mixture.model_copy(update={"id": parse_assembled(mixture.id)[2]})


def make_staged_plan(spec: RunSpec, facts: RunFacts | None = None) -> StagedPlan:
    """Plan every enabled stage of a run. `facts`: what is known of its models, if that was found before. Raises
    UsageError when a model folder does not exist."""
    facts = facts or find_run_facts(spec)
    return StagedPlan([_plan_stage(spec, number, stage, facts) for number, stage in enabled_stages(spec.recipe)])


def disk_warnings(planned: StagedPlan, free: int | None) -> list[str]:
    """A warning if all stages need more than `free` bytes (None: unknown); nothing is removed before the run ends."""
    if free is None or planned.disk_bytes <= free:
        return []
    needed, there = planned.disk_bytes / 2**30, free / 2**30
    return [
        f"checkpoints and results of all stages take up to {needed:.3g} GiB, but {there:.3g} GiB of disk are "
        "free in the runs folder: a full disk pauses the run; lower checkpoint.keep, or choose another folder "
        "with --runs"
    ]


def _plan_stage(spec: RunSpec, number: int, stage: Stage, facts: RunFacts) -> StagePlan:
    planned_on = planning_spec(spec, stage)
    make = _plan_assembly if stage.kind == "assemble" else _plan_training
    try:
        return make(StagePlan(number, stage.name, stage.kind, planned_on), stage, facts)
    except (UnknownArchitectureError, ConfigNotHereError) as error:
        return StagePlan(number, stage.name, stage.kind, planned_on, unknown=error.found)


def _plan_training(unplanned: StagePlan, _stage: Stage, facts: RunFacts) -> StagePlan:
    spec, of_model = unplanned.spec, facts.of(unplanned.spec.recipe.model)
    plan = make_plan(spec, facts=of_model)
    planned = replace(unplanned, plan=plan, verdict=plan.verdict, peak_bytes=plan.peak_bytes)
    if plan.predictor == "simulated":
        return planned  # what it takes of host and disk is not known
    arch = of_model.require_architecture()
    return replace(
        planned,
        host_bytes=host_bytes_of_training(arch, spec),
        disk_bytes=disk_bytes_of_training(arch, spec),
    )


def _plan_assembly(unplanned: StagePlan, stage: Stage, facts: RunFacts) -> StagePlan:
    """A copy of `unplanned`, the plan of a stage that assembles a mixture, with verdict and bytes filled in. Such a
    stage needs the device only for router = "hidden", which runs the recipe's own model there. Raises
    UnknownArchitectureError or ConfigNotHereError."""
    own = _model_of_experts(unplanned.spec.recipe.model)
    spec, of_model = with_model(unplanned.spec, {"id": own.id}), facts.of(own)
    arch, config = of_model.require_architecture(), of_model.require_config()
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
    """Those of the enabled stages that train; of a run without stages, its own."""
    if not spec.recipe.stages:
        return [spec]
    return [planning_spec(spec, stage) for _, stage in enabled_stages(spec.recipe) if stage.kind == "train"]


def planning_spec(spec: RunSpec, stage: Stage) -> RunSpec:
    """The run spec of a stage with the model at the start of its chain of stages: the recipe's own, or the mixture that
    is going to be assembled from models of the same shape."""
    found, first = reading_spec(spec, stage), list(weights_chain(spec.recipe, stage))[-1]
    if first.kind != "assemble":
        return found
    mixture = f"{ASSEMBLED_PREFIX}{len(origins(first))}:{first.experts_per_token or 2}:{found.recipe.model.id}"
    return with_model(found, {"id": mixture})


def reading_spec(spec: RunSpec, stage: Stage) -> RunSpec:
    """The run spec of a stage with the model whose tokenizer its data go through: that at the start of its chain of
    stages, for a mixture that is going to be assembled the recipe's own."""
    first = list(weights_chain(spec.recipe, stage))[-1]
    start = spec.recipe.model if first.kind == "assemble" else stage_spec(spec, first).recipe.model
    adapter = None if (start.adapter or "").startswith(STAGE_PREFIX) else start.adapter
    changes = {"id": start.id, "revision": start.revision, "init": start.init, "adapter": adapter}
    return with_model(stage_spec(spec, stage), changes)


def with_model(spec: RunSpec, changes: dict[str, Any]) -> RunSpec:
    """A copy with `changes` of [model]; it is not checked."""
    model = spec.recipe.model.model_copy(update=changes)
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"model": model})})
