"""Tests of models that have plain feed-forward layers among layers of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.architecture.lookup import find_architecture, find_facts
from engine.budget.advise.model_rules import refuse_with_model
from engine.budget.predict.prediction import predict
from engine.errors import UsageError
from tests.budget.metered_step import QWEN3_MOE, folder_of, measured_step, run_spec

pytestmark = pytest.mark.usefixtures("quick_half_products")

MIXED = {**QWEN3_MOE, "num_hidden_layers": 5, "mlp_only_layers": [0, 3], "intermediate_size": 1024}


METHODS: dict[str, dict[str, Any]] = {
    "attention": {"rank": 8, "targets": "attention"},
    "all-linear": {"rank": 8},  # peft takes the names of the plain layers for those of experts: they get no adapter
    "full": {"kind": "full"},
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_their_peak_is_predicted(method: dict[str, Any], checkpointing: bool, tmp_path: Path) -> None:
    spec = run_spec(
        folder_of(MIXED, tmp_path),
        method=method, model={"dtype": "bfloat16"}, train={"gradient_checkpointing": checkpointing, "batch_size": 4},
    )  # fmt: skip
    static_bytes, peak_bytes = measured_step(spec, 2, 200, 2)
    predicted = predict(find_architecture(spec), spec, rows=2, length=200)
    assert sum(predicted.phases["load"].values()) < static_bytes
    assert -0.005 <= predicted.peak_bytes / peak_bytes - 1 <= 0.01


def test_adapters_that_would_land_on_the_experts_instead_are_refused_where_named(tmp_path: Path) -> None:
    method = {"rank": 8, "targets": ["q_proj", "**.mlp.gate_proj"]}
    spec = run_spec(folder_of(MIXED, tmp_path), method=method, train={"batch_size": 4})
    with pytest.raises(UsageError, match="peft applies that name") as refused:
        refuse_with_model(spec, find_facts(spec.recipe.model))
    assert "all-linear" in refused.value.fix


def test_every_so_many_layers_may_have_experts() -> None:
    from engine.architecture.facts import from_config

    sparse = from_config({**QWEN3_MOE, "num_hidden_layers": 5, "decoder_sparse_step": 2})
    assert [sparse.is_dense(layer) for layer in range(5)] == [True, False, True, False, True]
    assert from_config(QWEN3_MOE).dense_layers == ()
