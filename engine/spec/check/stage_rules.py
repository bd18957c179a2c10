"""Rules for the stages of a recipe: what a stage may start from, and which keys each kind of stage has.

A rule takes the recipe and one stage with its index, and yields problems whose places are relative to that stage. The
keys inside a stage's tables are checked in `engine.spec.check.check`, on the recipe that the stage trains with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.spec.files.document import Problem
from engine.spec.files.text import closest_match, quoted
from engine.spec.schema.recipe import Recipe
from engine.spec.stages import BASE, STAGE_PREFIX, STAGE_TABLES, merge_stage, origins, required_stages

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
            allowed = f"one of: {', '.join(known)}{hint}" if known else "none comes before this one"
            yield Problem(place, f"{quoted(name)} is not an earlier stage", allowed)


def needs_only_enabled_stages(recipe: Recipe, index: int) -> Problems:
    stage = recipe.stages[index]
    disabled = {other.name for other in recipe.stages if not other.enabled}
    for name in required_stages(stage) if stage.enabled else []:
        if name in disabled:
            fix = f"enable {quoted(name)}, or disable this stage, too: --set stages.{stage.name}.enabled=false"
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
            yield Problem((key,), f'[{key}] with kind = "assemble"', "an assembly trains nothing; put it into a stage")


def starts_from_full_weights(recipe: Recipe, index: int) -> Problems:
    """Yield a problem for each earlier stage that ends with an unmerged adapter, if stage `index` needs full weights.
    Only a LoRA stage can continue an adapter."""
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


STAGE_RULES: tuple[Callable[[Recipe, int], Problems], ...] = (
    name_is_free,
    starts_from_an_earlier_stage,
    needs_only_enabled_stages,
    trains_from_one,
    assembles_two_or_more,
    starts_from_full_weights,
)


def problems_of_stages(recipe: Recipe) -> Problems:
    """Yield the problems of all stages of a recipe."""
    for index in range(len(recipe.stages)):
        for rule in STAGE_RULES:
            yield from (problem.under(("stages", index)) for problem in rule(recipe, index))
    if recipe.stages and not any(stage.enabled and stage.kind == "train" for stage in recipe.stages):
        yield Problem(("stages",), "no enabled stage trains", "at least one stage with enabled = true")
