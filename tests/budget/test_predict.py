"""Compares predictions with published formulas, and with the engine's own step on the metered device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.architecture.facts import Architecture, from_config
from engine.architecture.lookup import builtin_config, find_architecture, find_config
from engine.architecture.parameters import layer_parameters
from engine.budget.predict.layer_traces import layer_backward
from engine.budget.predict.prediction import COMPONENTS, cost_model, predict
from engine.budget.trace.layer import layer_stack
from engine.budget.trace.memory_config import memory_config_of
from tests.budget.metered_step import (
    GEMMA2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    folder_of,
    measured_step,
    run_spec,
)

H100 = {"kind": "cuda", "memory_gib": 79.2, "compute_capability": 9.0}
TINY = from_config(builtin_config("builtin:tiny"))


def published_window(arch: Architecture, method: str, rank: int) -> int:
    """Bytes per token of one bf16 layer, by the published formula, while the layer is recomputed and runs backward; the
    layer's input is included."""
    f, h, q, k = arch.intermediate, arch.hidden, arch.query_width, arch.kv_width
    tail = 4 * arch.heads + 8 + 2 * h
    return {
        "adapters": 12 * f + 14 * h + 4 * q + 4 * k + 12 * rank + tail,
        "full": 12 * f + 18 * h + 4 * q + 4 * k + tail,
    }[method]


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B"])
@pytest.mark.parametrize(
    ("method", "table"),
    [
        ("adapters", {"rank": 128}),
        ("adapters", {"rank": 128, "adapter_dtype": "bfloat16"}),
        ("full", {"kind": "full"}),
    ],
)
def test_layer_window_is_the_one_of_the_specification(model: str, method: str, table: dict[str, Any]) -> None:
    arch = from_config(find_config(model))
    tables = {"method": table, "train": {"gradient_checkpointing": True}, "model": {"kernels": "torch"}}
    config = memory_config_of(arch, run_spec(model, H100, **tables))
    maxima = layer_backward(arch, config, layer_stack(arch, config).layers[-1], False)
    assert max(size.per_token for size in maxima) == published_window(arch, method, 128)


LORA, LORA16, FULL = {"rank": 8}, {"rank": 8, "adapter_dtype": "bfloat16"}, {"kind": "full"}
CELLS = [
    (QWEN2, LORA, "float32", {"gradient_checkpointing": True}, 3, 200, 1),
    (QWEN2, FULL, "bfloat16", {"gradient_checkpointing": True}, 2, 256, 2),
    (QWEN2, FULL, "float32", {"gradient_checkpointing": False, "loss": "plain"}, 2, 128, 1),
    (QWEN2, LORA, "bfloat16", {"gradient_checkpointing": True}, 4, 96, 2),
    (QWEN2, LORA16, "bfloat16", {"gradient_checkpointing": False}, 2, 160, 2),
    (QWEN2, FULL, "float32", {"gradient_checkpointing": True, "optimizer": "sgd"}, 2, 200, 2),
    (QWEN3, FULL, "bfloat16", {"gradient_checkpointing": True}, 2, 192, 1),
    (QWEN3, LORA, "float32", {"gradient_checkpointing": False}, 1, 300, 2),
    (QWEN3, {"rank": 4, "targets": "attention"}, "float32", {"gradient_checkpointing": True}, 2, 200, 1),
    (LLAMA, LORA, "float32", {"gradient_checkpointing": True}, 5, 64, 1),
    (LLAMA, FULL, "float32", {"gradient_checkpointing": True, "loss": "plain"}, 2, 256, 2),
    (MISTRAL, LORA, "bfloat16", {"gradient_checkpointing": False}, 2, 160, 2),
    (MISTRAL, FULL, "float32", {"gradient_checkpointing": False}, 3, 100, 1),
    (GEMMA2, LORA, "float32", {"gradient_checkpointing": True}, 2, 160, 1),
    (GEMMA2, FULL, "bfloat16", {"gradient_checkpointing": False}, 2, 200, 2),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]['model_type']}-{cell[1]}-{cell[2]}-{cell[3]}")
def test_peak_is_the_one_the_metered_device_counts(cell: tuple[Any, ...], tmp_path: Path) -> None:
    config, method, dtype, train, rows, length, micro_batches = cell
    spec = run_spec(
        folder_of(config, tmp_path / "model"),
        method=method,
        model={"dtype": dtype},
        train={**train, "batch_size": rows * micro_batches},
        data={"max_length": 512},
    )
    predicted = predict(find_architecture(spec), spec, rows=rows, length=length)
    static, peak = measured_step(spec, rows, length, micro_batches)
    assert cost_model(find_architecture(spec), spec).static_bytes == pytest.approx(static, abs=4096)
    assert -0.002 <= predicted.peak_bytes / peak - 1 <= 0.005


@pytest.mark.parametrize("method", [LORA, FULL], ids=str)
def test_metered_device_judges_the_prediction(method: dict[str, Any], tmp_path: Path) -> None:
    import torch

    folder = folder_of(QWEN2, tmp_path / "model")
    tables: dict[str, Any] = {"method": method, "model": {"dtype": "float32"}, "train": {"batch_size": 4}}
    spec = run_spec(folder, **tables)
    peak = predict(find_architecture(spec), spec, rows=4, length=150).peak_bytes
    for share, fits in ((1.01, True), (0.99, False)):
        capped = run_spec(folder, {"kind": "metered", "memory_gib": share * peak / 2**30}, **tables)
        if fits:
            measured_step(capped, 4, 150)
        else:
            with pytest.raises(torch.OutOfMemoryError):
                measured_step(capped, 4, 150)


def test_cost_grows_with_rows_and_with_length() -> None:
    cost = cost_model(TINY, run_spec(train={"batch_size": 64}))
    grid = [[cost.bytes(rows, length) for length in (1, 2, 17, 64, 300, 2048)] for rows in (1, 2, 3, 8, 64)]
    assert all(row == sorted(row) for row in grid)
    assert all(list(column) == sorted(column) for column in zip(*grid, strict=True))


def test_cost_of_a_later_micro_batch_is_the_predicted_peak() -> None:
    spec = run_spec(train={"batch_size": 64})
    cost = cost_model(TINY, spec)
    for rows, length in ((1, 100), (4, 64), (16, 300)):
        assert cost.static_bytes + cost.bytes(rows, length) == predict(TINY, spec, rows=rows, length=length).peak_bytes


def test_optimizer_offload_leaves_no_state_on_the_device() -> None:
    spec = run_spec(method=FULL, train={"batch_size": 4, "optimizer_offload": True})
    phases = predict(TINY, spec, rows=2, length=64).phases
    phases.pop("optimizer_step")  # which copies one parameter's state at a time
    assert phases and not any(row.get("optimizer") for row in phases.values())


def test_a_prediction_adds_up() -> None:
    spec = run_spec("Qwen/Qwen2.5-7B", H100)
    prediction = predict(find_architecture(spec), spec, rows=4, length=2048)
    assert list(prediction.components) == list(COMPONENTS)
    assert sum(prediction.components.values()) == prediction.device_bytes > prediction.peak_bytes
    assert sum(prediction.phases[prediction.deciding_phase].values()) == prediction.peak_bytes
    assert prediction.peak_bytes == max(sum(parts.values()) for parts in prediction.phases.values())


def test_a_frozen_model_part_costs_no_gradient_and_no_state() -> None:
    whole = cost_model(TINY, run_spec(method={"kind": "full"})).static_bytes
    half = cost_model(TINY, run_spec(method={"kind": "full", "freeze": ["model.layers.[0-1]"]})).static_bytes
    layer = sum(parameter.elements for parameter in layer_parameters(TINY, True))
    assert whole - half == pytest.approx(2 * 2 * 4 * layer, rel=0.02)


def test_only_an_embedding_that_learns_has_a_backward_pass() -> None:
    phases = [
        predict(TINY, run_spec(method=method), rows=2, length=64).phases
        for method in (LORA, {"kind": "full", "freeze": ["model.embed_tokens"]}, FULL)
    ]
    assert ["embedding_backward" in each for each in phases] == [False, False, True]


@pytest.mark.parametrize(("checkpointing", "over"), [(True, 0.01), (False, 0.02)])
def test_offloaded_activations_are_never_priced_too_low(checkpointing: bool, over: float, tmp_path: Path) -> None:
    train = {"gradient_checkpointing": checkpointing, "activation_offload": True, "batch_size": 4}
    spec = run_spec(folder_of(QWEN2, tmp_path / "model"), model={"dtype": "float32"}, train=train)
    predicted = predict(find_architecture(spec), spec, rows=4, length=200).peak_bytes
    _, peak = measured_step(spec, 4, 200)
    assert -0.001 <= predicted / peak - 1 <= over
