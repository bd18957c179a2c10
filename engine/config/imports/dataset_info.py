"""LLaMA-Factory's data sets: names that its dataset_info.json explains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config.files.document import decode_utf8, read_bytes
from engine.config.files.find import reach
from engine.config.files.text import quoted, visible
from engine.config.imports.draft import Draft
from engine.config.imports.sources import name_of
from engine.errors import SpecError

FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "chat"}


def read_dataset_info(file: Path, folder: str, cwd: Path) -> dict[str, Any]:
    """dataset_info.json of `folder`, below the working directory or a folder above the configuration; empty if there
    is none. Raises SpecError if it is not a JSON object."""
    found = find_beside(file, f"{folder}/dataset_info.json", cwd)
    if found is None:
        return {}
    label = visible(str(found))
    try:
        data = json.loads(decode_utf8(read_bytes(found, label), label))
    except (ValueError, RecursionError):
        raise SpecError([f"{label}: not JSON"]) from None
    return data if isinstance(data, dict) else {}


def find_beside(file: Path, name: str, cwd: Path) -> Path | None:
    """The file `name`, a path that stays inside, below the working directory or the next folders above `file`."""
    if reach(name) or len(name) > 200:
        return None
    places = [start / name for start in (cwd, *list(file.absolute().parents)[:4])]
    return next((place for place in places if place.is_file() and not place.is_symlink()), None)


def factory_source(draft: Draft, name: str, folder: str, key: str, taken: list[dict[str, Any]]) -> dict[str, Any]:
    info = draft.dataset_info.get(name)
    found: dict[str, Any] = {"name": name_of(name, taken)}
    if not isinstance(info, dict):
        draft.blanks[f"{key}.{name}"] = f"no dataset_info.json in {quoted(folder)} names it: correct its path"
        return {**found, "path": f"data/{found['name']}.json", "format": "auto"}
    info = dict(info)
    hub, file = info.pop("hf_hub_url", None), info.pop("file_name", None)
    info.pop("ms_hub_url", None), info.pop("om_hub_url", None)  # mirrors of the same data
    if hub:
        found["hub"] = str(hub)
    elif file and not reach(f"{folder}/{file}"):
        found["path"] = f"{folder}/{file}"
    else:
        draft.blanks[f"{key}.{name}"] = f"{quoted(info)} is neither a file below {quoted(folder)} nor a hub data set"
        found["path"] = f"data/{found['name']}.json"
    for theirs, ours in (("subset", "config"), ("split", "split"), ("num_samples", "limit")):
        if (value := info.pop(theirs, None)) is not None:
            found[ours] = value
    kind = str(info.pop("formatting", "alpaca"))
    found["format"] = "preference" if info.pop("ranking", False) else FORMATS.get(kind, "auto")
    columns, tags = info.pop("columns", None) or {}, info.pop("tags", None) or {}
    if found["format"] == "sharegpt" and tags.get("content_tag") == "content":
        found["format"] = "chat"
    if "images" in columns:
        found["format"] = "image-preference" if found["format"] == "preference" else "image-chat"
    judged = "preference" in found["format"] or draft.get("method.objective") == "dpo"
    mapped = _judged_columns(columns) if judged else _columns(found["format"], columns)
    found.update({"columns": mapped} if mapped else {})
    for theirs in ("query", "history"):
        if judged and theirs in columns:
            draft.leave(f"{key}.{name}.columns.{theirs}", "a prompt of preferences is one column: join them there")
    if tags:
        draft.leave(f"{key}.{name}.tags", "the keys and roles of a turn are recognised by their usual names")
    for word, value in info.items():
        draft.leave(f"{key}.{name}.{word}", f"{quoted(value)}: a source has no such key")
    return found


def _columns(form: str, columns: dict[str, Any]) -> dict[str, str]:
    """Alpaca's names by LLaMA-Factory's; of other formats the columns whose names are not the usual ones."""
    ours = {"prompt": "instruction", "query": "input", "response": "output"} if form == "alpaca" else {}
    if form in ("text", "auto"):
        ours = {"prompt": "text"}
    if form in ("chat", "image-chat", "sharegpt"):
        ours = {"messages": "conversations" if form == "sharegpt" else "messages"}
    named = {ours.get(theirs, theirs): str(value) for theirs, value in columns.items()}
    return {mine: value for mine, value in named.items() if mine != value}


def _judged_columns(columns: dict[str, Any]) -> dict[str, str]:
    """Of preferences: a conversation is the prompt of its chosen and rejected answers."""
    ours = {"response": "completion", "kto_tag": "label"} | ({"messages": "prompt"} if "chosen" in columns else {})
    named = {ours.get(theirs, theirs): str(value) for theirs, value in columns.items()}
    return {mine: value for mine, value in named.items() if mine not in (value, "query", "history")}
