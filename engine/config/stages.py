"""Stages of a recipe: the recipe that one stage trains with, what it may start from, and which keys each kind of stage
has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from engine.config.check.overrides import EXCLUSIVE
from engine.config.files.document import Problem, merge_tables
from engine.config.files.find import STAGE_PREFIX
from engine.config.files.text import closest_match, quoted
from engine.config.schema.finish import Finish
from engine.config.schema.recipe import Recipe, Stage
from engine.config.schema.run import RunSpec
from engine.errors import UsageError

BASE = "base"
"""In `from` of an assembly: the model in the recipe's own [model], untouched."""

STAGE_TABLES = (
    "model", "method", "preference", "data", "train", "checkpoint", "eval", "evaluate", "moe", "generate", "backoff",
    "finish",
)  # fmt: skip

STARTING_KEYS = ("revision", "adapter", "init")
"""Keys of [model] that describe the recipe's own model and are not inherited by a stage that starts from another."""

Data = dict[str, Any]


def origins(stage: Stage) -> list[str]:
    return [stage.from_] if isinstance(stage.from_, str) else list(stage.from_ or [])


def required_stages(stage: Stage) -> list[str]:
    """The earlier stages whose results this stage needs, each once."""
    named = [origin for origin in origins(stage) if origin != BASE]
    for key in ("id", "adapter"):
        text = stage.model.get(key)
        if isinstance(text, str) and text.startswith(STAGE_PREFIX):
            named.append(stage_of_reference(text)[0])
    return list(dict.fromkeys(named))


def stage_of_reference(text: str) -> tuple[str, str]:
    """Split "stage:NAME@WHICH"; which is a step, "best", or "" for the stage's result."""
    name, _, which = text.removeprefix(STAGE_PREFIX).partition("@")
    return name, which


def enabled_stages(recipe: Recipe) -> list[tuple[int, Stage]]:
    """With numbers counted from 1; a disabled stage keeps its number."""
    return [(number, stage) for number, stage in enumerate(recipe.stages, 1) if stage.enabled]


def enabled_stage(recipe: Recipe, name: str) -> Stage:
    """Raises UsageError if there is no enabled stage of this name."""
    stages = {stage.name: stage for _, stage in enabled_stages(recipe)}
    if name not in stages:
        known = ", ".join(stages)
        raise UsageError(
            f"{recipe.name} has no enabled stage {name!r}",
            expected=f"one of: {known}" if known else "a recipe with [[stages]]",
            fix="leave out --stage",
        )
    return stages[name]


def last_training_stage(recipe: Recipe) -> tuple[int, Stage]:
    """The stage with the result of the whole run, and its number. Raises IndexError if no enabled stage trains."""
    return [(number, stage) for number, stage in enabled_stages(recipe) if stage.kind == "train"][-1]


def dependants(recipe: Recipe, name: str) -> set[str]:
    """Enabled stages that start from stage `name`, directly or through others."""
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
    """`table` without what `own` excludes, such as warmup_ratio if the stage sets warmup_steps."""
    excluded = {EXCLUSIVE[key] for key in own if key in EXCLUSIVE}
    return {key: value for key, value in table.items() if key not in excluded} if isinstance(table, dict) else table


def _starting_model(stage: Data) -> Data:
    origin = stage.get("from")
    if stage.get("kind", "train") != "train" or not origin:
        return {}
    return {"id": STAGE_PREFIX + (origin if isinstance(origin, str) else origin[0])}


def stage_recipe(recipe: Recipe, stage: Stage) -> Recipe:
    """The checked recipe of one stage, without stages of its own; `stage:NAME` in [model] is left."""
    data = recipe.model_dump(by_alias=True, exclude_none=True)
    return Recipe.model_validate(merge_stage(data, stage.model_dump(by_alias=True, exclude_none=True)))


def stage_spec(spec: RunSpec, stage: Stage) -> RunSpec:
    """The run spec of one stage: named RUN/STAGE, without what the run's own end calls for (`limits.on_finish`,
    destinations of [finish]); `stage:NAME` in [model] is left."""
    recipe = stage_recipe(spec.recipe, stage)
    changes = {
        "name": f"{spec.name}/{stage.name}",
        "recipe": recipe.model_copy(update={"finish": Finish(merge=recipe.finish.merge)}),
        "limits": spec.limits.model_copy(update={"on_finish": None}),
    }
    return spec.model_copy(update=changes)


def stage_specs(spec: RunSpec) -> list[RunSpec]:
    return [stage_spec(spec, stage) for _, stage in enabled_stages(spec.recipe) if stage.kind == "train"]


def weights_chain(recipe: Recipe, stage: Stage) -> Iterable[Stage]:
    """Yield the stage, the stage it starts from, and so on up to one that starts from [model] or assembles."""
    by_name = {other.name: other for other in recipe.stages}
    current: Stage | None = stage
    while current is not None:
        yield current
        before = required_stages(current) if current.kind == "train" else []
        current = by_name.get(before[0]) if before else None


Problems = Iterator[Problem]

ASSEMBLY_KEYS = ("experts_per_token", "shared", "router")


def starts_from_an_earlier_stage(recipe: Recipe, index: int) -> Problems:
    stage = recipe.stages[index]
    earlier = [other.name for other in recipe.stages[:index]]
    known = [*earlier, BASE] if stage.kind == "assemble" else earlier
    for name in dict.fromkeys([*origins(stage), *required_stages(stage)]):
        if name not in known:
            meant = closest_match(name, known)
            hint = f"; did you mean {quoted(meant)}?" if meant else ""
            place = ("from",) if name in origins(stage) else ("model",)
            allowed = f"one of: {', '.join(known)}{hint}" if known else "there is no earlier stage"
            yield Problem(place, f"{quoted(name)} is not an earlier stage", allowed)


def needs_only_enabled_stages(recipe: Recipe, index: int) -> Problems:
    stage = recipe.stages[index]
    disabled = {other.name for other in recipe.stages if not other.enabled}
    for name in required_stages(stage) if stage.enabled else []:
        if name in disabled:
            fix = f"enable {quoted(name)}, or also disable this stage: --set stages.{stage.name}.enabled=false"
            yield Problem(("from",), f"stage {quoted(name)}, which this one starts from, is disabled", fix)


def trains_from_one(recipe: Recipe, index: int) -> Problems:
    stage = recipe.stages[index]
    if stage.kind != "train":
        return
    for key in ASSEMBLY_KEYS:
        if getattr(stage, key):
            yield Problem((key,), f'{key} with kind = "train"', 'kind = "assemble" is needed')
    if len(origins(stage)) > 1:
        yield Problem(("from",), f"{len(origins(stage))} stages to start from", 'one, or kind = "assemble"')
    if origins(stage) and "id" in stage.model:
        allowed = f'one of them; from = "NAME" is short for model.id = "{STAGE_PREFIX}NAME"'
        yield Problem(("from",), "both from and model.id", allowed, (("model", "id"),))


def assembles_two_or_more(recipe: Recipe, index: int) -> Problems:
    stage = recipe.stages[index]
    if stage.kind != "assemble":
        return
    count = len(origins(stage))
    if count < 2:
        found = f"{count} expert{'s' if count != 1 else ''} to assemble" if count else "missing"
        yield Problem(("from",), found, 'two or more are needed, such as ["a", "b"] or ["a", "a"]')
    if count >= 2 and (stage.experts_per_token or 2) > count:
        per_token = stage.experts_per_token or 2
        yield Problem(("experts_per_token",), f"{per_token} of {count} experts", f"at most {count}")
    for key in STAGE_TABLES:
        if getattr(stage, key):
            yield Problem(
                (key,), f'[{key}] with kind = "assemble"', "an assembly does not train; move it to a training stage"
            )


def starts_from_full_weights(recipe: Recipe, index: int) -> Problems:
    """Only a LoRA stage can continue an unmerged adapter of an earlier stage."""
    stage = recipe.stages[index]
    data = recipe.model_dump(by_alias=True, exclude_none=True)
    by_name = {other.name: merge_stage(data, other.model_dump(by_alias=True, exclude_none=True))
               for other in recipe.stages[:index] if other.kind == "train"}  # fmt: skip
    own = merge_stage(data, stage.model_dump(by_alias=True, exclude_none=True))
    if stage.kind == "train" and _kind_of(own) == "lora":
        return
    for name in required_stages(stage):
        before = by_name.get(name)
        if before is not None and _kind_of(before) == "lora" and not before.get("finish", {}).get("merge"):
            purpose = "an assembly" if stage.kind == "assemble" else "full fine-tuning"
            fix = f"set finish.merge = true in stage {quoted(name)}"
            yield Problem(("from",), f"{quoted(name)} ends with an adapter, {purpose} needs full weights", fix)


def _kind_of(recipe: dict[str, dict[str, str]]) -> str:
    return recipe.get("method", {}).get("kind", "lora")


def name_is_free(recipe: Recipe, index: int) -> Problems:
    if recipe.stages[index].name == BASE:
        yield Problem(("name",), quoted(BASE), "another name; in `from` it means the recipe's own [model]")


def finishes_alone(recipe: Recipe, index: int) -> Problems:
    for key in recipe.stages[index].finish:
        if key in Finish.model_fields and key != "merge":
            yield Problem(("finish", key), "of one stage", f"set it for the whole run: [finish] {key} of the recipe")


STAGE_RULES: tuple[Callable[[Recipe, int], Problems], ...] = (
    name_is_free,
    starts_from_an_earlier_stage,
    needs_only_enabled_stages,
    trains_from_one,
    assembles_two_or_more,
    starts_from_full_weights,
    finishes_alone,
)


def problems_of_stages(recipe: Recipe) -> Problems:
    for index in range(len(recipe.stages)):
        for rule in STAGE_RULES:
            yield from (problem.under(("stages", index)) for problem in rule(recipe, index))
    if recipe.stages and not any(stage.enabled and stage.kind == "train" for stage in recipe.stages):
        yield Problem(("stages",), "no enabled stage trains", "at least one stage with enabled = true")
