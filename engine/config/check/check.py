"""Checks a document against the spec's tables: reports every problem at once, each with what was found and what is
allowed.

pydantic finds where something is wrong; the text comes from the field types (`schema.describe`) and other tools' names
(`aliases`). Rules across keys (`rules`) run on the valid part of a file, even where other keys are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from engine.config.check.aliases import (
    CHOICE_ALIASES,
    PREFERENCE_LOSSES,
    REWARD_METHODS,
    WITHOUT_REWARDS,
    translate_key,
)
from engine.config.check.hardware_rules import problems_of_profile
from engine.config.check.no_counterpart import NO_COUNTERPART
from engine.config.check.overrides import resolve_key
from engine.config.check.rules import problems_of_recipe
from engine.config.files.document import INTEGER_RANGE, Place, Problem, key_text, merge_tables, value_at
from engine.config.files.text import UNSAFE, closest_match, quoted, visible
from engine.config.schema import base as describe
from engine.config.schema.base import SCHEMA_VERSION, Table
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import Profile, RunSpec
from engine.config.stages import STAGE_TABLES, merge_stage, problems_of_stages

CheckedTable = TypeVar("CheckedTable", bound=Table)
Data = dict[str, Any]

REQUIRED_KEY_EXAMPLES: dict[tuple[type[BaseModel] | None, str], str] = {
    (Recipe, "model"): '[model] with id = "Qwen/Qwen2.5-0.5B-Instruct"',
    (Recipe, "data"): '[[data.sources]] with name = "main" and path = "train.jsonl"',
    (Profile, "device"): '[device] with kind = "cuda" and memory_gib = 23.6',
}
"""An example of each (table, required key) for the error message."""

EXAMPLES_BY_KEY: dict[str, tuple[str, Any]] = {
    "id": ('id = "Qwen/Qwen2.5-0.5B-Instruct"', "example"),
    "sources": (
        '[[data.sources]] with name = "main" and path = "train.jsonl"',
        [{"name": "example", "path": "example"}],
    ),
    "name": ('name = "main"', "example"),
    "kind": ('kind = "cuda"', "cpu"),
    "memory_gib": ("memory_gib = 23.6", 1.0),
    "match": ('match = "**.lm_head.**"', "example"),
}
"""Required key of other tables to an example and a placeholder, with which the rest of the file is checked."""

FREE_TEXT = {"title": "", "notes": "\n\t"}
"""Keys and the control characters that they may contain; others that are unsafe are made visible, not refused."""
ANY_TEXT = frozenset({"system_prompt", "chat_template", "on_finish", "set"})
"""Keys that may hold any character, because they are never shown unescaped."""

OVERRIDABLE_TABLES = (
    "model",
    "method",
    "preference",
    "data",
    "train",
    "checkpoint",
    "eval",
    "evaluate",
    "moe",
    "generate",
    "backoff",
    "trackers",
    "finish",
)
"""What a profile's [overrides] may set."""

MINIMAL_RECIPE: Data = {
    "name": "example",
    "model": {"id": "example"},
    "data": {"sources": [{"name": "example", "path": "example"}]},
}


def check_table(model: type[CheckedTable], data: Data) -> tuple[CheckedTable | None, list[Problem]]:
    """Check `data` as a table of type `model`; returns the table (None if there is any problem) and all problems."""
    if problems := _wrong_file(model, data):
        return None, problems
    data = _visible_notes(data)
    sound, wrong = _validated(model, data)
    problems = [*_unsafe_values(model, data), *wrong]
    bad = {problem.place for problem in problems}
    for problem in _rule_problems(sound, data) if sound is not None else ():
        if not any(_touches(place, bad) for place in (problem.place, *problem.beside)):
            problems.append(problem)
    return (None if problems else sound), problems


def _wrong_file(model: type[Table], data: Data) -> list[Problem]:
    """One problem for a newer schema or a file of another kind: all others would only be consequences."""
    version, kind, expected = data.get("schema", SCHEMA_VERSION), data.get("kind"), model.model_fields["kind"].default
    if isinstance(version, int) and not isinstance(version, bool) and version > SCHEMA_VERSION:
        return [
            Problem(
                ("schema",),
                str(version),
                f"this version of Tunedeck reads schema {SCHEMA_VERSION}: the file is newer, so update Tunedeck",
            )
        ]
    option = {"profile": "-p", "recipe": "-r", "run": "--run-spec"}
    if isinstance(kind, str) and kind != expected and kind in option:
        return [Problem(("kind",), f'"{kind}", a file for {option[kind]}', f'"{expected}" is needed here')]
    return []


def _visible_notes(data: Data) -> Data:
    cleaned = {key: visible(data[key], keep=keep) for key, keep in FREE_TEXT.items() if isinstance(data.get(key), str)}
    nested = {key: _visible_notes(data[key]) for key in ("profile", "recipe") if isinstance(data.get(key), dict)}
    return {**data, **cleaned, **nested}


def _unsafe_values(model: type[Table], node: Any, place: Place = ()) -> Iterator[Problem]:
    """Values that are never allowed: text with control characters, numbers of more than 64 bits."""
    if isinstance(node, str) and (hit := UNSAFE.search(node)):
        yield Problem(
            place, f"{quoted(node)} contains the control character {visible(hit[0])}", "plain text is allowed"
        )
    if isinstance(node, int) and not -(2**63) <= node < 2**63:
        yield Problem(place, quoted(node), INTEGER_RANGE)
    children: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for part, child in children:
        if part not in FREE_TEXT and part not in ANY_TEXT:
            yield from _unsafe_values(model, child, (*place, part))


def _validated(model: type[CheckedTable], data: Data) -> tuple[CheckedTable | None, list[Problem]]:
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        kinds = {_place(detail["loc"], data, detail["type"]): detail["type"] for detail in details}
        deepest = {p: kind for p, kind in kinds.items() if not any(q[: len(p)] == p and q != p for q in kinds)}
        return _validated_remainder(model, data), [_problem(model, data, p, kind) for p, kind in deepest.items()]


def _place(location: Place, data: Any, kind: str) -> Place:
    """A pydantic location as a place in the file: without names of union members. For "missing", the last part is kept
    although the file lacks it."""
    place: list[str | int] = []
    for index, part in enumerate(location):
        node = value_at(data, tuple(place))
        is_in_file = (isinstance(node, dict) and part in node) or (isinstance(node, list) and isinstance(part, int))
        if is_in_file or (kind == "missing" and index == len(location) - 1):
            place.append(part)
    return tuple(place)


def _problem(model: type[Table], data: Data, place: Place, kind: str) -> Problem:
    if kind == "missing":
        table = describe.table_at(model, place[:-1])
        key = str(place[-1])
        example = REQUIRED_KEY_EXAMPLES.get((table, key)) or EXAMPLES_BY_KEY.get(key, ("", None))[0]
        hint = f", such as {example}" if example else ""
        return Problem(place, "missing", f"{describe.allowed_at(model, place)} is needed{hint}")
    value = value_at(data, place)
    if kind == "extra_forbidden":
        return _unknown_key(model, data, place, value)
    return Problem(place, _found(value, describe.allowed_at(model, place)), _choice(model, data, place, value))


def _found(value: Any, allowed: str) -> str:
    numeric = "number" in allowed or "integer" in allowed
    if isinstance(value, str) and numeric:
        return f"{quoted(value)} is text" + (", write the number without quotes" if _is_number(value) else "")
    if isinstance(value, str) and allowed == "true or false":
        return f"{quoted(value)} is text, write it without quotes"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and numeric:
        return quoted(value)
    kinds = {str: "text", bool: "true or false", list: "a list", dict: "a table", int: "a number", float: "a number"}
    kind = kinds.get(type(value), "a date or time")
    return quoted(value) if kind in allowed or isinstance(value, str) else f"{quoted(value)}, {kind}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _choice(model: type[Table], data: Data, place: Place, value: Any) -> str:
    allowed = f"{describe.allowed_at(model, place)} is allowed"
    words = describe.choices_at(model, place)
    if not isinstance(value, str) or not words:
        return allowed
    bare = (
        ".".join(str(part) for part in place if isinstance(part, str)).removeprefix("recipe.").removeprefix("profile.")
    )
    if bare == "method.kind" and value.lower() == "qlora":
        return f'{allowed}; QLoRA is method.kind = "lora" with model.quantize = "nf4"'
    if bare in ("method.kind", "method.objective") and value.lower() in PREFERENCE_LOSSES:
        return f'{allowed}; preferences are method.objective = "dpo" with preference.loss = {quoted(value.lower())}'
    if bare in ("method.kind", "method.objective", "preference.loss") and value.lower() in REWARD_METHODS:
        return f"{allowed}: {WITHOUT_REWARDS}"
    meant = CHOICE_ALIASES.get(bare, {}).get(value.lower()) or closest_match(value, words)
    return f"{allowed}; did you mean {quoted(meant)}?" if meant else allowed


def _unknown_key(model: type[Table], data: Data, place: Place, value: Any) -> Problem:
    key, table = str(place[-1]), describe.table_at(model, place[:-1])
    known = list(describe.fields_of(table)) if table else []
    if key.lower().replace("-", "_") == "trust_remote_code":
        return Problem(place, "a file cannot allow remote code", "use --trust-remote-code on the command line")
    if answer := translate_key(key, value, _scalars(data)):
        return Problem(place, f"unknown key, from {answer[0]}", f"here it is {answer[1]}")
    if reason := NO_COUNTERPART.get(key.lower().replace("-", "_")):
        return Problem(place, "unknown key, from another tool", reason)
    longer = next((name for name in known if key.lower() in name.split("_")), None)  # "steps" for "every_steps"
    if meant := closest_match(key, known) or longer:
        return Problem(place, "unknown key", f"did you mean {key_text((*place[:-1], meant), data)}?")
    if homes := keys_named(model, key):
        return Problem(place, "unknown key here", f"it belongs in {' or '.join(homes)}")
    if meant := closest_match(key, (leaf for leaf in _leaves(model) if leaf)):
        return Problem(place, "unknown key", f"did you mean {' or '.join(keys_named(model, meant))}?")
    return Problem(place, "unknown key", f"allowed here: {', '.join(known)}")


def _scalars(node: Any) -> Data:
    found: Data = {}
    for key, value in node.items() if isinstance(node, dict) else ():
        found.update(_scalars(value) if isinstance(value, dict) else {key.lower().replace("-", "_"): value})
    return found


def _leaves(model: type[Table]) -> dict[str, list[str]]:
    """The last part of each key, such as `path`, to all dotted keys of `model` that end in it."""
    found: dict[str, list[str]] = {}
    root = RunSpec if model is RunSpec else model
    for table, field in describe.fields_of(root).items():
        inner = describe.table_at(root, (table,))
        if inner is None and describe.table_at(root, (table, 0)) is None:
            found.setdefault(table, []).append(table)
        for key in describe.fields_of(inner) if inner else ():
            found.setdefault(key, []).append(f"{table}.{key}")
            if field and inner and (entry := describe.table_at(inner, (key, 0))):
                for leaf in describe.fields_of(entry):
                    found.setdefault(leaf, []).append(f"[[{table}.{key}]] {leaf}")
    return found


def keys_named(model: type[Table], key: str) -> list[str]:
    """The dotted keys of `model` whose last part is `key`, at most three."""
    return _leaves(model).get(key, [])[:3]


def _touches(place: Place, bad: set[Place]) -> bool:
    return any(place[: len(other)] == other or other[: len(place)] == place for other in bad)


def _validated_remainder(model: type[CheckedTable], data: Data) -> CheckedTable | None:
    """The valid part, without invalid keys, with placeholders for missing ones. None if still invalid after a few
    rounds."""
    for _ in range(4):
        try:
            return model.model_validate(data)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            for place, kind in {_place(d["loc"], data, d["type"]): d["type"] for d in details}.items():
                data = _with_placeholder(model, data, place) if kind == "missing" else _without(data, place)
    return None


def _with_placeholder(model: type[Table], data: Data, place: Place) -> Data:
    table, key = describe.table_at(model, place[:-1]), str(place[-1])
    tables: dict[type[BaseModel] | None, Data] = {
        Profile: {"device": {"kind": "cpu", "memory_gib": 1.0}},
        Recipe: {"model": {"id": "example"}, "data": {"sources": EXAMPLES_BY_KEY["sources"][1]}},
        RunSpec: {
            "profile": {"name": "example", "device": {"kind": "cpu", "memory_gib": 1.0}},
            "recipe": MINIMAL_RECIPE,
        },
    }
    value = tables.get(table, {}).get(key, EXAMPLES_BY_KEY.get(key, ("", "example"))[1])
    return dict(_changed(data, place, lambda node: node.update({key: value})))


def _without(data: Data, place: Place) -> Data:
    """A copy without the value at `place`; of a list entry, without the whole list: other indices would change."""
    whole = place[:-1] if isinstance(place[-1], int) else place
    return dict(_changed(data, whole, lambda node: node.pop(whole[-1], None)))


def _changed(node: Any, place: Place, change: Any) -> Any:
    """A copy in which `change` was applied to the table that contains the key at `place`, if there is one."""
    copy: Any = dict(node) if isinstance(node, dict) else list(node)
    if len(place) <= 1:
        if isinstance(copy, dict):
            change(copy)
        return copy
    inner = value_at(node, place[:1])
    if isinstance(inner, (dict, list)):
        copy[place[0]] = _changed(inner, place[1:], change)
    return copy


def _rule_problems(table: Table, data: Data) -> Iterator[Problem]:
    if isinstance(table, RunSpec):
        yield from (problem.under(("profile",)) for problem in _rule_problems(table.profile, data.get("profile", {})))
        yield from (problem.under(("recipe",)) for problem in _rule_problems(table.recipe, data.get("recipe", {})))
    elif isinstance(table, Profile):
        yield from problems_of_profile(table)
        yield from (problem.under(("overrides",)) for problem in _partial(MINIMAL_RECIPE, table.overrides))
    elif isinstance(table, Recipe):
        yield from problems_of_recipe(table)
        yield from _sweep_problems(table, data)
        yield from _stage_problems(table, data)


def _partial(base: Data, extra: Data) -> list[Problem]:
    if not extra:
        return []
    unknown = [
        Problem((key,), "unknown key", f"tables of a recipe are allowed: {', '.join(OVERRIDABLE_TABLES)}")
        for key in extra
        if key not in OVERRIDABLE_TABLES
    ]
    known = {key: value for key, value in extra.items() if key in OVERRIDABLE_TABLES}
    _, problems = check_table(Recipe, merge_tables(base, known))
    return unknown + [
        problem for problem in problems if value_at(known, problem.place[:1]) is not None and _written(known, problem)
    ]


def _written(extra: Data, problem: Problem) -> bool:
    return any(value_at(extra, place) is not None for place in (problem.place, *problem.beside))


def _stage_problems(recipe: Recipe, data: Data) -> Iterator[Problem]:
    """The keys in a stage's tables are checked in the recipe that the stage trains with."""
    yield from problems_of_stages(recipe)
    for index, stage in enumerate(recipe.stages):
        tables = stage.model_dump(by_alias=True, exclude_none=True)
        _, problems = check_table(Recipe, merge_stage(data, tables))
        own = {key: tables[key] for key in STAGE_TABLES if tables.get(key)}
        yield from (problem.under(("stages", index)) for problem in problems if _written(own, problem))


def _sweep_problems(recipe: Recipe, data: Data) -> Iterator[Problem]:
    for key, values in recipe.sweep.items():
        for index, value in enumerate(values):
            parts = key.split(".")
            if parts[0] == "stages":  # its value is checked with the point that it is part of
                unknown = resolve_key({**data, "stages": data.get("stages", [])}, tuple(parts))[1]
                yield from [Problem(("sweep", key), quoted(key), unknown)] if unknown else []
                continue
            extra: Any = value
            for part in reversed(parts):
                extra = {part: extra}
            for problem in _partial({key: data[key] for key in data if key not in ("stages", "sweep")}, extra):
                yield Problem(("sweep", key, index), problem.found, problem.allowed)
