"""Sources of a recipe from the data set entries of other tools."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from engine.config.files.find import reach
from engine.config.files.text import quoted
from engine.config.imports.draft import Draft

FILE_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".arrow", ".gz", ".zst")
AXOLOTL_FORMATS = {
    "alpaca": "alpaca",
    "chat_template": "chat",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
    "input_output": "auto",
    "messages": "chat",
}
"""Axolotl's prompt strategies whose rows we read; `chat_template` rows may also be sharegpt's."""


def name_of(text: str, taken: list[dict[str, Any]]) -> str:
    stem = re.sub("[^a-z0-9._-]+", "-", PurePosixPath(text).name.lower()).strip("-._")[:60] or "main"
    names = {source["name"] for source in taken}
    return next(name for name in (stem, *(f"{stem}-{n}" for n in range(2, len(names) + 3))) if name not in names)


def place_of(draft: Draft, text: str, key: str) -> dict[str, Any]:
    """`path` for what is a file or folder by its spelling, else `hub`. An absolute path, or one that leaves the folder,
    becomes data/NAME and a blank."""
    bare = text.removeprefix("./")
    if reason := reach(bare):
        inside = f"data/{PurePosixPath(bare).name or 'train.jsonl'}"
        draft.blanks[key] = f"{quoted(text)} {reason}: put the file at {inside}, or write its place there"
        return {"path": inside}
    if bare != text or bare.lower().endswith(FILE_ENDINGS) or bare.count("/") > 1 or bare.startswith("data/"):
        return {"path": bare}
    return {"hub": bare}


def axolotl_source(draft: Draft, entry: dict[str, Any], key: str, taken: list[dict[str, Any]]) -> dict[str, Any]:
    entry = dict(entry)
    path, files = str(entry.pop("path", "")), entry.pop("data_files", None)
    kind = str(entry.pop("ds_type", "") or "")
    if path in ("json", "csv", "parquet", "text") or (kind and files):
        path = str(files[0] if isinstance(files, list) else files)
        files = None
    found = {"name": name_of(path, taken), **place_of(draft, path, f"{key}.path")}
    if kind and "hub" in found:
        found["path"] = found.pop("hub")
    if "hub" in found:
        for theirs, ours in (("name", "config"), ("split", "split")):
            if (value := entry.pop(theirs, None)) is not None:
                found[ours] = str(value)
    columns = _axolotl_columns(draft, entry, found, f"{key}.type")
    if columns:
        found["columns"] = columns
    for name, value in {**entry, **({"data_files": files} if files else {})}.items():
        if value is not None:
            draft.leave(f"{key}.{name}", SOURCE_REASONS.get(name, f"{quoted(value)}: a source has no such key"))
    return found


SOURCE_REASONS = {
    "roles": "roles are recognised by their usual names",
    "roles_to_train": "the assistant's turns are learned (data.loss_on)",
    "train_on_eos": "the end of an answer is learned with it",
    "train_on_eot": "the end of a turn is learned with it",
    "conversation": "the model's chat template is used",
    "chat_template": "the model's chat template is used; model.chat_template takes another",
    "message_property_mapping": "the keys of a turn are recognised by their usual names",
    "message_field_training": "a turn with train: false or weight: 0 is context",
    "ds_type": "a file's type is known by its ending",
    "trust_remote_code": "data sets that are code are not loaded",
    "streaming": "data are read as they are needed",
}


def _axolotl_columns(draft: Draft, entry: dict[str, Any], found: dict[str, Any], key: str) -> dict[str, str]:
    kind = entry.pop("type", None)
    columns: dict[str, str] = {}
    mapping = entry.get("message_property_mapping")
    field = entry.pop("field_messages", None)
    if isinstance(kind, dict):
        fields = {"instruction": "field_instruction", "input": "field_input", "output": "field_output"}
        columns = {ours: str(kind[theirs]) for ours, theirs in fields.items() if kind.get(theirs)}
        columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
        found["format"] = "alpaca"
        if set(kind) - set(fields.values()):
            draft.leave(f"{key}.format", "a prompt's own words are not kept: the model's chat template is used")
    elif draft.get("method.objective") == "dpo":
        found["format"] = "preference"
        draft.leave(key, f"{quoted(kind)}: rows of preferences are read by their columns and the chat template")
    elif (known := re.split("[.:]", str(kind))[0]) in AXOLOTL_FORMATS:
        found["format"] = AXOLOTL_FORMATS[known]
        if known != kind:
            draft.leave(key, f"{quoted(kind)}: the template after {known} is the model's own chat template")
        if found["format"] == "chat" and isinstance(mapping, dict) and "value" in mapping.values():
            found["format"] = "sharegpt"
        draft.origin[f"data.sources.{found['name']}.format"] = key
    else:
        found["format"] = "auto"
        draft.blanks[key] = f"{quoted(kind)}: a prompt format that is not known here; see that `tunedeck data` reads it"
    if field and field not in ("messages", "conversations"):
        columns["messages" if found["format"] == "chat" else "conversations"] = str(field)
    elif field == "conversations" and found["format"] == "chat":
        columns["messages"] = "conversations"
    text = entry.pop("field", None) or entry.pop("text_column", None)
    if text and text != "text" and found["format"] == "text":
        columns["text"] = str(text)
    return columns


def mixture_source(draft: Draft, entry: dict[str, Any], key: str, taken: list[dict[str, Any]]) -> dict[str, Any]:
    """An entry of TRL's `datasets` (path, name) or of the alignment handbook's `dataset_mixture` (id, config)."""
    entry = dict(entry)
    path = str(entry.pop("id", None) or entry.pop("path", ""))
    found = {"name": name_of(path, taken), **place_of(draft, path, f"{key}.path")}
    for theirs, ours in (("config", "config"), ("name", "config"), ("split", "split"), ("weight", "weight")):
        value = entry.pop(theirs, None)
        if value is not None and not (ours == "config" and value == "default") and ours not in found:
            found[ours] = value
    if draft.get("method.objective") == "dpo":
        found["format"] = "preference"
    if (columns := entry.pop("columns", None)) is not None:
        draft.leave(f"{key}.columns", f"{quoted(columns)}: columns are recognised by their names")
    for name, value in entry.items():
        draft.leave(f"{key}.{name}", f"{quoted(value)}: a source has no such key")
    return found
