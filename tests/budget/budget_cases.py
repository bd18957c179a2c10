"""The cases for which predictions are compared with real steps: small models of every family, trained in many ways."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.architecture.lookup import find_architecture
from engine.budget.predict.prediction import predict
from engine.config.files.machine import installed, older
from engine.config.schema.run import RunSpec
from tests.budget.metered_step import (
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    folder_of,
    measured_step,
    run_spec,
)

DENSE = {config["model_type"]: config for config in (QWEN2, QWEN3, LLAMA, MISTRAL, PHI3, GEMMA2, GEMMA3, GPT2)}
EXPERTS = {config["model_type"]: config for config in (MIXTRAL, QWEN3_MOE, GPT_OSS)}
FAMILIES = DENSE | EXPERTS
CAPPED = ("gemma2",)
"""Families whose logits are capped, which no fused loss can do."""

NO_FUSED = FAMILIES if older(installed("torch"), "2.13") else CAPPED
"""Families for which there is no fused loss here: torch has had one since 2.13."""


@dataclass(frozen=True)
class Way:
    """One way to train: tables of a recipe."""

    dtype: str
    method: dict[str, Any]
    train: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


LORA, LORA16, FULL = {"rank": 8}, {"rank": 8, "adapter_dtype": "bfloat16"}, {"kind": "full"}
SAVING, KEEPING = {"gradient_checkpointing": True}, {"gradient_checkpointing": False}
EAGER, PACKED = {"attention": "eager"}, {"packing": True}
WAYS: dict[str, Way] = {
    "lora": Way("bfloat16", LORA, SAVING),
    "lora fp32 base, kept": Way("float32", LORA, KEEPING),
    "lora bf16, kept": Way("bfloat16", LORA16, KEEPING),
    "lora fp16": Way("float16", LORA, SAVING),
    "lora on attention": Way("bfloat16", {"rank": 4, "targets": "attention"}, KEEPING),
    "lora, dropout": Way("bfloat16", {**LORA, "dropout": 0.1}, SAVING),
    "lora, rslora": Way("bfloat16", {**LORA, "rslora": True}, SAVING),
    "dora": Way("bfloat16", {**LORA, "dora": True}, SAVING),
    "dora, dropout": Way("bfloat16", {**LORA, "dora": True, "dropout": 0.1}, SAVING),
    "dora fp32, kept": Way("float32", {**LORA, "dora": True}, KEEPING),
    "lora + head": Way("bfloat16", {**LORA, "also_train": ["lm_head"]}, SAVING),
    "full": Way("bfloat16", FULL, SAVING),
    "full fp32, kept": Way("float32", FULL, {**KEEPING, "loss": "plain"}),
    "full fp16": Way("float16", FULL, SAVING),
    "full fp16, eager": Way("float16", FULL, SAVING, model=EAGER),
    "full, attention only": Way("bfloat16", {"kind": "full", "train_only": ["**.self_attn"]}, KEEPING),
    "full, adafactor": Way("float32", FULL, {**SAVING, "optimizer": "adafactor"}),
    "full, sgd": Way("float32", FULL, {**SAVING, "optimizer": "sgd", "momentum": 0.9}),
    "full, stochastic, state in bf16": Way(
        "bfloat16", FULL, {**SAVING, "rounding": "stochastic", "state_dtype": "bfloat16"}
    ),
    "full, nearest, sgd": Way("bfloat16", FULL, {**SAVING, "rounding": "nearest", "optimizer": "sgd", "momentum": 0.9}),
    "full, adafactor in bf16": Way("bfloat16", FULL, {**SAVING, "optimizer": "adafactor"}),
    "lora bf16, stochastic, + head": Way(
        "bfloat16", {**LORA16, "also_train": ["lm_head"]}, {**SAVING, "rounding": "stochastic"}
    ),
    "lora, smoothing": Way("float32", LORA, {**KEEPING, "label_smoothing": 0.1}),
    "lora, plain loss": Way("bfloat16", LORA, {**KEEPING, "loss": "plain"}),
    "full, fused loss": Way("float32", FULL, {**SAVING, "loss": "fused"}),
    "lora, fused loss": Way("bfloat16", LORA, {**KEEPING, "loss": "fused"}),
    "lora, packed": Way("bfloat16", LORA, SAVING, data=PACKED),
    "lora, eager": Way("bfloat16", LORA, SAVING, model=EAGER),
    "lora, eager, kept": Way("float32", LORA, KEEPING, model=EAGER),
}


def applies(family: str, way: str) -> bool:
    """Whether this family can be trained in this way. Families that cap their logits, such as Gemma 2, have no fused
    loss; GPT-2's attention modules have other names than the pattern of "full, attention only"."""
    return not (family in NO_FUSED and "fused" in way) and not (family == "gpt2" and way == "full, attention only")


def spec_of(family: str, way: str, folder: Path, batch: int) -> RunSpec:
    """The run spec of a family trained in one way."""
    chosen = WAYS[way]
    return run_spec(
        folder_of(FAMILIES[family], folder / family),
        method=chosen.method,
        model={"dtype": chosen.dtype, **chosen.model},
        train={**chosen.train, "batch_size": batch},
        data={"max_length": 512, **chosen.data},
    )


def error(family: str, way: str, folder: Path, *, rows: int = 2, length: int = 200, micro_batches: int = 1) -> float:
    """The relative error of a predicted peak: predicted divided by measured peak of torch's allocations, minus one. The
    step has `micro_batches` micro-batches of `rows` sequences of `length` tokens."""
    spec = spec_of(family, way, folder, rows * micro_batches)
    predicted = predict(find_architecture(spec), spec, rows=rows, length=length).peak_bytes
    return predicted / measured_step(spec, rows, length, micro_batches)[1] - 1
