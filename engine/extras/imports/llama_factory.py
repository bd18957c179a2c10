"""LLaMA-Factory's configurations: data sets by names that its dataset_info.json explains, and its v1 layout, nested
tables with data sets in a separate YAML file.

Defaults by its source: `hparams/`, `model/adapter.py`, `data/processor/`, `train/sft/workflow.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config.check.aliases import REWARD_METHODS, WITHOUT_REWARDS
from engine.config.files.document import decode_utf8, read_bytes
from engine.config.files.find import reach
from engine.config.files.text import quoted, visible
from engine.errors import SpecError
from engine.extras.imports.draft import OFF, Draft
from engine.extras.imports.sources import USUAL_ROLES, name_of, place_of
from engine.extras.imports.templates import take_template

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
        draft.blanks[f"{key}.{name}"] = f"it is not in dataset_info.json of {quoted(folder)}: correct its path"
        return {**found, "path": f"data/{found['name']}.json", "format": "auto"}
    info = dict(info)
    hub, file = info.pop("hf_hub_url", None), info.pop("file_name", None)
    info.pop("ms_hub_url", None), info.pop("om_hub_url", None)  # mirrors of the same data
    if hub:
        found["hub"] = str(hub)
    elif file and not reach(f"{folder}/{file}"):
        found["path"] = f"{folder}/{file}"
    else:
        draft.blanks[f"{key}.{name}"] = f"{quoted(info)} is neither a file in {quoted(folder)} nor a hub data set"
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
    if judged and columns.get("history") not in OFF:
        draft.blanks[f"{key}.{name}.columns.history"] = "earlier turns of a preference row: put them into its prompt"
    _take_tags(draft, tags, f"{key}.{name}.tags")
    for word, value in info.items():
        if value not in OFF:
            draft.blanks[f"{key}.{name}.{word}"] = f"{quoted(value)}: unknown key of a data set"
    return found


TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": USUAL_ROLES["user"],
    "assistant_tag": USUAL_ROLES["assistant"],
    "observation_tag": USUAL_ROLES["tool"],
    "function_tag": ("function_call",),
    "system_tag": USUAL_ROLES["system"],
}
"""Its names for the keys and roles of a turn, to the values that are read without a mapping."""


def _take_tags(draft: Draft, tags: dict[str, Any], key: str) -> None:
    unusual = {tag: value for tag, value in tags.items() if value not in TAGS.get(tag, ())}
    if unusual:
        draft.blanks[key] = f"{quoted(unusual)}: these names of keys or roles are not recognised"
    elif tags:
        draft.leave(key, "the keys and roles of a turn have their usual names")


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
    if "query" in columns:  # the query stays part of the prompt: the row is read as an instruction with its input
        ours |= {"prompt": "instruction", "query": "input"}
    named = {ours.get(theirs, theirs): str(value) for theirs, value in columns.items()}
    return {mine: value for mine, value in named.items() if mine not in (value, "history")}


def read_factory(draft: Draft) -> None:
    if "train_dataset" in draft.theirs:
        read_v1(draft)
        return
    stage = draft.take("stage") or "sft"
    if (named := {"rm": "reward"}.get(stage, stage)) in REWARD_METHODS:
        draft.refuse("stage", named, WITHOUT_REWARDS)
    kind = draft.theirs.get("finetuning_type", "lora")
    if kind not in ("lora", "full"):
        draft.refuse("finetuning_type", kind, "only full training and LoRA are supported")
    for key in ("do_predict", "do_eval"):
        if draft.theirs.get(key) and not draft.theirs.get("do_train", False):
            draft.refuse(key, True, "only evaluation; expected a training configuration")
    if stage in ("dpo", "kto"):
        draft.set("method.objective", "dpo", "stage")
        if stage == "kto":
            draft.set("preference.loss", "kto", "stage")
    elif stage == "pt":
        draft.set("data.loss_on", "all", "stage")
        draft.default("data.packing", True)
    if stage == "pt" and draft.theirs.get("packing") is not False:
        draft.set("data.over_length", "split", "LLaMA-Factory's default for stage pt")
    else:
        _cut(draft)
    if stage == "sft" and draft.theirs.get("packing") and not draft.theirs.get("neat_packing"):
        draft.notes.append("in LLaMA-Factory's packing, attention crosses packed rows; here it does not")
    bits = draft.theirs.get("quantization_bit")
    if bits not in (None, 4):
        draft.blanks[draft.take_named("quantization_bit")] = (
            f'{bits} bits are not supported: choose model.quantize = "none" (16 bits) or "nf4" (4 bits)'
        )
    if draft.take("mask_history"):
        draft.set("data.loss_on", "last", "mask_history")
    if (thinks := draft.take("enable_thinking")) is not None:
        draft.set("data.template_args", {"enable_thinking": bool(thinks)}, "enable_thinking")
    draft.rounds_weights = bool(draft.take("pure_bf16"))
    if draft.rounds_weights:
        draft.set("model.dtype", "bfloat16", "pure_bf16")
    extra = draft.take("additional_target")
    if extra not in OFF:
        draft.theirs["modules_to_save"] = [word.strip() for word in str(extra).split(",")]
    _freezes(draft, kind)
    _named_data(draft, stage)
    take_template(draft, "template", {})


def _cut(draft: Draft) -> None:
    draft.set("data.over_length", "truncate", "LLaMA-Factory's default")
    draft.notes.append(
        "LLaMA-Factory truncates prompt and answer of a long row in proportion, turn by turn; here the end of "
        "the row is cut off"
    )


def _freezes(draft: Draft, kind: str) -> None:
    """Set which parts of a model with images are frozen: by default its vision tower and its projector."""
    given = {
        key: draft.take(key) for key in ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
    }
    if all(value is None for value in given.values()):
        return
    parts = {
        "freeze_vision_tower": "vision",
        "freeze_multi_modal_projector": "projector",
        "freeze_language_model": "language",
    }
    defaults = {"freeze_language_model": False}
    frozen = [parts[key] for key, value in given.items() if (defaults.get(key, True) if value is None else value)]
    if frozen:
        draft.set("method.freeze", frozen, " and ".join(key for key, value in given.items() if value is not None))
    else:
        draft.leave("freeze_vision_tower", "every part is trained")


def _named_data(draft: Draft, stage: str) -> None:
    limit = draft.take("max_samples")
    folder = draft.theirs.get("dataset_dir") or "data"
    for key, ours in (("dataset", "data.sources"), ("eval_dataset", "data.validation")):
        taken: list[dict[str, Any]] = []
        names = draft.take(key)
        for name in names if isinstance(names, list) else str(names or "").split(","):
            if str(name).strip():
                source = factory_source(draft, str(name).strip(), str(folder), key, taken)
                if stage == "pt" and source["format"] == "auto":
                    source["format"] = "text"
                taken.append({**source, **({"limit": limit} if isinstance(limit, int) and limit > 0 else {})})
        if taken:
            draft.set(ours, taken, key)
    size = draft.theirs.get("val_size")
    if isinstance(size, (int, float)) and size >= 1:
        draft.blanks[draft.take_named("val_size")] = (
            f"{size} samples: set data.valid_fraction, a fraction of the samples"
        )


CONVERTERS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference"}


def read_v1(draft: Draft) -> None:
    draft.theirs["model_name_or_path"] = draft.take("model")
    peft = _table(draft, "peft_config")
    kind = peft.pop("name", None)
    if kind not in (None, "lora"):
        draft.refuse("peft_config.name", kind, "only full training and LoRA are supported")
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
        draft.blanks["quant_config"] = (
            f'{quoted(bits)} bits are not supported: choose model.quantize = "none" (16 bits) or "nf4" (4 bits)'
        )
    shards = _table(draft, "dist_config")
    if (name := shards.pop("name", None)) is not None:
        draft.theirs["deepspeed" if name == "deepspeed" else "fsdp"] = shards.pop("config_file", None) or name
    for key, value in shards.items():
        if value is not None:
            draft.leave(f"dist_config.{key}", f"{quoted(value)}: [parallel] sets devices and sharding")
    _cut(draft)
    if (every := draft.take("save_epochs")) not in OFF:
        if isinstance(every, (int, float)) and every > 0 and (1 / every).is_integer():
            draft.set("checkpoint.per_epoch", int(1 / every), "save_epochs")
        else:
            draft.leave("save_epochs", f"{quoted(every)}: set checkpoint.every_steps")
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
            draft.leave("micro_batch_size", "the plan chooses train.micro_batch")


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
            if value not in OFF:
                draft.blanks[f"train_dataset.{name}.{key}"] = f"{quoted(value)}: unknown key of a data set"
        sources.append(found)
    if any(source["format"] == "preference" for source in sources):
        draft.set("method.objective", "dpo", "train_dataset (pairs)")
    if not sources and not given.endswith((".yaml", ".yml")):
        sources.append({"name": name_of(given, []), **place_of(draft, given, "train_dataset"), "format": "auto"})
    elif not sources:
        draft.blanks["train_dataset"] = f"{quoted(given)} is not next to the file: set the path of your data"
    draft.set("data.sources", sources, "train_dataset")
