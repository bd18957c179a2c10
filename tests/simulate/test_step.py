"""Compares the simulation with the metered device, which counts the real tensors of the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engine.architecture.lookup import find_architecture, find_config
from engine.budget.predict.prediction import predict
from engine.errors import UsageError
from engine.extras.simulate.step import ExactPlan, exact_plan, simulate_step
from tests.budget.metered_step import (
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    PHI3,
    QWEN2,
    folder_of,
    measured_evaluation,
    measured_generation,
    measured_step,
    run_spec,
)

LORA: dict[str, Any] = {"rank": 8}
FULL: dict[str, Any] = {"kind": "full"}
BOTH_WAYS = {**GEMMA3, "sliding_window_pattern": 2}
"""Layers with a window and without, as in all that are published: both masks are made, needed or not."""
SHALLOW = {**QWEN2, "num_hidden_layers": 2}
"""For what is asked of several simulations: each takes as long as the model is deep."""


@pytest.mark.parametrize(
    ("config", "method", "train"),
    [
        (QWEN2, LORA, {"gradient_checkpointing": True}),
        (QWEN2, FULL, {"gradient_checkpointing": False, "loss": "plain"}),
        (GEMMA2, FULL, {"gradient_checkpointing": True}),
        (MIXTRAL, LORA, {"gradient_checkpointing": False}),
        (GPT_OSS, LORA, {"gradient_checkpointing": True}),
        (PHI3, FULL, {"gradient_checkpointing": True, "optimizer": "sgd"}),
    ],
    ids=lambda value: value.get("model_type") or "-".join(map(str, value.values())),
)
def test_it_holds_what_the_metered_device_counts(
    config: dict[str, Any], method: dict[str, Any], train: dict[str, Any], tmp_path: Path
) -> None:
    tables: dict[str, Any] = {"method": method, "model": {"dtype": "bfloat16"}, "train": {**train, "batch_size": 4}}
    spec = run_spec(folder_of(config, tmp_path), **tables)
    found = simulate_step(spec, rows=2, length=120)
    static_bytes, peak_bytes = measured_step(spec, 2, 120, 2)
    assert found.static_bytes == pytest.approx(static_bytes, abs=4096)
    assert found.peak_bytes == pytest.approx(peak_bytes, rel=1e-3)
    assert sum(found.components.values()) == found.peak_bytes


def test_a_card_adds_gradients_in_place_and_holds_no_more(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "train": {"batch_size": 4}}
    folder = folder_of(SHALLOW, tmp_path)
    metered = run_spec(folder, **tables)
    card = run_spec(folder, {"kind": "cuda", "memory_gib": 80.0, "compute_capability": 9.0}, **tables)
    assert simulate_step(card, rows=2, length=120).peak_bytes <= simulate_step(metered, rows=2, length=120).peak_bytes


@pytest.mark.parametrize(
    ("config", "method", "kernels"),
    [
        (QWEN2, LORA, "torch"),
        (QWEN2, FULL, "auto"),
        (MIXTRAL, FULL, "torch"),
        (BOTH_WAYS, LORA, "torch"),
        (BOTH_WAYS, LORA, "auto"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("model_type") or str(value),
)
def test_every_phase_of_the_plan_is_simulated_and_the_two_agree(
    config: dict[str, Any], method: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    spec = run_spec(
        folder_of(config, tmp_path),
        {"kind": "cuda", "memory_gib": 80.0, "compute_capability": 9.0},
        method=method,
        model={"dtype": "bfloat16", "kernels": kernels},
        train={"batch_size": 4, "gradient_checkpointing": True},
        data={"max_length": 300, "valid_fraction": 0.5},
        eval={"samples": 3},
        generate={"max_new_tokens": 40},
    )
    found = simulate_step(spec, rows=2, length=250)
    phases = predict(find_architecture(spec), spec, rows=2, length=250).phases
    assert set(found.phases) == set(phases) - {"load"}
    for phase, held_bytes in found.sums.items():
        # The ends of a step are small here: a tensor for each gradient's norm, and the two inputs of a sum, show. And
        # where nothing is kept, layers with a window are priced like those without.
        bound = {"embedding_backward": 0.05, "optimizer_step": 0.04, "evaluate": 0.02}.get(phase, 0.01)
        assert sum(phases[phase].values()) == pytest.approx(held_bytes, rel=bound), phase


@pytest.mark.parametrize(
    ("config", "prompt", "generate"),
    [
        (SHALLOW, 150, {"max_new_tokens": 3}),
        ({**BOTH_WAYS, "num_hidden_layers": 2}, 150, {"max_new_tokens": 3}),
        (GEMMA3, 8, {"max_new_tokens": 100}),
        ({**GPT_OSS, "num_hidden_layers": 2}, 8, {"max_new_tokens": 100}),
        (SHALLOW, 8, {"max_new_tokens": 10, "temperature": 0.7, "top_k": 5, "top_p": 0.9}),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else str(value),
)
def test_generation_holds_what_the_metered_device_counts(
    config: dict[str, Any], prompt: int, generate: dict[str, Any], tmp_path: Path
) -> None:
    """Short answers are simulated completely; of long answers, only the first tokens and the last."""
    spec = run_spec(
        folder_of(config, tmp_path),
        data={"max_length": prompt, "valid_fraction": 0.5},
        eval={"samples": 4},
        generate=generate,
        train={"batch_size": 1},
    )
    found = simulate_step(spec, rows=1, length=prompt).sums["generate"]
    assert found == pytest.approx(measured_generation(spec, 4, prompt), rel=3e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_experts_are_simulated_in_dtypes_that_fakes_of_their_product_do_not_know(dtype: str, tmp_path: Path) -> None:
    spec = run_spec(
        folder_of(GPT_OSS, tmp_path), method=FULL, model={"dtype": dtype}, train={"batch_size": 4, "loss": "plain"}
    )
    _, peak_bytes = measured_step(spec, 2, 60, 2)
    assert simulate_step(spec, rows=2, length=60).peak_bytes == pytest.approx(peak_bytes, rel=2e-3)


def test_a_tied_head_that_learns_beside_adapters_and_dropout_are_simulated(tmp_path: Path) -> None:
    method = {**LORA, "dropout": 0.1, "also_train": ["lm_head"]}
    spec = run_spec(folder_of(SHALLOW, tmp_path), method=method, train={"batch_size": 4})
    static_bytes, peak_bytes = measured_step(spec, 2, 120, 2)
    found = simulate_step(spec, rows=2, length=120)
    assert found.static_bytes == pytest.approx(static_bytes, abs=4096)
    assert found.peak_bytes == pytest.approx(peak_bytes, rel=1e-3)


def test_an_evaluation_makes_no_gradient_of_the_head(tmp_path: Path) -> None:
    """Tested with full fine-tuning, in which the head is trained: its gradient would be as large as the head."""
    held_out = {"max_length": 128, "valid_fraction": 0.5}
    tables: dict[str, Any] = {"method": FULL, "model": {"dtype": "bfloat16"}, "data": held_out}
    wide = {**QWEN2, "vocab_size": 20_000}
    spec = run_spec(folder_of(wide, tmp_path), train={"batch_size": 4}, **tables)
    found = simulate_step(spec, rows=2, length=100)
    assert found.sums["evaluate"] == pytest.approx(measured_evaluation(spec, 2, 100), rel=0.002)
    predicted = sum(predict(find_architecture(spec), spec, rows=2, length=100).phases["evaluate"].values())
    assert predicted == pytest.approx(found.sums["evaluate"], rel=0.01)


def test_scores_that_fill_the_memory_are_counted_as_a_card_holds_them(tmp_path: Path) -> None:
    """On a card softmax reads half precision and writes fp32 in one pass, so the simulated peak is smaller than that
    for the metered device."""
    tables: dict[str, Any] = {"model": {"dtype": "bfloat16", "attention": "eager"}, "train": {"batch_size": 4}}
    h100 = {"kind": "cuda", "memory_gib": 80.0, "compute_capability": 9.0}
    card = run_spec(folder_of(LLAMA, tmp_path), h100, **tables)
    predicted = predict(find_architecture(card), card, rows=2, length=700).peak_bytes
    simulated = simulate_step(card, rows=2, length=700).peak_bytes
    assert simulated == pytest.approx(predicted, rel=2e-3)
    metered = run_spec(folder_of(LLAMA, tmp_path), **tables)
    assert simulated < 0.95 * simulate_step(metered, rows=2, length=700).peak_bytes


def test_the_exact_plan_has_the_keys_of_the_plan_and_its_figures_in_bytes(tmp_path: Path) -> None:
    spec = run_spec(folder_of(QWEN2, tmp_path), train={"batch_size": 4}, data={"max_length": 128})
    document = json.loads(json.dumps(exact_plan(spec).as_json()))
    assert document["verdict"] == "fits" and document["exact"]
    assert document["peak_bytes"] == max(sum(row.values()) for row in document["phases"].values())
    assert document["peak_bytes"] == sum(document["phases"][document["deciding_phase"]].values())
    assert document["closed_form_bytes"] == pytest.approx(document["peak_bytes"], rel=0.01)


def test_what_does_not_fit_is_told_from_what_a_remedy_makes_fit(tmp_path: Path) -> None:
    def plan(memory_gib: float) -> ExactPlan:
        device = {"kind": "metered", "memory_gib": memory_gib}
        train = {"batch_size": 4, "micro_batch": 4, "gradient_checkpointing": False}
        return exact_plan(run_spec(folder_of(SHALLOW, tmp_path), device, train=train, data={"max_length": 512}))

    roomy = plan(4.0)
    half, too_little = 0.5 * roomy.simulation.peak_bytes / 2**30, 0.5 * roomy.simulation.static_bytes / 2**30
    assert [roomy.verdict, plan(half).verdict, plan(too_little).verdict] == ["fits", "fits_smaller", "does_not_fit"]


def test_a_four_bit_base_is_refused_with_the_way_out(tmp_path: Path) -> None:
    card = {"kind": "cuda", "memory_gib": 80.0, "compute_capability": 9.0}
    spec = run_spec(folder_of(QWEN2, tmp_path), card, model={"quantize": "nf4", "init": "pretrained"})
    with pytest.raises(UsageError, match="4-bit"):
        simulate_step(spec, rows=1, length=64)


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    """State-space models have an upper limit of time steps, which is infinity in most."""
    sizes = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
    settings = {**SHALLOW, **sizes, "model_type": "bamba", "attn_layer_indices": [1]}
    config = AutoConfig.for_model(**settings)
    config.save_pretrained(tmp_path)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert find_config(str(tmp_path), None)["time_step_limit"] == [0.0, float("inf")]
    spec = run_spec(tmp_path, method={"rank": 4})
    assert simulate_step(spec, rows=1, length=40).peak_bytes > 4 * config.vocab_size * config.hidden_size
