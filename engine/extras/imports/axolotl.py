"""Axolotl's configurations.

Defaults by its source: `core/builders/base.py` (warm-up), `utils/schemas`, `prompt_strategies`.
"""

from __future__ import annotations

import re
from typing import Any

from engine.config.check.aliases import PREFERENCE_LOSSES
from engine.config.files.text import quoted
from engine.extras.imports.draft import OFF, Draft
from engine.extras.imports.sources import name_of, place_of, take_roles, take_turn_keys
from engine.extras.imports.templates import take_template

WARMUP_RATIO = 0.03
"""Its warm-up where a file gives none."""

HARMLESS_PLUGINS = ("liger", "cut_cross_entropy", "kernels", "swanlab", "expert_parallel")
"""Parts of the names of plugins that compute the same, or that log."""

PROMPTS: dict[str, dict[str, str]] = {
    "chat_template": {"format": "chat"},
    "sharegpt": {"format": "sharegpt"},
    "completion": {"format": "text"},
    "pretrain": {"format": "text"},
    "messages": {"format": "chat"},
    "alpaca": {"format": "alpaca", "template": "alpaca"},
}
"""Its prompt strategies whose rows we read, to the keys of a source."""

SOURCE_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "roles_to_train": ((["assistant"], ["gpt"], ["gpt", "assistant"]), "the loss is on the assistant's turns"),
    "train_on_eos": (("turn",), "the end of each trained turn is trained"),
    "train_on_eot": (("turn",), "the end of each trained turn is trained"),
    "conversation": ((), "the model's chat template is used; to change it, set model.chat_template"),
    "chat_template": ((), "the model's chat template is used; to change it, set model.chat_template"),
    "message_field_training": (("train", "training"), "a turn with train: false is context"),
    "message_field_training_detail": ((), "parts of a turn are masked by train: false in the part"),
    "field_chosen": (("chosen",), "the columns of preference rows are chosen and rejected"),
    "field_rejected": (("rejected",), "the columns of preference rows are chosen and rejected"),
    "field_thinking": (("thinking", "reasoning_content"), "the thinking of a turn is read from this key"),
    "template_thinking_key": (("thinking", "reasoning_content"), "the template sets its own key"),
    "field_tools": (("tools",), "the tools of a conversation are in the column tools"),
    "field_system": (("system",), "the system prompt of a row is in the column system"),
    "drop_system_message": ((), "system turns are kept"),
    "shards": ((), "part of a data set is chosen by split, such as train[:10%]"),
    "preprocess_shards": ((), "part of a data set is chosen by split, such as train[:10%]"),
    "ds_type": (("json", "csv", "parquet", "text", "arrow", "jsonl"), "a file's type is known by its suffix"),
    "trust_remote_code": ((True,), "data sets that run code are not loaded"),
    "streaming": ((True,), "rows are read when they are needed"),
    "revision": ((), "a hub data set is read at its newest revision"),
    "data_files": ((), "a single file of a hub data set cannot be selected: download it and set its path"),
    "split_thinking": ((), "thinking in the text of an answer is kept"),
}
"""Its keys of a data set: values that change nothing here, beside false, and the reason."""


def read_axolotl(draft: Draft) -> None:
    rl, draft.has_images = draft.take("rl"), draft.theirs.get("processor_type") not in OFF
    if rl in PREFERENCE_LOSSES:
        draft.set("method.objective", "dpo", "rl")
        draft.set("preference.loss", rl, "rl")
    elif rl is not None:
        draft.refuse("rl", rl, "this training is not supported")
    _method(draft)
    _data(draft)
    _batch(draft)
    ratio, rate = draft.take("cosine_min_lr_ratio"), draft.theirs.get("learning_rate")
    if isinstance(ratio, (int, float)) and isinstance(rate, (int, float)):
        draft.set("train.min_learning_rate", ratio * rate, "cosine_min_lr_ratio")
    if not {"warmup_steps", "warmup_ratio"} & {key for key in draft.theirs if draft.theirs[key] is not None}:
        draft.set("train.warmup_ratio", WARMUP_RATIO, "Axolotl's default")
    _precision(draft)
    _per_epoch(draft)
    length = draft.take("excess_length_strategy")
    if length is not None and str(length).lower() != "drop":
        draft.set("data.over_length", {"truncate": "truncate"}.get(str(length), str(length)), "excess_length_strategy")
    if (project := draft.theirs.get("wandb_project")) and "use_wandb" not in draft.theirs:
        draft.set("trackers.use", ["wandb"], f"wandb_project ({quoted(project)})")
    for word in ("wandb", "tensorboard", "trackio", "mlflow", "swanlab"):
        if (value := draft.take(f"use_{word}")) is True:
            draft.set("trackers.use", [*(draft.get("trackers.use") or []), word], f"use_{word}")
        elif value is not None:
            draft.leave(f"use_{word}", "off")
    take_template(draft, "chat_template", {"phi_3": "phi3", "gemma3": "gemma", "tokenizer_default": None})
    _tokens(draft)
    plugins = draft.take("plugins")
    harmful = [name for name in plugins or [] if not any(word in str(name) for word in HARMLESS_PLUGINS)]
    if harmful:
        draft.blanks["plugins"] = f"{quoted(harmful)}: plugins are code that can change training"
    elif plugins:
        draft.leave("plugins", "equivalent kernels; the engine chooses its own")
    if draft.theirs.get("curriculum_sampling"):
        draft.set("data.shuffle", not draft.take("curriculum_sampling"), "curriculum_sampling")
    if draft.take("freeze_mm_modules"):
        draft.set("method.freeze", ["vision"], "freeze_mm_modules")
    if (given := draft.take("tokenizer_config")) is not None:
        draft.set("model.tokenizer", str(given), "tokenizer_config")


def _method(draft: Draft) -> None:
    adapter = draft.take("adapter")
    if adapter not in (None, "", "lora", "qlora"):
        draft.refuse("adapter", adapter, "LoRA is the only adapter that is supported")
    draft.set("method.kind", "lora" if adapter else "full", "adapter" if adapter else "adapter (none)")
    if adapter == "qlora" and draft.theirs.get("load_in_4bit") is not False:
        draft.set("model.quantize", "nf4", "adapter")
    elif not adapter and draft.take("load_in_4bit"):
        draft.refuse("load_in_4bit", True, "weights in 4 bits cannot be trained in full")
    if not adapter:
        for key in list(draft.theirs):
            if key.startswith("lora_") and "kernel" not in key and draft.take(key) not in OFF:
                draft.leave(key, "no adapter is trained")
        return
    linear, modules = draft.take("lora_target_linear"), draft.take("lora_target_modules")
    experts = draft.take("lora_target_parameters")
    if linear:
        draft.set("method.targets", "all-linear", "lora_target_linear")
        _beside_all_linear(draft, modules, experts)
    elif modules or experts:
        named = [*_as_list(modules), *_as_list(experts)]
        draft.set_patterns(" and ".join(_keys_given(modules, experts)), named, "method.targets")
    elif not draft.theirs.get("lora_model_dir"):
        draft.blanks["lora_target_modules"] = "the file does not list modules for adapters: set method.targets"
    for key in ("lora_r", "lora_alpha"):
        if draft.theirs.get(key) is None and not draft.theirs.get("lora_model_dir"):
            draft.blanks[key] = f"the file does not set it: set method.{'rank' if key == 'lora_r' else 'alpha'}"


def _keys_given(modules: Any, experts: Any) -> list[str]:
    given = (("lora_target_modules", modules), ("lora_target_parameters", experts))
    return [key for key, value in given if value not in OFF]


def _beside_all_linear(draft: Draft, modules: Any, experts: Any) -> None:
    """Account for the modules named beside lora_target_linear: all-linear has every linear layer but the head."""
    others = [name for name in _as_list(modules) if "head" in str(name) or "embed" in str(name)]
    if others or experts not in OFF:
        named = ", ".join(str(name) for name in [*others, *_as_list(experts)])
        draft.blanks["lora_target_modules"] = (
            f"{named}: all-linear leaves these out; list the modules in method.targets"
        )
    elif modules not in OFF:
        draft.leave("lora_target_modules", "lora_target_linear already includes these modules")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value in OFF else [value]


def _precision(draft: Draft) -> None:
    """dtype, and whether weights are rounded: it loads the weights that are trained in bfloat16 itself."""
    given = {key: draft.theirs.get(key) for key in ("bf16", "bfloat16", "fp16", "float16")}
    if given["bf16"] == "full":
        draft.theirs["bf16"] = True
    if "bf16" in draft.theirs and not any(given.values()):
        draft.set("model.dtype", "float32", "bf16 and fp16 (off)")
    draft.rounds_weights = given["fp16"] is not True and draft.get("model.dtype") != "float32"


def _batch(draft: Draft) -> None:
    total, rows = draft.theirs.get("batch_size"), draft.theirs.get("micro_batch_size")
    if isinstance(total, int) and isinstance(rows, int) and rows > 0:
        draft.take("batch_size")
        if draft.theirs.get("gradient_accumulation_steps"):
            draft.leave("batch_size", "gradient_accumulation_steps is used")
        else:
            draft.theirs["gradient_accumulation_steps"] = max(1, total // rows)


def _per_epoch(draft: Draft) -> None:
    for theirs, ours in (("evals_per_epoch", "eval.per_epoch"), ("saves_per_epoch", "checkpoint.per_epoch")):
        if (value := draft.take(theirs)) not in OFF and value != 0:
            draft.set(ours, value, theirs)
        elif value is not None:
            draft.leave(theirs, "off")


SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token")


def _tokens(draft: Draft) -> None:
    tokens = draft.take("tokens")
    if isinstance(tokens, list) and tokens:
        draft.set("model.add_tokens", [str(token) for token in tokens], "tokens")
    elif isinstance(tokens, dict):
        draft.theirs["special_tokens"] = {**tokens, **(draft.theirs.get("special_tokens") or {})}
    special = draft.take("special_tokens")
    if isinstance(special, dict):
        given = {name: str(value) for name, value in special.items() if name != "pad_token" and value}
        ours = {name.removesuffix("_token"): value for name, value in given.items() if name in SPECIAL_TOKENS}
        others = {name: value for name, value in given.items() if name not in SPECIAL_TOKENS}
        if ours:
            draft.set("model.special_tokens", ours, "special_tokens")
        if others:
            draft.blanks[f"special_tokens.{'.'.join(others)}"] = f"{quoted(others)}: name them in model.add_tokens"
        if not given:
            draft.leave("special_tokens", "padding is never trained")


def _data(draft: Draft) -> None:
    sources: list[dict[str, Any]] = []
    for name in ("datasets", "pretraining_dataset"):
        given = draft.take(name) or []
        entries = given if isinstance(given, list) else [given]
        for index, entry in enumerate(entries):
            entry = entry if isinstance(entry, dict) else {"path": entry, "type": "pretrain"}
            sources.append(axolotl_source(draft, entry, f"{name}[{index}]", sources))
        if name == "pretraining_dataset" and entries:
            draft.set("data.loss_on", "all", name)
    draft.set("data.sources", sources, "datasets")
    held: list[dict[str, Any]] = []
    for index, entry in enumerate(draft.take("test_datasets") or []):
        held.append(axolotl_source(draft, entry, f"test_datasets[{index}]", [*sources, *held]))
    if held:
        draft.set("data.validation", held, "test_datasets")
    size = draft.theirs.get("val_set_size")
    if isinstance(size, (int, float)) and size >= 1:
        draft.blanks["val_set_size"] = (
            f"{draft.take('val_set_size')} samples: set data.valid_fraction, a fraction of the samples"
        )


def axolotl_source(draft: Draft, entry: dict[str, Any], key: str, taken: list[dict[str, Any]]) -> dict[str, Any]:
    entry = dict(entry)
    path, files = str(entry.pop("path", "")), entry.pop("data_files", None)
    kind = str(entry.pop("ds_type", "") or "")
    if path in ("json", "csv", "parquet", "text") or (kind and files):
        path = str(files[0] if isinstance(files, list) else files)
        if isinstance(files, list) and len(files) > 1:
            draft.blanks[f"{key}.data_files"] = f"{quoted(files)}: a source is one file, folder or glob"
        files = None
    source = {"name": name_of(path, taken), **place_of(draft, path, f"{key}.path")}
    if kind and "hub" in source:
        source["path"] = source.pop("hub")
    for theirs, ours in (("name", "config"), ("split", "split")):
        value = entry.pop(theirs, None)
        if value is not None and "hub" in source:
            source[ours] = str(value)
        elif value not in (None, "train"):
            draft.blanks[f"{key}.{theirs}"] = f"{quoted(value)}: {theirs} does not apply to a file"
    columns = _take_format(draft, entry, source, f"{key}.type")
    take_roles(draft, entry, source, key)
    if columns:
        source["columns"] = columns
    for name, value in {**entry, **({"data_files": files} if files else {})}.items():
        if value is None:
            continue
        if name in SOURCE_NEUTRAL:
            neutral, reason = SOURCE_NEUTRAL[name]
            draft.ask_unless_neutral(f"{key}.{name}", value, reason, neutral)
        else:
            draft.blanks[f"{key}.{name}"] = f"{quoted(value)}: unknown key of a data set"
    return source


def _take_format(draft: Draft, entry: dict[str, Any], source: dict[str, Any], key: str) -> dict[str, str]:
    """Set the format of `source` and return its columns, ours to theirs."""
    kind = entry.pop("type", None)
    field = entry.pop("field_messages", None)
    columns: dict[str, str] = {}
    if isinstance(kind, dict):
        return _own_prompt(draft, kind, source, key)
    if draft.get("method.objective") == "dpo":
        source["format"] = "preference"
        strategy, _, variant = str(kind).partition(".")
        if strategy != "chat_template" or variant not in ("", "default", "argilla", "ultra"):
            draft.blanks[key] = (
                f"{quoted(kind)}: pairs are read by their columns and rendered with the model's chat template"
            )
        else:
            draft.leave(
                key, f"{quoted(kind)}: pairs are read by their columns and rendered with the model's chat template"
            )
    elif (known := re.split("[.:]", str(kind))[0]) in PROMPTS and (
        kind == known or known in ("chat_template", "pretrain")
    ):
        source.update(PROMPTS[known])
        draft.origin[f"data.sources.{source['name']}.format"] = key
    elif known in PROMPTS:
        source.update({"format": PROMPTS[known]["format"]})
        draft.blanks[key] = f"{quoted(kind)}: its prompt format is unknown; the model's chat template would be used"
    else:
        source["format"] = "auto"
        draft.blanks[key] = (
            f"{quoted(kind)}: this prompt format is unknown; check with `tunedeck data` how the rows are read"
        )
    take_turn_keys(draft, entry, source, key.removesuffix(".type"))
    if field and field not in ("messages", "conversations"):
        columns["conversations" if source["format"] == "sharegpt" else "messages"] = str(field)
    elif field == "conversations" and source["format"] == "chat":
        columns["messages"] = "conversations"
    text = entry.pop("field", None) or entry.pop("text_column", None)
    if text and text != "text" and source["format"] == "text":
        columns["text"] = str(text)
    return columns


def _own_prompt(draft: Draft, kind: dict[str, Any], source: dict[str, Any], key: str) -> dict[str, str]:
    """A prompt that the file itself writes: what it says beside the columns has no counterpart."""
    fields = {
        "instruction": "field_instruction",
        "input": "field_input",
        "output": "field_output",
        "system": "field_system",
    }
    columns = {ours: str(kind[theirs]) for ours, theirs in fields.items() if kind.get(theirs)}
    source["format"] = "alpaca"
    if others := sorted(name for name in set(kind) - set(fields.values()) if kind[name] not in OFF):
        draft.blanks[key] = (
            f"{', '.join(others)}: a prompt format in the file is not used; the model's chat template is used, "
            'or plain text with template = "none"'
        )
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}
