"""Layers of which some recompute their activations: the predicted peak is the one of real steps, and "auto" recomputes
as few as the memory needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.architecture.lookup import find_architecture
from engine.budget.advise.auto_settings import SPARE_SHARE
from engine.budget.advise.plan import make_plan
from engine.budget.predict.prediction import Predictor, predict
from engine.budget.predict.recompute import recompute_order
from engine.budget.trace.memory_config import memory_config_of
from engine.config.load import resolve
from engine.config.schema.run import RunSpec
from engine.extras.simulate.step import simulate_step
from tests.budget.metered_step import GEMMA2, GEMMA3, GPT2, LLAMA, QWEN3_MOE, folder_of, measured_step, run_spec

LORA: dict[str, Any] = {"rank": 8}
FULL: dict[str, Any] = {"kind": "full"}
LAYERS = 4
LLAMA_8B = ["model.id=meta-llama/Llama-3.1-8B", "data.max_length=4096", "model.kernels=torch"]


def deep(config: dict[str, Any], method: dict[str, Any], folder: Path, layers: Any, **train: Any) -> RunSpec:
    """A model of LAYERS layers, of which `layers` recompute; two micro-batches of two sequences a step."""
    config = {**config, "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers": LAYERS}
    chosen = {"batch_size": 4, "gradient_checkpointing": layers, **train}
    model = {"dtype": "float32" if method is LORA and config["model_type"] == "gpt2" else "bfloat16"}
    return run_spec(folder_of(config, folder), method=method, model=model, train=chosen, data={"max_length": 512})


@pytest.mark.parametrize(
    ("config", "method"),
    [(LLAMA, LORA), (LLAMA, FULL), (GEMMA3, LORA), (GEMMA2, FULL), (QWEN3_MOE, LORA), (GPT2, LORA)],
    ids=lambda value: value.get("model_type") or "-".join(map(str, value.values())),
)
def test_the_peak_is_that_of_a_real_step(config: dict[str, Any], method: dict[str, Any], tmp_path: Path) -> None:
    layers = 1 if method is FULL else 2
    spec = deep(config, method, tmp_path, layers)
    predicted = predict(find_architecture(spec), spec, rows=2, length=200).peak_bytes
    measured = measured_step(spec, 2, 200, 2)[1]
    assert predicted == pytest.approx(measured, rel=0.005)


def test_a_simulation_knows_the_number_of_layers(tmp_path: Path) -> None:
    spec = deep(LLAMA, LORA, tmp_path, 3)
    predicted = predict(find_architecture(spec), spec, rows=2, length=200)
    assert simulate_step(spec, rows=2, length=200).peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.001)


def test_each_layer_more_lowers_the_peak_and_all_are_as_true() -> None:
    def peak(layers: Any) -> int:
        spec = resolve("80gb", "lora", [*LLAMA_8B, f"train.gradient_checkpointing={layers}"]).spec
        return predict(find_architecture(spec), spec, rows=2, length=4096).peak_bytes

    every, none = peak("true"), peak("false")
    assert peak(32) == peak(99) == peak("auto") == every
    between = [peak(layers) for layers in (1, 2, 16, 31)]
    assert [none, *between, every] == sorted([none, *between, every], reverse=True)
    assert between[0] - between[1] == pytest.approx((none - every) / 32, rel=0.1)


def test_layers_that_save_more_for_their_time_recompute_first() -> None:
    spec = resolve("80gb", "lora", ["model.id=google/gemma-3-4b-it", "data.max_length=8192"]).spec
    arch = find_architecture(spec)
    order = recompute_order(arch, memory_config_of(arch, spec))
    sliding = sum(arch.sliding_layers)
    assert 0 < sliding < arch.layers
    assert all(arch.sliding_layers[layer] for layer in order[:sliding]), "attention in a window takes less time"
    assert list(order[:sliding]) == sorted(order[:sliding]) and list(order[sliding:]) == sorted(order[sliding:])
    short = resolve("80gb", "lora", ["model.id=google/gemma-3-4b-it", "data.max_length=512"]).spec
    assert recompute_order(arch, memory_config_of(arch, short)) == tuple(range(arch.layers))


def test_layers_that_learn_nothing_recompute_last() -> None:
    spec = resolve("80gb", "full", ["model.id=Qwen/Qwen3-0.6B", 'method.freeze=["model.layers.[0-3].**"]']).spec
    arch = find_architecture(spec)
    order = recompute_order(arch, memory_config_of(arch, spec))
    learning = [layer for layer in order if layer > 3]
    assert order[: len(learning)] == tuple(learning)


def planned(gib: float, *sets: str) -> Any:
    spec = resolve("80gb", "lora", [*LLAMA_8B, "train.micro_batch=2", f"device.memory_gib={gib}", *sets]).spec
    return make_plan(spec), Predictor(find_architecture(spec), spec)


@pytest.mark.parametrize("gib", [22.0, 30.0, 45.0, 60.0])
def test_auto_recomputes_as_few_layers_as_fit(gib: float) -> None:
    plan, predictor = planned(gib)
    layers = plan.recomputed_layers
    assert plan.verdict == "fits" and 0 < layers < 32
    assert plan.prediction.device_bytes * (1 + SPARE_SHARE) <= plan.capacity_bytes
    one_less = predictor.recomputing(layers - 1).predict(2, 4096).device_bytes
    assert one_less * (1 + SPARE_SHARE) > plan.capacity_bytes
    assert plan.checkpointing == layers
    assert plan.prediction.device_bytes > 0.94 * plan.capacity_bytes, "memory is used where it saves time"


def test_auto_recomputes_nothing_where_everything_fits_and_all_where_nothing_else_does() -> None:
    roomy, _ = planned(79.1)
    assert (roomy.verdict, roomy.recomputed_layers, roomy.checkpointing) == ("fits", 0, False)
    assert roomy.prediction.device_bytes / 2**30 == pytest.approx(62.6, abs=0.1)
    tight, _ = planned(20.0)
    assert (tight.recomputed_layers, tight.checkpointing) == (32, True)
    assert tight.verdict == "fits_smaller"
    assert tight.prediction == planned(20.0, "train.gradient_checkpointing=true")[0].prediction


def test_auto_takes_a_smaller_micro_batch_rather_than_recompute() -> None:
    sets = ["train.micro_batch=auto", "train.batch_size=16"]
    plan, _ = planned(79.1, *sets)
    every, _ = planned(79.1, *sets, "train.gradient_checkpointing=true")
    assert (plan.micro_batch, plan.recomputed_layers) == (2, 0)
    assert every.micro_batch == 16
