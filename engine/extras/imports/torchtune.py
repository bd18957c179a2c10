"""torchtune's configurations: components with arguments, and checkpoints in a local folder."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from engine.config.files.text import quoted
from engine.extras.imports.draft import OFF, Draft
from engine.extras.imports.sources import name_of, place_of

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
        draft.refuse("config", "eval or generate", "not a training configuration; one is needed")
    parts = {name: _part(draft, name) for name in COMPONENTS}
    for name in ("profiler", "metric_logger", "ref_checkpointer"):
        if isinstance(draft.theirs.get(name), dict):
            draft.take(name)
            draft.leave(name, REASONS[name])
    loss = str(parts["loss"].pop("_component_", ""))
    prefers = "DPOLoss" in loss or "rlhf" in loss
    if prefers:
        if "DPOLoss" not in loss:
            draft.refuse("loss", loss, "of torchtune's preference losses only DPOLoss is supported")
        draft.set("method.objective", "dpo", "loss")
        draft.set("preference.loss", "dpo", "loss")
        draft.default("preference.label_smoothing", parts["loss"].pop("label_smoothing", 0) or 0.0)
    elif loss:
        draft.leave("loss", f"{quoted(loss)}: cross-entropy, computed as set by train.loss")
    if draft.get("method.objective") is None and "dev." in loss:
        draft.refuse("loss", loss, "this training is not supported")
    _model(draft, parts["model"], parts["checkpointer"], parts["tokenizer"])
    _data(draft)
    if parts["tokenizer"].get("max_seq_len") is not None:
        draft.set("data.over_length", "truncate", "torchtune's default")
    draft.rounds_weights = str(draft.theirs.get("dtype")) == "bf16"
    if draft.get("method.kind") == "lora" and draft.rounds_weights:
        draft.set("method.adapter_dtype", "bfloat16", "dtype")
    every = draft.take("save_every_n_epochs")
    if every == 1:
        draft.set("checkpoint.per_epoch", 1, "save_every_n_epochs")
    elif every is not None:
        draft.leave("save_every_n_epochs", f"{quoted(every)}: set checkpoint.every_steps")
    steps = draft.take("run_val_every_n_steps")
    if isinstance(steps, int) and steps > 0:
        draft.set("eval.every_steps", steps, "run_val_every_n_steps")
    elif steps is not None:
        draft.leave("run_val_every_n_steps", "off")
    rows = draft.take("batch_size")
    draft.theirs["per_device_batch_size"] = rows
    for part, name in (("optimizer", "train.optimizer"), ("lr_scheduler", "train.scheduler")):
        if component := parts[part].pop("_component_", None):
            draft.translate(part, component, name, component)
    draft.theirs.update({f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()})
    draft.unbounded_length = draft.theirs.get("tokenizer.max_seq_len") is None


REASONS = {
    "profiler": "profiling is not part of a recipe",
    "metric_logger": "the journal keeps the metrics; trackers.use adds others",
    "ref_checkpointer": "the reference is this model at the start",
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
                f"checkpointer.{name}", "a model is loaded from its hub id or folder, and each run has its own folder"
            )
    for name in (
        "_component_",
        "path",
        "image_size",
        "merges_file",
        "merges_path",
        "vocab_path",
        "special_tokens_path",
    ):
        if tokenizer.pop(name, None) is not None:
            draft.leave(f"tokenizer.{name}", "the model's tokenizer is used; to change it, set model.tokenizer")
    if isinstance(template := tokenizer.pop("prompt_template", None), (str, dict)):
        draft.blanks["tokenizer.prompt_template"] = (
            f"{quoted(template)}: the model's chat template is used; to change it, set model.chat_template"
        )
    _freezes(draft, model)
    if is_lora:
        _targets(draft, model, builder)


PARTS = {"encoder_trainable": "vision", "fusion_trainable": "projector", "decoder_trainable": "language"}
"""Its names for the parts of a model with images, to ours."""


def _freezes(draft: Draft, model: dict[str, Any]) -> None:
    given = {key: model.pop(key) for key in PARTS if key in model}
    frozen = [PARTS[key] for key, value in given.items() if value in (False, "frozen")]
    if frozen:
        draft.set("method.freeze", frozen, " and ".join(f"model.{key}" for key in given))
    for key, value in given.items():
        if value == "lora" and draft.get("method.kind") != "lora":
            draft.blanks[f"model.{key}"] = (
                f"{quoted(value)}: adapters together with trained weights: set method.also_train"
            )
        elif value not in (False, "frozen"):
            draft.leave(f"model.{key}", f"{quoted(value)}: this part is trained")
    if (size := model.pop("image_size", None)) is not None:
        draft.leave("model.image_size", f"{quoted(size)}: it is in the model's config")


def _model_id(draft: Draft, folder: str) -> None:
    """Set the hub id of a folder /tmp/NAME: the one in the comment with `tune download`."""
    name = PurePosixPath(folder).name
    ids = re.findall(r"tune download ([\w.-]+/[\w.-]+)", draft.text)
    meant = next((hub_id for hub_id in ids if hub_id.rpartition("/")[2].lower() == name.lower()), None)
    meant = meant or (ids[0] if len(set(ids)) == 1 else None)
    if meant:
        draft.set("model.id", meant, "checkpointer.checkpoint_dir, from the comment with tune download")
    else:
        draft.set("model.id", name or "model", "checkpointer.checkpoint_dir")
        draft.blanks["model.id"] = f"{quoted(folder)} is an outside folder: set the model's hub id or local folder"


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
        draft.notes.append("this model's projections are one matrix: adapters cover all of it, not single projections")
    if head:
        draft.leave("model.apply_lora_to_output", "adapters on the head are not supported: the head is not changed")
        draft.notes.append("that file puts an adapter on the head (apply_lora_to_output); here the head is not adapted")
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


def _renders_turns(draft: Draft) -> bool:
    """Return whether torchtune's tokenizer of this model marks turns; those of Llama 2 and Mistral do not."""
    return not any(word in str(draft.said.get("tokenizer")) for word in ("llama2", "mistral", "code_llama2"))


def _source(draft: Draft, entry: dict[str, Any], key: str, taken: list[dict[str, Any]]) -> dict[str, Any]:
    builder = str(entry.pop("_component_", "")).rpartition(".")[2]
    known = DATA_SETS.get(builder)
    found: dict[str, Any] = {**(known or {"format": "auto"})}
    if known is None:
        draft.blanks[f"{key}._component_"] = f"{quoted(builder)}: an unknown builder; set path and format"
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
            str(k) if "alpaca" in builder else {"output": "completion", "input": "prompt"}.get(str(k), str(k)): str(v)
            for k, v in mapping.items()
        }
    if "alpaca" in builder and "train_on_input" not in entry:
        draft.default("data.loss_on", "all")
    if builder == "text_completion_dataset":
        draft.set("data.loss_on", "all", f"{key}._component_")
    if "alpaca" in builder:
        found["template"] = "alpaca-chat" if _renders_turns(draft) else "alpaca"
    for name in ("packed", "train_on_input"):
        if entry.get(name) is not None and key == "dataset":
            draft.theirs[f"{key}.{name}"] = entry.pop(name)
    for name, value in entry.items():
        if value not in OFF:
            draft.blanks[f"{key}.{name}"] = f"{quoted(value)}: unknown key of a data set"
    if "config" in found and "hub" not in found:
        draft.blanks[f"{key}.name"] = f"{quoted(found.pop('config'))}: only a data set on the hub has configurations"
    where = found.get("hub") or found.get("path", "")
    return {"name": name_of(str(where) + ("-val" if key == "dataset_val" else ""), taken), **found}
