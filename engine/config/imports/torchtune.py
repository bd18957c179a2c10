"""torchtune's configurations: components with arguments, and checkpoints in a local folder."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from engine.config.files.text import quoted
from engine.config.imports.draft import OFF, Draft
from engine.config.imports.sources import name_of, place_of

DATA_SETS: dict[str, dict[str, Any]] = {
    "alpaca_cleaned_dataset": {"hub": "yahma/alpaca-cleaned", "format": "alpaca"},
    "alpaca_dataset": {"hub": "tatsu-lab/alpaca", "format": "alpaca"},
    "stack_exchange_paired_dataset": {
        "hub": "lvwerra/stack-exchange-paired",
        "format": "preference",
        "columns": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
    },
    "the_cauldron_dataset": {"hub": "HuggingFaceM4/the_cauldron", "format": "image-chat"},
    "chat_dataset": {"format": "auto"},
    "instruct_dataset": {"format": "auto"},
    "preference_dataset": {"format": "preference"},
    "text_completion_dataset": {"format": "text"},
}
"""Builders of torchtune to the sources that they read."""

COMPONENTS = ("optimizer", "lr_scheduler", "loss", "model", "tokenizer", "checkpointer")
ALL_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def read_torchtune(draft: Draft) -> None:
    if not {"model", "optimizer"} <= set(draft.theirs):
        draft.refuse("config", "eval or generate", "no training; a configuration that trains is needed")
    parts = {name: _part(draft, name) for name in COMPONENTS}
    for name in ("profiler", "metric_logger", "ref_checkpointer"):
        if isinstance(draft.theirs.get(name), dict):
            draft.take(name)
            draft.leave(name, REASONS[name])
    loss = str(parts["loss"].pop("_component_", ""))
    prefers = "DPOLoss" in loss or "rlhf" in loss
    if prefers:
        if "DPOLoss" not in loss:
            draft.refuse("loss", loss, "of preference losses torchtune's DPOLoss exists here")
        draft.set("method.objective", "dpo", "loss")
        draft.set("preference.loss", "dpo", "loss")
        draft.default("preference.label_smoothing", parts["loss"].pop("label_smoothing", 0) or 0.0)
    elif loss:
        draft.leave("loss", f"{quoted(loss)}: cross-entropy, computed as train.loss says")
    if draft.get("method.objective") is None and "dev." in loss:
        draft.refuse("loss", loss, "this training does not exist here")
    _model(draft, parts["model"], parts["checkpointer"], parts["tokenizer"])
    _data(draft)
    rows = draft.take("batch_size")
    draft.theirs["per_device_batch_size"] = rows
    for part, name in (("optimizer", "train.optimizer"), ("lr_scheduler", "train.scheduler")):
        if component := parts[part].pop("_component_", None):
            draft.translate(part, component, name, component)
    draft.theirs.update({f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()})
    draft.unbounded_length = draft.theirs.get("tokenizer.max_seq_len") is None


REASONS = {
    "profiler": "profiling is not a part of a recipe",
    "metric_logger": "the journal keeps the metrics; trackers.use adds others",
    "ref_checkpointer": "the reference is this model as it was at the start",
}


def _part(draft: Draft, name: str) -> dict[str, Any]:
    value = draft.take(name)
    return dict(value) if isinstance(value, dict) else {}


def _model(draft: Draft, model: dict[str, Any], checkpointer: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    builder = str(model.pop("_component_", "")).rpartition(".")[2]
    is_lora, is_quantised = (
        "lora_" in builder or "lora_rank" in model,
        "qlora_" in builder or bool(model.pop("quantize_base", False)),
    )
    draft.set("method.kind", "lora" if is_lora else "full", f"model ({builder})")
    if is_quantised:
        draft.set("model.quantize", "nf4", f"model ({builder})")
    folder = str(checkpointer.pop("checkpoint_dir", "")).rstrip("/")
    _model_id(draft, folder)
    for name in ("_component_", "checkpoint_files", "output_dir", "filename_format", "max_filename"):
        if checkpointer.pop(name, None) is not None:
            draft.leave(
                f"checkpointer.{name}", "a model is read from its hub id or folder; runs have folders of their own"
            )
    for name in ("_component_", "path", "merges_file", "merges_path", "vocab_path", "special_tokens_path"):
        if tokenizer.pop(name, None) is not None:
            draft.leave(f"tokenizer.{name}", "the tokenizer is the model's own; model.tokenizer takes another")
    if isinstance(template := tokenizer.pop("prompt_template", None), (str, dict)):
        draft.leave("tokenizer.prompt_template", f"{quoted(template)}: the model's chat template is used")
    if is_lora:
        _targets(draft, model, builder)


def _model_id(draft: Draft, folder: str) -> None:
    """The hub id of a folder /tmp/NAME is the one that the comment with `tune download` tells."""
    name = PurePosixPath(folder).name
    told = re.findall(r"tune download ([\w.-]+/[\w.-]+)", draft.text)
    meant = next(
        (one for one in told if one.rpartition("/")[2].lower() == name.lower()),
        told[0] if len(set(told)) == 1 else None,
    )
    if meant:
        draft.set("model.id", meant, "checkpointer.checkpoint_dir, by the comment with tune download")
    else:
        draft.set("model.id", name or "model", "checkpointer.checkpoint_dir")
        draft.blanks["model.id"] = f"{quoted(folder)} is a folder outside: write the model's hub id or its folder"


def _targets(draft: Draft, model: dict[str, Any], builder: str) -> None:
    given = model.pop("lora_attn_modules", None) or []
    if not isinstance(given, list):
        draft.refuse("model.lora_attn_modules", given, "a list is needed")
    names = {"o_proj" if name == "output_proj" else str(name) for name in given}
    mlp, head = model.pop("apply_lora_to_mlp", False), model.pop("apply_lora_to_output", False)
    fused = "phi" in builder
    if mlp and (fused or names >= ALL_ATTENTION):
        targets: Any = "all-linear"
    elif fused or (names >= ALL_ATTENTION and not mlp):
        targets = "attention"
    else:
        targets = [*sorted(names), *(("gate_proj", "up_proj", "down_proj") if mlp else ())]
    if fused:
        draft.notes.append("this model's projections are one matrix: adapters cover all of it, not single ones")
    if head and isinstance(targets, list):
        targets.append("lm_head")
    elif head:
        draft.leave("model.apply_lora_to_output", f"method.targets = {quoted(targets)} leaves out the head")
    draft.set("method.targets", targets, "model.lora_attn_modules, apply_lora_to_mlp")


def _data(draft: Draft) -> None:
    for key, ours in (("dataset", "data.sources"), ("dataset_val", "data.validation")):
        given = draft.take(key)
        entries = given if isinstance(given, list) else [given] if given else []
        taken: list[dict[str, Any]] = []
        for entry in entries:
            if isinstance(entry, dict):
                others = [*(draft.recipe.get("data", {}).get("sources", [])), *taken]
                taken.append(_source(draft, dict(entry), key, others))
        if taken:
            draft.set(ours, taken, key)


def _source(draft: Draft, entry: dict[str, Any], key: str, taken: list[dict[str, Any]]) -> dict[str, Any]:
    builder = str(entry.pop("_component_", "")).rpartition(".")[2]
    known = DATA_SETS.get(builder)
    found: dict[str, Any] = {**(known or {"format": "auto"})}
    if known is None:
        draft.blanks[f"{key}._component_"] = (
            f"{quoted(builder)}: a builder that is not known here; name file and format"
        )
    source, files = entry.pop("source", None), entry.pop("data_files", None)
    if source is not None:
        found.pop("hub", None)
        bare = str(files[0] if isinstance(files, list) else files) if files else str(source)
        found.update(place_of(draft, bare, f"{key}.source"))
    elif "hub" not in found:
        found["path"] = "data/train.jsonl"
    for theirs, ours in (("split", "split"), ("name", "config"), ("subset", "config")):
        if (value := entry.pop(theirs, None)) is not None:
            found[ours] = str(value)
    if builder == "text_completion_dataset" and (column := entry.pop("column", "text")) != "text":
        found["columns"] = {"text": str(column)}
    if isinstance(mapping := entry.pop("column_map", None), dict):
        found["columns"] = {
            {"output": "completion", "input": "prompt"}.get(str(k), str(k)): str(v) for k, v in mapping.items()
        }
    if "alpaca" in builder and "train_on_input" not in entry:
        draft.default("data.loss_on", "all")
    if builder == "text_completion_dataset":
        draft.set("data.loss_on", "all", f"{key}._component_")
    for name in ("packed", "train_on_input"):
        if entry.get(name) is not None and key == "dataset":
            draft.theirs[f"{key}.{name}"] = entry.pop(name)
    for name, value in entry.items():
        if value not in OFF:
            draft.leave(f"{key}.{name}", f"{quoted(value)}: columns and roles are recognised by their usual names")
    if "config" in found and "hub" not in found:
        draft.leave(f"{key}.name", f"{quoted(found.pop('config'))}: only a data set on the hub has configurations")
    where = found.get("hub") or found.get("path", "")
    return {"name": name_of(str(where) + ("-val" if key == "dataset_val" else ""), taken), **found}
