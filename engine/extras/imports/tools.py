"""How the files of each tool are recognised, and its defaults that are not ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.config.check.aliases import AXOLOTL, FACTORY, REWARD_METHODS, TORCHTUNE, TRL, WITHOUT_REWARDS
from engine.config.files.text import quoted
from engine.errors import SpecError
from engine.extras.imports.axolotl import read_axolotl
from engine.extras.imports.command_lines import SWIFT
from engine.extras.imports.draft import Draft
from engine.extras.imports.llama_factory import read_factory
from engine.extras.imports.nemo import read_nemo
from engine.extras.imports.swift import read_swift
from engine.extras.imports.torchtune import read_torchtune
from engine.extras.imports.trl import read_trl

NEMO = "NeMo AutoModel"
RECOGNISED = "a training configuration of Axolotl, LLaMA-Factory, TRL, torchtune, ms-swift or NeMo AutoModel is needed"

AXOLOTL_KEYS = ("sequence_len", "micro_batch_size", "datasets", "adapter", "num_epochs", "lora_r")


def tool_of(data: dict[str, Any], label: str) -> str:
    """The tool whose configuration `data` is, by its keys. Raises SpecError for none of them."""
    nested = [value.get("_component_", "") for value in data.values() if isinstance(value, dict)]
    if any(str(name).startswith("torchtune") for name in nested):
        return TORCHTUNE
    if "step_scheduler" in data and isinstance(data.get("model"), dict):
        return NEMO
    if {"tuner_type", "train_type", "rlhf_type"} & set(data) and ("model" in data or "dataset" in data):
        return SWIFT
    if {"compute_environment", "distributed_type"} & set(data):
        raise SpecError([f"{label}: a launch configuration of Accelerate, without training settings; {RECOGNISED}"])
    if "base_model" in data and set(AXOLOTL_KEYS) & set(data):
        return AXOLOTL
    if isinstance(data.get("model"), str) and "train_dataset" in data:
        return FACTORY
    if {"stage", "finetuning_type", "cutoff_len"} & set(data) and "model_name_or_path" in data:
        return FACTORY
    if "model_name_or_path" in data and {"dataset_name", "dataset_mixture", "datasets", "learning_rate"} & set(data):
        return TRL
    shown = ", ".join(quoted(key) for key in list(data)[:5])
    raise SpecError([f"{label}: the keys ({shown}) do not match a supported tool; {RECOGNISED}"])


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


def refuse_rewards(draft: Draft) -> None:
    """Raise SpecError for a training on rewards, which some tools name in a key of the file."""
    for key in ("rl", "stage"):
        value = draft.theirs.get(key)
        if str(value) in REWARD_METHODS or value in ("gdpo", "nca", "rloo", "prm", "rm"):
            draft.refuse(key, value, WITHOUT_REWARDS)


READERS: dict[str, Callable[[Draft], None]] = {
    AXOLOTL: read_axolotl,
    FACTORY: read_factory,
    TRL: read_trl,
    TORCHTUNE: read_torchtune,
    SWIFT: read_swift,
    NEMO: read_nemo,
}

ROWS = {AXOLOTL: 1, FACTORY: 8, TRL: 8, TORCHTUNE: 1, SWIFT: 1, NEMO: 1}
"""Sequences of one device in one pass where a file does not say."""

_TRAINER: dict[str, Any] = {"train.scheduler": "linear", "train.epochs": 3.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    AXOLOTL: {"data.max_length": 512},
    FACTORY: {**_TRAINER, "train.learning_rate": 5e-5, "data.max_length": 2048, "method.rank": 8},
    TRL: {
        **_TRAINER,
        "data.max_length": 1024,
        "data.over_length": "truncate",
        "method.rank": 16,
        "method.alpha": 32,
        "method.dropout": 0.05,
    },
    TORCHTUNE: {"train.scheduler": "constant", "train.weight_decay": 0.01, "train.max_grad_norm": 0.0},
    SWIFT: {
        "train.scheduler": "cosine",
        "train.epochs": 3.0,
        "train.weight_decay": 0.1,
        "train.betas": [0.9, 0.95],
        "method.rank": 8,
        "method.alpha": 32,
        "method.dropout": 0.05,
    },
    NEMO: {},
}
"""Their defaults that are not ours; they count where a file does not say."""
