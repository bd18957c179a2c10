"""Stages of a recipe: the recipe that one stage trains with, and the stages that it starts from. Pure functions.

A staged run trains one stage after another, each in a process and a run directory of its own. The recipe of a stage is
the whole recipe with the stage's tables merged over it. `[overrides]` of a profile and `--set` are in the recipe's and
the stages' tables before a stage is merged (`engine.spec.check.overrides.set_value`), so they count here, too.

Try: `python -m pytest tests/spec/test_stages.py`
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.spec.check.overrides import EXCLUSIVE
from engine.spec.files.document import merge_tables
from engine.spec.schema.recipe import Recipe, Stage
from engine.spec.schema.run import RunSpec

STAGE_PREFIX = "stage:"
"""`model.id = "stage:NAME"`, also with @STEP or @best, starts from the weights of an earlier stage of the same run."""

BASE = "base"
"""In `from` of an assembly: the model in the recipe's own [model], untouched."""

STAGE_TABLES = (
    "model", "method", "data", "train", "checkpoint", "eval", "evaluate", "moe", "generate", "backoff", "finish"
)  # fmt: skip
"""Tables of a recipe that a stage may contain."""

STARTING_KEYS = ("revision", "adapter", "init")
"""Keys of [model] that describe the recipe's own model and are not inherited by a stage that starts from another."""

Data = dict[str, Any]


def origins(stage: Stage) -> list[str]:
    """The names in the stage's key `from`, as a list; empty if the key is not set."""
    return [stage.from_] if isinstance(stage.from_, str) else list(stage.from_ or [])


def required_stages(stage: Stage) -> list[str]:
    """The names of the earlier stages whose results this stage needs, each once."""
    named = [origin for origin in origins(stage) if origin != BASE]
    for key in ("id", "adapter"):
        text = stage.model.get(key)
        if isinstance(text, str) and text.startswith(STAGE_PREFIX):
            named.append(stage_of_reference(text)[0])
    return list(dict.fromkeys(named))


def stage_of_reference(text: str) -> tuple[str, str]:
    """Split "stage:NAME@WHICH"; returns (name, which), where which is a step, "best", or "" for the stage's result."""
    name, _, which = text.removeprefix(STAGE_PREFIX).partition("@")
    return name, which


def enabled_stages(recipe: Recipe) -> list[tuple[int, Stage]]:
    """(number counted from 1, stage) of each enabled stage. A disabled stage keeps its number."""
    return [(number, stage) for number, stage in enumerate(recipe.stages, 1) if stage.enabled]


def last_training_stage(recipe: Recipe) -> tuple[int, Stage]:
    """(number, stage) of the last enabled stage that trains: its result is the result of the whole run. Raises
    IndexError if no enabled stage trains."""
    return [(number, stage) for number, stage in enabled_stages(recipe) if stage.kind == "train"][-1]


def dependants(recipe: Recipe, name: str) -> set[str]:
    """The names of the enabled stages that start from stage `name`, directly or through other stages."""
    found = {name}
    for _, stage in enabled_stages(recipe):
        if found & set(required_stages(stage)):
            found.add(stage.name)
    return found - {name}


def merge_stage(recipe: Data, stage: Data) -> Data:
    """The data of a recipe for one stage: tables are merged, all other values replaced.

    A stage that names method.kind does not inherit [method]: rank or targets of LoRA mean nothing in full fine-tuning.
    A stage that starts from another does not inherit what describes the recipe's own model (STARTING_KEYS).
    """
    base = {key: value for key, value in recipe.items() if key not in ("stages", "sweep")}
    own = {key: stage[key] for key in STAGE_TABLES if isinstance(stage.get(key), dict) and stage[key]}
    if "kind" in own.get("method", {}):
        base.pop("method", None)
    base = {key: _without_excluded(table, own.get(key, {})) for key, table in base.items()}
    start = _starting_model(stage)
    if start or str(own.get("model", {}).get("id", "")).startswith(STAGE_PREFIX):
        model = {key: value for key, value in base.get("model", {}).items() if key not in STARTING_KEYS}
        base["model"] = {**model, **start}
    return merge_tables(base, own)


def _without_excluded(table: Any, own: Data) -> Any:
    """`table` without the keys that a key of `own` excludes, such as warmup_ratio if the stage sets warmup_steps."""
    excluded = {EXCLUSIVE[key] for key in own if key in EXCLUSIVE}
    return {key: value for key, value in table.items() if key not in excluded} if isinstance(table, dict) else table


def _starting_model(stage: Data) -> Data:
    origin = stage.get("from")
    if stage.get("kind", "train") != "train" or not origin:
        return {}
    return {"id": STAGE_PREFIX + (origin if isinstance(origin, str) else origin[0])}


def stage_recipe(recipe: Recipe, stage: Stage) -> Recipe:
    """The checked recipe of one stage, without stages of its own. `stage:NAME` in [model] is left as it is."""
    data = recipe.model_dump(by_alias=True, exclude_none=True)
    return Recipe.model_validate(merge_stage(data, stage.model_dump(by_alias=True, exclude_none=True)))


def stage_spec(spec: RunSpec, stage: Stage) -> RunSpec:
    """The run spec of one training stage: named RUN/STAGE, on the same profile, without `limits.on_finish`.
    `stage:NAME` in [model] is left as it is."""
    changes = {
        "name": f"{spec.name}/{stage.name}",
        "recipe": stage_recipe(spec.recipe, stage),
        "limits": spec.limits.model_copy(update={"on_finish": None}),
    }
    return spec.model_copy(update=changes)


def stage_specs(spec: RunSpec) -> list[RunSpec]:
    """The run specs of all enabled stages that train."""
    return [stage_spec(spec, stage) for _, stage in enabled_stages(spec.recipe) if stage.kind == "train"]


def weights_chain(recipe: Recipe, stage: Stage) -> Iterable[Stage]:
    """Yield the stage, the stage it starts from, and so on up to one that starts from [model] or assembles."""
    by_name = {other.name: other for other in recipe.stages}
    current: Stage | None = stage
    while current is not None:
        yield current
        before = required_stages(current) if current.kind == "train" else []
        current = by_name.get(before[0]) if before else None
