"""What exact and stochastic rounding of bf16 weights cost in memory, and what `fit` offers in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.architecture.lookup import find_architecture, find_facts
from engine.budget.advise.preflight import warnings_of
from engine.budget.advise.search import advise
from engine.budget.predict.prediction import Prediction, Predictor, predict
from engine.config.check.rules import problems_of_recipe
from engine.config.schema.run import RunSpec
from tests.budget.metered_step import LLAMA, folder_of, measured_step, run_spec

FULL = {"kind": "full"}
CARD = {"kind": "cuda", "memory_gib": 80.0, "compute_capability": 9.0}
STOCHASTIC = {"rounding": "stochastic", "state_dtype": "bfloat16"}
WIDE: dict[str, Any] = {**LLAMA, "vocab_size": 80_000, "hidden_size": 240, "num_hidden_layers": 1}
"""38 million weights outside its layer: the update's scratch is smaller than they are."""
LLAMA_8B: dict[str, Any] = {
    **LLAMA, "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
"""8 billion weights: 14 bytes for each are 105 GiB, 8 bytes 60 GiB."""


def full(folder: Path, train: dict[str, Any] | None = None, **tables: Any) -> RunSpec:
    config = tables.pop("config", LLAMA)
    return run_spec(
        folder_of(config, folder), tables.pop("device", CARD), method=FULL, train={"batch_size": 2, **(train or {})},
        model={"dtype": "bfloat16"}, **tables,
    )  # fmt: skip


def prediction(spec: RunSpec) -> Prediction:
    return predict(find_architecture(spec), spec, rows=1, length=32)


@pytest.mark.parametrize(
    ("train", "bytes_per_weight"),
    [
        ({}, 2 + 2 + 8),
        ({"rounding": "stochastic"}, 2 + 8),
        (STOCHASTIC, 2 + 4),
        ({"rounding": "nearest", "state_dtype": "bfloat16"}, 2 + 4),
        ({"optimizer": "adamw_8bit"}, 2 + 2 + 2),
        ({"optimizer": "sgd"}, 2 + 2),
    ],
    ids=str,
)
def test_bytes_of_a_weight_between_steps(train: dict[str, Any], bytes_per_weight: int, tmp_path: Path) -> None:
    spec = full(tmp_path, train, config=WIDE)
    predictor = Predictor(find_architecture(spec), spec)
    weights = predictor.total.weights // 2
    assert predictor.total.static / weights == pytest.approx(bytes_per_weight, rel=0.02)
    assert predictor.total.gradients == pytest.approx(2 * weights, rel=0.001)


def test_the_scratch_is_as_large_as_a_piece_and_no_larger(tmp_path: Path) -> None:
    row = 4 * 16 * 2**20
    for train, rows in (({}, 2), ({"rounding": "stochastic"}, 3), (STOCHASTIC, 5)):
        step = prediction(full(tmp_path, train, config=WIDE)).phases["optimizer_step"]
        assert step["buffers"] == rows * row + 512
    own = prediction(full(tmp_path, {"rounding": "nearest", "state_dtype": "bfloat16"}, config=WIDE))
    assert "buffers" not in own.phases["optimizer_step"]


@pytest.mark.parametrize("train", [{}, STOCHASTIC, {"optimizer": "adafactor"}, {"optimizer_offload": True}], ids=str)
def test_a_model_larger_than_a_piece_holds_what_is_predicted(train: dict[str, Any], tmp_path: Path) -> None:
    spec = full(tmp_path, train, config=WIDE, device={"kind": "metered", "memory_gib": 8.0})
    found = prediction(spec)
    if not train.get("optimizer_offload"):
        assert found.deciding_phase == "optimizer_step"
    predicted = predict(find_architecture(spec), spec, rows=2, length=32).peak_bytes
    assert predicted == pytest.approx(measured_step(spec, 2, 32)[1], rel=0.005)


def test_fit_offers_what_exactness_costs(tmp_path: Path) -> None:
    device = {**CARD, "memory_gib": 79.2, "reserve_gib": 1.6}
    advice = advise(full(tmp_path, config=LLAMA_8B, device=device, data={"max_length": 1024}))
    assert advice.plan.verdict != "fits"
    offered = [{key: after for key, (_, after) in found.changes.items()} for found in advice.suggestions]
    assert {"train.optimizer": "adamw_8bit"} in offered
    assert {"train.rounding": "stochastic", "train.state_dtype": "bfloat16"} in offered
    assert not any({"train.state_dtype", "train.optimizer"} <= changes.keys() for changes in offered)
    notes = [lever.note for found in advice.suggestions for lever in found.levers]
    assert any("weights stay exact" in note for note in notes)
    assert any("exact on average" in note for note in notes)


def test_fit_offers_no_eight_bit_optimizer_in_shards_where_it_is_refused(tmp_path: Path) -> None:
    def sharded(memory_gib: float, train: dict[str, Any]) -> RunSpec:
        device = {**CARD, "memory_gib": memory_gib, "count": 2}
        spec = full(tmp_path, train, config=LLAMA_8B, device=device, data={"max_length": 32})
        parallel = spec.profile.parallel.model_copy(update={"strategy": "sharded"})
        return spec.model_copy(update={"profile": spec.profile.model_copy(update={"parallel": parallel})})

    exact, stochastic = (prediction(sharded(80.0, train)).device_bytes / 2**30 for train in ({}, STOCHASTIC))
    assert stochastic < exact
    offered = [found.changes for found in advise(sharded((exact + stochastic) / 2, {})).suggestions]
    assert not any("train.optimizer" in changes for changes in offered)
    assert any("train.state_dtype" in changes for changes in offered)


@pytest.mark.parametrize(
    ("train", "culprit"),
    [
        ({"optimizer": "adamw_8bit"}, "8 bits"),
        ({"optimizer": "adafactor"}, "two float32 vectors"),
        ({"optimizer": "sgd"}, "no state"),
        ({"optimizer": "sgd", "momentum": 0.9}, None),
        ({}, None),
    ],
    ids=str,
)
def test_state_in_bf16_is_refused_where_there_is_none(train: dict[str, Any], culprit: str | None) -> None:
    problems = problems_of_recipe(run_spec(train={**train, "state_dtype": "bfloat16"}).recipe)
    assert [problem.place for problem in problems] == ([("train", "state_dtype")] if culprit else [])
    assert all(culprit in problem.found for problem in problems if culprit)


def test_keys_about_bf16_are_said_to_do_nothing_where_nothing_is_trained_in_bf16(tmp_path: Path) -> None:
    def said(method: dict[str, Any], dtype: str) -> list[str]:
        spec = run_spec(folder_of(LLAMA, tmp_path), CARD, method=method, model={"dtype": dtype}, train=STOCHASTIC)
        found = warnings_of(find_facts(spec.recipe.model), spec, torch_version="2.13.0")
        return [warning.partition(" = ")[0] for warning in found if "has no effect" in warning]

    assert said(FULL, "float32") == said({"rank": 4}, "bfloat16") == ["train.rounding", "train.state_dtype"]
    assert said(FULL, "bfloat16") == said({"rank": 4, "adapter_dtype": "bfloat16"}, "float32") == []
