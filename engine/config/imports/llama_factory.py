"""What is particular to LLaMA-Factory: data sets by names that its dataset_info.json explains, and its v1 layout,
nested tables with data sets in a YAML file of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config.files.document import decode_utf8, read_bytes
from engine.config.files.find import reach
from engine.config.files.text import quoted, visible
from engine.config.imports.draft import Draft
from engine.config.imports.sources import name_of, place_of
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


CONVERTERS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference"}


def read_v1(draft: Draft) -> None:
    draft.theirs["model_name_or_path"] = draft.take("model")
    peft = _table(draft, "peft_config")
    kind = peft.pop("name", None)
    if kind not in (None, "lora"):
        draft.refuse("peft_config.name", kind, "of trainings only full ones and LoRA exist here")
    draft.set("method.kind", "lora" if kind else "full", "peft_config.name" if kind else "peft_config (none)")
    target = peft.pop("target_modules", None)
    if target is not None:
        draft.theirs["peft_config.lora_target"] = target
    draft.theirs.update({f"peft_config.{key}": value for key, value in peft.items()})
    quantised = _table(draft, "quant_config")
    bits = quantised.pop("quantization_bit", None)
    if bits == 4:
        draft.set("model.quantize", "nf4", "quant_config.quantization_bit")
    elif quantised or bits:
        draft.leave("quant_config", f"{quoted(bits)} bits do not exist here: the base stays in 16 bits")
    shards = _table(draft, "dist_config")
    if (name := shards.pop("name", None)) is not None:
        draft.theirs["deepspeed" if name == "deepspeed" else "fsdp"] = shards.pop("config_file", None) or name
    for key, value in shards.items():
        if value is not None:
            draft.leave(f"dist_config.{key}", f"{quoted(value)}: devices and sharding are [parallel]'s")
    for key, reason in {
        "optim_config": "this optimizer does not exist here; adamw takes its place",
        "batching_strategy": "a micro-batch is packed without padding, or padded to its own longest",
        "init_config": "weights are read piece by piece, on every device its own",
        "model_class": "the class is found from the model's own config",
        "sample_backend": "sampling of answers belongs to [generate]",
        "max_new_tokens": "sampling of answers belongs to [generate]",
    }.items():
        if (value := draft.take(key)) is not None:
            draft.leave(key, f"{quoted(value)}: {reason}")
    _batch(draft)
    draft.default("train.scheduler", "constant")
    if "learning_rate" not in draft.theirs:
        draft.default("train.learning_rate", 1e-4)
    _data(draft)


def _table(draft: Draft, key: str) -> dict[str, Any]:
    value = draft.take(key)
    return dict(value) if isinstance(value, dict) else {}


def _batch(draft: Draft) -> None:
    total = draft.theirs.get("global_batch_size")
    if isinstance(total, int):
        draft.set("train.batch_size", draft.take("global_batch_size"), "global_batch_size")
        if draft.take("micro_batch_size") is not None:
            draft.leave("micro_batch_size", "train.micro_batch is found by the plan")


def _data(draft: Draft) -> None:
    given = str(draft.take("train_dataset"))
    sources: list[dict[str, Any]] = []
    for name, entry in draft.dataset_info.items():
        entry = dict(entry) if isinstance(entry, dict) else {}
        path = str(entry.pop("path", ""))
        if entry.pop("source", None) == "local":
            path = f"./{path.removeprefix('./')}"
        found = {"name": name_of(str(name), sources), **place_of(draft, path, f"train_dataset.{name}.path")}
        converter = entry.pop("converter", None)
        found["format"] = CONVERTERS.get(str(converter), "auto")
        for theirs, ours in (("split", "split"), ("size", "limit"), ("weight", "weight")):
            if (value := entry.pop(theirs, None)) is not None:
                found[ours] = value
        for key, value in entry.items():
            draft.leave(f"train_dataset.{name}.{key}", f"{quoted(value)}: a source has no such key")
        sources.append(found)
    if any(source["format"] == "preference" for source in sources):
        draft.set("method.objective", "dpo", "train_dataset (pairs)")
    if not sources and not given.endswith((".yaml", ".yml")):
        sources.append({"name": name_of(given, []), **place_of(draft, given, "train_dataset"), "format": "auto"})
    elif not sources:
        draft.blanks["train_dataset"] = f"{quoted(given)} is not beside the file: write where your data are"
    draft.set("data.sources", sources, "train_dataset")
