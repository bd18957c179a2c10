"""Creates the run directory of a stage when its turn has come: its run spec, with the weights it starts from, and plan.

Try: `cat runs/*/stages/*/run.toml`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.budget.advise.plan import make_plan
from engine.errors import ConfigNotHereError, UnknownArchitectureError
from engine.journal.directory import RunDirectory, create_stage_directory
from engine.journal.files import write_atomically
from engine.journal.stages import stage_directory
from engine.launch.simulation import with_simulations
from engine.model.reference import find_run_weights
from engine.spec.load import dump_run_spec, load_run_spec
from engine.spec.schema.recipe import Stage
from engine.spec.schema.run import RunSpec
from engine.spec.stages import BASE, STAGE_PREFIX, origins, stage_of_reference, stage_spec


def create_or_update_stage(spec: RunSpec, run: RunDirectory, stage: Stage, directory: RunDirectory) -> list[str]:
    """Create the stage's run directory, or write a changed spec into the one that exists; returns notices for the user.

    Raises UsageError when the weights that the stage starts from are not there.
    """
    resolved = resolved_stage_spec(spec, run, stage)
    text = dump_run_spec(resolved)
    if directory.exists():
        if load_run_spec(directory.run_toml, own=True) != resolved:
            write_atomically(directory.run_toml, text)
        return []
    if stage.kind == "assemble":
        create_stage_directory(directory, text, {}, _assembly(spec, run, stage))
        return []
    plan, notices = _plan_of(resolved)
    create_stage_directory(directory, text, plan)
    return notices


def _assembly(spec: RunSpec, run: RunDirectory, stage: Stage) -> dict[str, Any]:
    """The content of assembly.json: each expert's name, weights and run spec (which says what data it learned from),
    and the settings of the mixture."""
    numbers = {other.name: number for number, other in enumerate(spec.recipe.stages, 1)}
    experts = []
    for name in origins(stage):
        own = stage_directory(run, numbers[stage.name if name == BASE else name], stage.name if name == BASE else name)
        weights = "" if name == BASE else str(_folder_of(own))
        experts.append({"name": name, "weights": weights, "run_toml": str(own.run_toml)})
    return {
        "experts": experts,
        "experts_per_token": stage.experts_per_token or 2,
        "shared": stage.shared,
        "router": stage.router or "random",
    }


def _folder_of(stage: RunDirectory) -> Path:
    """Return the folder with the full (not adapter) weights that a stage ended with."""
    return stage.merged if stage.merged.is_dir() else find_run_weights(f"run:{stage.path}")


def resolved_stage_spec(spec: RunSpec, run: RunDirectory, stage: Stage) -> RunSpec:
    """Return the run spec of a stage of this run. References "stage:NAME" in its [model] are replaced by the weights of
    that stage's run (see `_weights_of`), and max_hours is removed, because it applies to the whole run.

    Raises UsageError if those weights do not exist.
    """
    alone = stage_spec(spec, stage)
    model = alone.recipe.model
    merged = alone.recipe.method.kind == "full"
    changes = {
        key: _weights_of(spec, run, text, merged=merged)
        for key in ("id", "adapter")
        if (text := getattr(model, key)) is not None and text.startswith(STAGE_PREFIX)
    }
    limits = alone.limits.model_copy(update={"max_hours": None})  # the conductor's clock covers all stages
    recipe = alone.recipe.model_copy(update={"model": model.model_copy(update=changes)})
    return alone.model_copy(update={"recipe": recipe, "limits": limits})


def _weights_of(spec: RunSpec, run: RunDirectory, reference: str, *, merged: bool) -> str:
    """Resolve the reference "stage:NAME[@STEP|@best]" to a value of model.id or model.adapter. Returns
    "run:PATH[@STEP|@best]" with the absolute path of that stage's run directory; an adapter named in this way is loaded
    together with its base model. With `merged`, returns the folder of the stage's merged model instead, if that exists
    and no step is named.

    Raises UsageError if the stage has no such weights.
    """
    name, which = stage_of_reference(reference)
    number = [other.name for other in spec.recipe.stages].index(name) + 1
    before = stage_directory(run, number, name)
    if merged and not which and before.merged.is_dir():
        return str(before.merged)
    weights = f"run:{before.path}" + (f"@{which}" if which else "")
    find_run_weights(weights)
    return weights


def _plan_of(spec: RunSpec) -> tuple[dict[str, Any], list[str]]:
    try:
        return with_simulations(lambda: make_plan(spec)).as_json(), []
    except (UnknownArchitectureError, ConfigNotHereError) as unknown:
        return {}, [f"no plan before the start: {unknown.found}"]
