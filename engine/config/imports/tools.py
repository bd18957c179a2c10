"""What is particular to each tool: how its files are recognised, its structure, and its defaults that are not ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.config.check.aliases import (
    AXOLOTL,
    FACTORY,
    PREFERENCE_LOSSES,
    REWARD_METHODS,
    TORCHTUNE,
    TRL,
    WITHOUT_REWARDS,
)
from engine.config.files.text import quoted
from engine.config.imports.draft import OFF, Draft
from engine.config.imports.llama_factory import factory_source, read_v1
from engine.config.imports.sources import axolotl_source, mixture_source
from engine.config.imports.torchtune import read_torchtune
from engine.errors import SpecError

RECOGNISED = "a training configuration of Axolotl, LLaMA-Factory, TRL or torchtune is needed"

AXOLOTL_KEYS = ("sequence_len", "micro_batch_size", "datasets", "adapter", "num_epochs", "lora_r")


def tool_of(data: dict[str, Any], label: str) -> str:
    """The tool whose configuration `data` is, by its keys. Raises SpecError for none of them."""
    nested = [value.get("_component_", "") for value in data.values() if isinstance(value, dict)]
    if any(str(name).startswith("torchtune") for name in nested):
        return TORCHTUNE
    if {"compute_environment", "distributed_type"} & set(data):
        raise SpecError([f"{label}: a launch configuration of Accelerate: it trains nothing by itself; {RECOGNISED}"])
    if "base_model" in data and set(AXOLOTL_KEYS) & set(data):
        return AXOLOTL
    if isinstance(data.get("model"), str) and "train_dataset" in data:
        return FACTORY
    if {"stage", "finetuning_type", "cutoff_len"} & set(data) and "model_name_or_path" in data:
        return FACTORY
    if "model_name_or_path" in data and {"dataset_name", "dataset_mixture", "datasets", "learning_rate"} & set(data):
        return TRL
    shown = ", ".join(quoted(key) for key in list(data)[:5])
    raise SpecError([f"{label}: no tool's configuration is recognised by its keys ({shown}); {RECOGNISED}"])


TABLES = ("dataset_mixture", "dataset_mixer", "lr_scheduler_kwargs")
LISTS = ("datasets", "test_datasets", "pretraining_dataset", "dataset_splits")
WORDS = ("stage", "rl", "adapter", "finetuning_type")


def require_shapes(draft: Draft) -> None:
    """Raises SpecError where a key whose inside is read has no such inside."""
    for key, value in draft.theirs.items():
        if value is None:
            continue
        if key in TABLES and not isinstance(value, dict):
            draft.refuse(key, value, "keys with values are needed")
        if key in WORDS and not isinstance(value, (str, bool)):
            draft.refuse(key, value, "a word is needed")
        if key in LISTS and not (isinstance(value, list) or (key == "pretraining_dataset" and _is_entry(value))):
            draft.refuse(key, value, "a list is needed")
        entries = value if key in LISTS and isinstance(value, list) else []
        inner = value.get("datasets") if key == "dataset_mixture" else None
        if inner is not None and not isinstance(inner, list):
            draft.refuse(f"{key}.datasets", inner, "a list is needed")
        for entry in [*entries, *(inner or [])]:
            if not (_is_entry(entry) and (isinstance(entry, dict) or key in ("dataset_splits", "pretraining_dataset"))):
                draft.refuse(key, entry, "an entry with keys is needed")


def _is_entry(value: Any) -> bool:
    return isinstance(value, (dict, str))


def read_axolotl(draft: Draft) -> None:
    _refuse_rewards(draft, "rl", draft.theirs.get("rl"))
    rl, draft.has_images = draft.take("rl"), draft.theirs.get("processor_type") not in OFF
    if rl in PREFERENCE_LOSSES:
        draft.set("method.objective", "dpo", "rl")
        draft.set("preference.loss", rl, "rl")
    elif rl is not None:
        draft.refuse("rl", rl, "this training does not exist here")
    adapter = draft.take("adapter")
    if adapter not in (None, "", "lora", "qlora"):
        draft.refuse("adapter", adapter, "of adapters only LoRA exists here")
    draft.set("method.kind", "lora" if adapter else "full", "adapter" if adapter else "adapter (none)")
    if adapter == "qlora" and draft.theirs.get("load_in_4bit") is not False:
        draft.set("model.quantize", "nf4", "adapter")
    elif not adapter and draft.take("load_in_4bit"):
        draft.refuse("load_in_4bit", True, "weights in 4 bits cannot be trained in full")
    _axolotl_data(draft, adapter)
    total, rows = draft.theirs.get("batch_size"), draft.theirs.get("micro_batch_size")
    if isinstance(total, int) and isinstance(rows, int) and rows > 0:
        draft.take("batch_size")
        if draft.theirs.get("gradient_accumulation_steps"):
            draft.leave("batch_size", "gradient_accumulation_steps counts")
        else:
            draft.theirs["gradient_accumulation_steps"] = max(1, total // rows)
    ratio = draft.take("cosine_min_lr_ratio")
    rate = draft.theirs.get("learning_rate")
    if isinstance(ratio, (int, float)) and isinstance(rate, (int, float)):
        draft.set("train.min_learning_rate", ratio * rate, "cosine_min_lr_ratio")
    _template(draft, {"phi_3": "phi3", "gemma3": "gemma"})
    _added_tokens(draft)


def _axolotl_data(draft: Draft, adapter: Any) -> None:
    sources: list[dict[str, Any]] = []
    if not adapter:
        for key in list(draft.theirs):
            if key.startswith("lora_") and "kernel" not in key:
                draft.leave(key, "no adapter is trained") if draft.take(key) not in OFF else None
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
        draft.leave("val_set_size", f"{draft.take('val_set_size')} samples: data.valid_fraction is a share of them")


def _template(draft: Draft, names: dict[str, str]) -> None:
    given = draft.take("chat_template")
    name = names.get(str(given), given)
    if name in ("chatml", "llama3", "gemma", "phi3", "mistral") or "{%" in str(given):
        draft.set("model.chat_template", name, "chat_template")
    elif given:
        draft.leave("chat_template", f"{quoted(given)}: the model's own is used; model.chat_template takes another")


def _added_tokens(draft: Draft) -> None:
    tokens = draft.take("tokens")
    if isinstance(tokens, list):
        draft.set("model.add_tokens", [str(token) for token in tokens], "tokens")
    elif tokens:
        draft.leave("tokens", "special tokens are those of the tokenizer; model.add_tokens adds others")


def read_factory(draft: Draft) -> None:
    if "train_dataset" in draft.theirs:
        read_v1(draft)
        return
    stage = draft.take("stage") or "sft"
    _refuse_rewards(draft, "stage", {"rm": "reward"}.get(stage, stage))
    kind = draft.theirs.get("finetuning_type", "lora")
    if kind not in ("lora", "full"):
        draft.refuse("finetuning_type", kind, "of trainings only full ones and LoRA exist here")
    for key in ("do_predict", "do_eval"):
        if draft.theirs.get(key) and not draft.theirs.get("do_train", False):
            draft.refuse(key, True, f"no training, only scores; {RECOGNISED}")
    if stage in ("dpo", "kto"):
        draft.set("method.objective", "dpo", "stage")
        if stage == "kto":
            draft.set("preference.loss", "kto", "stage")
    elif stage == "pt":
        draft.set("data.loss_on", "all", "stage")
        draft.default("data.packing", True)
    bits = draft.theirs.get("quantization_bit")
    if bits not in (None, 4):
        draft.take("quantization_bit")
        draft.leave("quantization_bit", f'{bits} bits do not exist here: the base stays in 16, or quantize = "nf4"')
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


def read_trl(draft: Draft) -> None:
    for key in (
        "num_generations",
        "reward_funcs",
        "reward_model_path",
        "max_completion_length",
        "reward_model_name_or_path",
    ):
        if draft.theirs.get(key) not in OFF:
            draft.refuse(key, draft.theirs[key], WITHOUT_REWARDS)
    learns_preferences = _trl_preferences(draft)
    draft.default("method.kind", "lora" if draft.take("use_peft") else "full")
    draft.origin["method.kind"] = "use_peft"
    if "learning_rate" not in draft.theirs:
        draft.default("train.learning_rate", 1e-6 if learns_preferences else 2e-5)
    _trl_data(draft)
    kwargs, rate = draft.take("lr_scheduler_kwargs") or {}, draft.theirs.get("learning_rate")
    for name, value in kwargs.items() if isinstance(kwargs, dict) else ():
        if name == "min_lr_rate" and isinstance(rate, (int, float)) and isinstance(value, (int, float)):
            draft.set("train.min_learning_rate", value * rate, "lr_scheduler_kwargs.min_lr_rate")
        elif name == "min_lr":
            draft.set("train.min_learning_rate", value, "lr_scheduler_kwargs.min_lr")
        else:
            draft.leave(f"lr_scheduler_kwargs.{name}", f"{quoted(value)}: a schedule has no such key")
    _template(draft, {})


KTO_MARKS = ("desirable_weight", "undesirable_weight")
PREFERENCE_MARKS = ("beta", "max_prompt_length", "rpo_alpha", "precompute_ref_log_probs", *KTO_MARKS)
"""Keys that only TRL's trainers of preferences have."""

NAMED_LOSS = re.compile(r"(?<![a-z])(dpo|simpo|orpo|kto)(?![a-z])")


def _trl_preferences(draft: Draft) -> bool:
    """Whether preferences are learned. TRL's files do not name their trainer: it is told by keys that only one has, by
    the loss, or by a name in the file's comments, output folder or run."""
    marks, loss = [key for key in PREFERENCE_MARKS if key in draft.theirs], draft.theirs.get("loss_type")
    if not marks and loss is not None:
        draft.leave("loss_type", f"{draft.take('loss_type')!s}: the loss is cross-entropy")
    if not marks:
        return False
    draft.set("method.objective", "dpo", marks[0])
    if loss is not None and loss not in ("sigmoid", "ipo", "simpo", "kto", ["sigmoid"]):
        draft.refuse("loss_type", loss, "of preference losses dpo (sigmoid), ipo, simpo, orpo and kto exist here")
    names = " ".join(str(draft.theirs.get(key, "")) for key in ("output_dir", "hub_model_id", "run_name"))
    comments = " ".join(re.findall(r"#(.*)", draft.text))
    named = NAMED_LOSS.findall(f"{names} {comments}".lower())
    kto = next((key for key in KTO_MARKS if key in draft.theirs), None)
    if kto is not None:
        draft.set("preference.loss", "kto", kto)
    elif loss is None and len(set(named)) == 1:
        draft.set("preference.loss", named[0], f"its name, {named[0]}")
    elif loss is None:
        draft.notes.append(
            f"{marks[0]} says that preferences are trained, and nothing whether by DPO, ORPO or KTO: DPO is taken; "
            'for another set preference.loss = "orpo" or "kto"'
        )
    return True


def _trl_data(draft: Draft) -> None:
    mixture = draft.take("dataset_mixture") or {}
    mixer, splits = draft.take("dataset_mixer") or {}, draft.take("dataset_splits") or ["train"]
    entries = [*(draft.take("datasets") or []), *(mixture.get("datasets") or [])]
    entries += [{"id": name, "weight": weight, "split": splits[0]} for name, weight in mixer.items()]
    train, test = draft.take("dataset_train_split") or "train", draft.take("dataset_test_split")
    config, name = draft.take("dataset_config") or draft.take("dataset_config_name"), draft.take("dataset_name")
    if name:
        entries.append({"path": name, "name": config, "split": train})
    sources: list[dict[str, Any]] = []
    for index, entry in enumerate(entries):
        sources.append(mixture_source(draft, entry, f"datasets[{index}]", sources))
    draft.set("data.sources", sources, "datasets" if not name else "dataset_name")
    evaluates = draft.theirs.get("eval_strategy", draft.theirs.get("do_eval")) not in ("no", False, None)
    held = [{"id": entry, "split": splits[-1]} for entry in mixer if evaluates and len(splits) > 1]
    held += [{"path": name, "name": config, "split": test or "test"}] if name and evaluates else []
    validation: list[dict[str, Any]] = []
    for entry in held:
        validation.append(mixture_source(draft, entry, "dataset_test_split", [*sources, *validation]))
    if validation:
        draft.set("data.validation", validation, "dataset_test_split")
    elif test:
        draft.leave("dataset_test_split", "no evaluation is asked for")
    if (size := mixture.get("test_split_size")) is not None and isinstance(size, float):
        draft.set("data.valid_fraction", size, "dataset_mixture.test_split_size")
    elif size is not None:
        draft.leave("dataset_mixture.test_split_size", f"{size} samples: data.valid_fraction is a share of them")
    for key in set(mixture) - {"datasets", "test_split_size", "seed"}:
        draft.leave(f"dataset_mixture.{key}", "a mixture has no such key")
    if "seed" in mixture:
        draft.leave("dataset_mixture.seed", "the order of samples is drawn by train.seed")


def _refuse_rewards(draft: Draft, key: str, value: Any) -> None:
    if str(value) in REWARD_METHODS or value in ("gdpo", "nca", "rloo", "prm"):
        draft.refuse(key, value, WITHOUT_REWARDS)


READERS: dict[str, Callable[[Draft], None]] = {
    AXOLOTL: read_axolotl,
    FACTORY: read_factory,
    TRL: read_trl,
    TORCHTUNE: read_torchtune,
}

_TRAINER: dict[str, Any] = {"train.scheduler": "linear", "train.epochs": 3.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    AXOLOTL: {},
    FACTORY: {**_TRAINER, "train.learning_rate": 5e-5, "data.max_length": 2048, "method.rank": 8},
    TRL: {**_TRAINER, "data.max_length": 1024, "model.dtype": "float32", "method.dropout": 0.05},
    TORCHTUNE: {"train.scheduler": "constant", "train.weight_decay": 0.01, "train.max_grad_norm": 0.0},
}
"""Their defaults that are not ours; they count where a file does not say."""
