"""LLaMA-Factory's v1 layout: nested tables, and data sets in a YAML file of their own."""

from __future__ import annotations

from typing import Any

from engine.config.files.text import quoted
from engine.config.imports.draft import Draft
from engine.config.imports.sources import name_of, place_of

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
