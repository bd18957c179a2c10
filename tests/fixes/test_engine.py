"""Fixes of the engine: a run ends with one, its settings are changed as it says, and the run is done.

The engine runs in this process, on a model with random weights; what a machine lacks is taken away where the engine
looks for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fixes.conftest import Given
from tests.fixes.rows import text_of, was_given
from tests.train.run_helpers import Event, make_spec, new_run, train, write_samples

Tables = dict[str, dict[str, Any]]
FEW: Tables = {"train": {"max_steps": 1, "batch_size": 2}, "eval": {"every_steps": None}}


class Case(NamedTuple):
    wrong: Tables
    """Tables of the recipe with which the run ends."""
    right: Tables
    """The same tables as the fix says."""
    memory_gib: float = 8.0
    room_gib: float = 8.0
    """Memory of the device with the right tables."""


LORA = {"kind": "lora"}
CASES = {
    "model/attention:_no_flash": Case({"model": {"attention": "flash"}}, {"model": {"attention": "auto"}}),
    "model/loss:choose_implementation": Case(
        {"train": {"loss": "fused", "label_smoothing": 0.1}}, {"train": {"loss": "auto", "label_smoothing": 0.1}}
    ),
    "model/adapters:choose_targets: set method.targets": Case(
        {"method": {**LORA, "targets": ["*q_proj"], "exclude": ["*q_proj"]}},
        {"method": {**LORA, "targets": "all-linear"}},
    ),
    "model/adapters:whole_modules": Case(
        {"model": {"id": "BIASED"}, "method": {**LORA, "also_train": ["model.layers.0.self_attn.q_proj.weight"]}},
        {"model": {"id": "BIASED"}, "method": {**LORA, "also_train": ["model.layers.0.self_attn.q_proj"]}},
    ),
    "config/name_patterns:nothing_learns": Case(
        {"method": {"kind": "full", "freeze": ["**"]}}, {"method": {"kind": "full"}}
    ),
    "config/name_patterns:require_trained_matches": Case(
        {"method": {"kind": "full", "train_only": ["**.norm", "**.mlp"], "freeze": ["**.norm"]}},
        {"method": {"kind": "full", "train_only": ["**.norm", "**.mlp"]}},
    ),
    "config/name_patterns:require_layers": Case(
        {"method": {**LORA, "layers": [0, 99]}}, {"method": {**LORA, "layers": [0]}}
    ),
    "config/name_patterns:no_such_part": Case({"method": {**LORA, "freeze": ["vision"]}}, {"method": LORA}),
    "config/parameter_groups:assign_groups": Case(
        {"train": {"groups": [{"match": "**.mlp", "weight_decay": 0.1}, {"match": "**.up_proj", "weight_decay": 0.0}]}},
        {"train": {"groups": [{"match": "**.up_proj", "weight_decay": 0.0}, {"match": "**.mlp", "weight_decay": 0.1}]}},
    ),
    "architecture/token_rows:frozen_tokens": Case(
        {"model": {"add_tokens": ["<a>"]}, "method": {**LORA, "freeze": ["**.embed_tokens"]}},
        {"model": {"add_tokens": ["<a>"]}, "method": LORA},
    ),
    "model/tokenizer:_set_special": Case(
        {"model": {"special_tokens": {"eos": "<a>"}}},
        {"model": {"special_tokens": {"eos": "<a>"}, "add_tokens": ["<a>"]}},
    ),
    "model/token_rows:expect_trained_ends": Case(
        {"model": {"add_tokens": ["<a>"]}, "method": {"kind": "full", "freeze": ["**.embed_tokens"]}},
        {"model": {"add_tokens": ["<a>"]}, "method": {"kind": "full"}},
    ),
    "config/name_patterns:no_match: {f": Case(
        {"method": {"kind": "full", "train_only": ["q_prj"]}}, {"method": {"kind": "full", "train_only": ["**.q_proj"]}}
    ),
    "train/step/optimizer:_adamw_8bit": Case(
        {"train": {"optimizer": "adamw_8bit"}}, {"train": {"optimizer": "adamw"}}
    ),
    "train/step/transaction:_finish_step: lower train.learning_rate, or": Case(
        {"train": {"learning_rate": 1e30, "optimizer": "sgd", "max_steps": 3, "max_grad_norm": 0.0}},
        {"train": {"learning_rate": 1e-3, "optimizer": "sgd", "max_steps": 3}},
    ),
    "train/step/failures:memory_exhausted: {advice": Case(
        {"backoff": {"ladder": ["retry"]}, "train": {"micro_batch": 8, "batch_size": 8, "max_steps": 1}},
        {"backoff": {"ladder": ["retry"]}, "train": {"micro_batch": 8, "batch_size": 8, "max_steps": 1}},
        memory_gib=12 / 1024,
    ),
    "data/order:hold_out": Case(
        {"data": {"valid_fraction": 0.999}}, {"data": {"valid_fraction": 0.1}}
    ),
    "data/prepare:_require_samples": Case({"data": {"max_length": 2}}, {"data": {"max_length": 64}}),
}  # fmt: skip


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "rows.jsonl", count=16)


def biased(folder: Path) -> str:
    """A model whose attention has biases."""
    from tests.cli.test_gate import LLAMA

    (folder / "biased").mkdir(exist_ok=True)
    (folder / "biased" / "config.json").write_text(json.dumps({**LLAMA, "model_type": "llama", "attention_bias": True}))
    return str(folder / "biased")


def run_with(samples: Path, tables: Tables, *, memory_gib: float = 8.0) -> tuple[int, list[Event]]:
    merged: Any = {name: {**FEW.get(name, {}), **tables.get(name, {})} for name in {*FEW, *tables}}
    if merged.get("model", {}).get("id") == "BIASED":
        merged["model"]["id"] = biased(samples.parent)
    spec = make_spec(samples, memory_gib=memory_gib, **merged)
    return train(new_run(samples.parent / "runs", spec))


@pytest.mark.parametrize(("key", "case"), CASES.items(), ids=CASES)
def test_a_run_that_is_changed_as_its_fix_says_is_done(key: str, case: Case, samples: Path, given: Given) -> None:
    code, events = run_with(samples, case.wrong, memory_gib=case.memory_gib)
    assert code != 0
    assert was_given(text_of(key), given), (given, events[-3:])
    code, events = run_with(samples, case.right, memory_gib=case.room_gib)
    assert code == 0, events[-1]
