"""Overrides: parses `--set K=V`, and sets values in a document with a record of where each came from.

Values are checked afterwards, on the merged document, so that every problem is reported at once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomli

from engine.config.files.document import FROM_COMMAND_LINE, Document, Place, value_at
from engine.config.files.text import closest_match, quoted, visible

EXCLUSIVE = {"path": "hub", "hub": "path", "warmup_ratio": "warmup_steps", "warmup_steps": "warmup_ratio"}
"""Keys of which only one may be set: setting one in a higher layer removes the other from a lower layer."""

PROFILE_TABLES = ("device", "parallel", "nodes")
NOT_SETTABLE = {
    "schema": "it belongs in the file",
    "kind": "it belongs in the file",
    "name": "name the run with --name",
    "profile": "choose the profile with -p",
    "overrides": "set the key itself",
}

UNSET = object()
"""The value of `--set K=`, which restores the default."""


@dataclass(frozen=True)
class Override:
    """One `--set K=V`: the parts of the dotted key, and the value (UNSET where V is empty)."""

    key: tuple[str, ...]
    value: Any


def parse_overrides(sets: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Parse the texts of `--set`; returns the overrides, and a problem for each text that does not parse."""
    overrides, problems = [], []
    for text in sets:
        key, equals, value = text.partition("=")
        parts = _key_parts(key.strip())
        if not equals:
            problems.append(f"--set {visible(text)}: no '='; KEY=VALUE is needed, such as train.learning_rate=1e-4")
        elif parts is None:
            problems.append(
                f"--set {visible(text)}: {quoted(key)} is not a key; keys look like data.sources.main.enabled"
            )
        elif parts[0] in NOT_SETTABLE:
            problems.append(f"--set {parts[0]}: cannot be set on the command line; {NOT_SETTABLE[parts[0]]}")
        else:
            overrides.append(Override(parts, parse_value(value.strip())))
    return overrides, problems


def _key_parts(key: str) -> tuple[str, ...] | None:
    """Split a dotted key by TOML's rules, which allow quoted parts; None for text that is not a key."""
    try:
        node: Any = tomli.loads(f"{key} = 0") if "\n" not in key else {}
    except (ValueError, RecursionError):  # ValueError: not TOML, or a number of thousands of digits
        return None
    parts = []
    while isinstance(node, dict) and len(node) == 1:
        part, node = next(iter(node.items()))
        parts.append(part)
    return tuple(parts) if parts and node == 0 else None


def parse_value(text: str) -> Any:
    """Parse a TOML value; the text itself if it is not valid TOML, UNSET if it is empty."""
    if not text:
        return UNSET
    try:
        parsed = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):  # ValueError: not TOML, or a number of thousands of digits
        return text
    return parsed["value"] if len(parsed) == 1 else text


def apply_overrides(profile: Document, recipe: Document, overrides: Sequence[Override]) -> list[str]:
    """Write overrides over the profile and the recipe, in place; returns a problem for each key that does not exist."""
    problems = []
    for override in overrides:
        document = profile if override.key[0] in PROFILE_TABLES and not _is_automatic(override) else recipe
        if override.key[0] == "parallel":
            _remove_from_recipe(recipe, override)
        problem = set_value(document, override.key, override.value, FROM_COMMAND_LINE)
        problems += [f"--set {'.'.join(map(visible, override.key))}: {problem}"] if problem else []
    return problems


def leave_sweep(recipe: Document, overrides: Sequence[Override]) -> list[str]:
    """Take the keys of `overrides` out of the recipe's sweep, in place, because `--set` replaces what a file says;
    returns a notice for each."""
    sweep, notices = recipe.data.get("sweep"), []
    for override in overrides:
        key = ".".join(override.key)
        if isinstance(sweep, dict) and key in sweep:
            del sweep[key]
            _forget(recipe, ("sweep", key))
            notices.append(f"{key} is set with --set, so it is not swept")
    return notices


def _is_automatic(override: Override) -> bool:
    """Only a recipe may have this value."""
    return override.key == ("parallel", "sequence") and override.value == "auto"


def _remove_from_recipe(recipe: Document, override: Override) -> None:
    """The recipe's [parallel] would otherwise replace what `override` sets in the profile's."""
    inner = override.value if isinstance(override.value, dict) else {}
    for key in [(*override.key, *rest) for rest, _ in leaf_items(inner)] or [override.key]:
        if value_at(recipe.data, key) is not None:
            set_value(recipe, key, UNSET, FROM_COMMAND_LINE)


def set_value(document: Document, key: tuple[str, ...], value: Any, label: str) -> str:
    """Set a key of a document, in place, and of each of its stages that also sets it; tables are merged. `label`
    records where the value came from. Returns an error message for a key that does not exist, else an empty text."""
    if isinstance(value, dict) and isinstance(value_at(document.data, key), dict):
        if not value:
            return f"an empty table has no effect; an empty value restores the default: {'.'.join(key)}="
        results = [set_value(document, (*key, part), inner, label) for part, inner in value.items()]
        return next((problem for problem in results if problem), "")
    if key[0] != "stages":
        stages = document.data.get("stages")
        for index, stage in enumerate(stages if isinstance(stages, list) else []):
            if isinstance(stage, dict) and value_at(stage, _found(stage, key) or ("?",)) is not None:
                _set_at(document, ("stages", index, *(_found(stage, key) or ())), value, label)
    place, problem = resolve_key(document.data, key)
    if not problem:
        _set_at(document, place, value, label)
    return problem


def _found(data: dict[str, Any], key: tuple[str, ...]) -> Place | None:
    place, problem = resolve_key(data, key)
    return None if problem else place


def resolve_key(data: dict[str, Any], key: tuple[str, ...]) -> tuple[Place, str]:
    """The place of a dotted key in `data`, where a list entry is addressed by its `name` or index, and an error message
    if a list has no such entry, else an empty text."""
    place: Place = ()
    rest = key
    node: Any = data
    while rest:
        if isinstance(node, list):
            index, taken = _entry(node, rest)
            if index is None:
                names = [str(item["name"]) for item in node if isinstance(item, dict) and "name" in item]
                meant = closest_match(rest[0], names)
                hint = f"; did you mean {meant}?" if meant else ""
                known = ", ".join(map(visible, names)) or (f"numbers from 0 to {len(node) - 1}" if node else "none")
                return place, f"no entry named {quoted(rest[0])}{hint}; existing: {known}"
            place, rest, node = (*place, index), rest[taken:], node[index]
        else:
            place, node, rest = (*place, rest[0]), node.get(rest[0]) if isinstance(node, dict) else None, rest[1:]
    return place, ""


def _entry(entries: list[Any], rest: tuple[str, ...]) -> tuple[int | None, int]:
    """The index of the list entry that the first parts of `rest` name (None if there is none), and how many parts its
    name takes, because a name may contain dots."""
    for taken in range(len(rest), 0, -1):
        name = ".".join(rest[:taken])
        for index, entry in enumerate(entries):
            if isinstance(entry, dict) and entry.get("name") == name:
                return index, taken
    number = int(rest[0]) if rest[0].isdecimal() else -1
    return (number, 1) if 0 <= number < len(entries) else (None, 0)


def _set_at(document: Document, place: Place, value: Any, label: str) -> None:
    node: Any = document.data
    for depth, part in enumerate(place[:-1], start=1):
        child = node.get(part) if isinstance(node, dict) else node[part]
        if not isinstance(child, (dict, list)):
            child = {}
            document.where[place[:depth]] = label
        node[part] = child
        node = child
    _forget(document, place)
    if value is UNSET:
        _remove(node, place[-1])
    else:
        node[place[-1]] = copy.deepcopy(value)
        _remove_exclusive(document, node, place, label)
    document.where[place] = label


def _remove(node: Any, part: str | int) -> None:
    if isinstance(node, dict):
        node.pop(part, None)
    elif isinstance(part, int):
        del node[part]


def _remove_exclusive(document: Document, node: Any, place: Place, label: str) -> None:
    other = EXCLUSIVE.get(str(place[-1]))
    if other and isinstance(node, dict) and other in node and document.where.get((*place[:-1], other)) != label:
        del node[other]
        _forget(document, (*place[:-1], other))


def _forget(document: Document, place: Place) -> None:
    for written in [known for known in document.where if known[: len(place)] == place]:
        del document.where[written]


def leaf_items(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """(key, value) for every value in nested tables; a key is the tuple of its parts."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for key, value in table.items():
        found += leaf_items(value, (*prefix, key)) if isinstance(value, dict) else [((*prefix, key), value)]
    return found
