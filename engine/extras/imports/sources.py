"""Sources of a recipe from the data set entries of other tools."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from engine.config.files.find import reach
from engine.config.files.text import quoted
from engine.extras.imports.draft import OFF, Draft

FILE_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".md", ".arrow", ".gz", ".zst")
USUAL_ROLES = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "model", "bot", "chatgpt", "bard"),
    "system": ("system",),
    "tool": ("tool", "observation", "function_response", "function"),
}
"""Names of roles that are read without a mapping."""


def name_of(text: str, taken: list[dict[str, Any]]) -> str:
    stem = re.sub("[^a-z0-9._-]+", "-", PurePosixPath(text).name.lower()).strip("-._")[:60] or "main"
    names = {source["name"] for source in taken}
    return next(name for name in (stem, *(f"{stem}-{n}" for n in range(2, len(names) + 3))) if name not in names)


def place_of(draft: Draft, text: str, key: str) -> dict[str, Any]:
    """Return `path` for what is a file or folder, else `hub`.

    A file or folder is what exists below the working directory or beside the configuration, or is spelt like one. An
    absolute path, or one that leaves the folder, becomes data/NAME and a blank.
    """
    bare = text.removeprefix("./")
    if reason := reach(bare):
        inside = f"data/{PurePosixPath(bare).name or 'train.jsonl'}"
        draft.blanks[key] = f"{quoted(text)} {reason}: put the file at {inside}, or set its path there"
        return {"path": inside}
    is_spelt_so = bare != text or bare.lower().endswith(FILE_ENDINGS) or bare.count("/") > 1 or bare.startswith("data/")
    if is_spelt_so or (bare and any((folder / bare).exists() for folder in draft.folders)):
        return {"path": bare}
    return {"hub": bare}


def take_turn_keys(draft: Draft, entry: dict[str, Any], source: dict[str, Any], key: str) -> None:
    """Account for the keys of a turn that Axolotl maps; `from` and `value` make the format sharegpt."""
    mapping: dict[str, Any] = {}
    for name in ("message_property_mappings", "message_property_mapping"):
        given = entry.pop(name, None)
        mapping |= given if isinstance(given, dict) else {}
    for name in ("role", "content"):
        if (theirs := entry.pop(f"message_field_{name}", None)) is not None:
            mapping[name] = theirs
    others = {ours: theirs for ours, theirs in mapping.items() if ours != theirs}
    if others == {"role": "from", "content": "value"} and source.get("format") in ("chat", "sharegpt"):
        source["format"] = "sharegpt"
    elif others:
        draft.blanks[f"{key}.message_property_mappings"] = (
            f"{quoted(mapping)}: the keys of a turn are role and content, or from and value"
        )


def take_roles(draft: Draft, entry: dict[str, Any], source: dict[str, Any], key: str) -> None:
    """Account for a mapping of role names, ours to a list of theirs."""
    roles = entry.pop("roles", None)
    if not isinstance(roles, dict):
        if roles not in OFF:
            draft.blanks[f"{key}.roles"] = f"{quoted(roles)}: expected a role with a list of names"
        return
    unusual = {
        ours: names
        for ours, names in roles.items()
        if any(name not in USUAL_ROLES.get(str(ours), ()) for name in (names if isinstance(names, list) else [names]))
    }
    if unusual:
        draft.blanks[f"{key}.roles"] = f"{quoted(unusual)}: these names of roles are not recognised"


def mixture_source(draft: Draft, entry: dict[str, Any], key: str, taken: list[dict[str, Any]]) -> dict[str, Any]:
    """An entry of TRL's `datasets` (path, name) or of the alignment handbook's `dataset_mixture` (id, config)."""
    entry = dict(entry)
    path = str(entry.pop("id", None) or entry.pop("path", ""))
    source = {"name": name_of(path, taken), **place_of(draft, path, f"{key}.path")}
    for theirs, ours in (("config", "config"), ("name", "config"), ("split", "split"), ("weight", "weight")):
        value = entry.pop(theirs, None)
        if value is None or (ours == "config" and value == "default") or ours in source:
            continue
        if ours == "config" and "hub" not in source:
            draft.blanks[f"{key}.{theirs}"] = f"{quoted(value)}: only a data set on the hub has configurations"
        else:
            source[ours] = value
    if draft.get("method.objective") == "dpo":
        source["format"] = "preference"
    if (columns := entry.pop("columns", None)) is not None and not (
        isinstance(columns, list) and set(columns) <= {"messages", "prompt", "chosen", "rejected", "completion", "text"}
    ):
        draft.blanks[f"{key}.columns"] = f"{quoted(columns)}: columns are recognised by their usual names"
    for name, value in entry.items():
        if value not in OFF:
            draft.blanks[f"{key}.{name}"] = f"{quoted(value)}: unknown key of a data set"
    return source
