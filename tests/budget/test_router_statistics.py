"""The memory of the router statistics and of the auxiliary loss of mixtures is predicted: with many experts, the router
logits are large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.architecture.facts import from_config
from engine.architecture.lookup import find_architecture
from engine.budget.predict.prediction import predict
from engine.budget.predict.step import router_statistics
from engine.budget.trace.memory_config import memory_config_of
from tests.budget.metered_step import QWEN3_MOE, folder_of, measured_step, run_spec

pytestmark = pytest.mark.usefixtures("quick_half_products")

MANY: dict[str, Any] = {
    **QWEN3_MOE, "num_experts": 256, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 6,
}  # fmt: skip
NEITHER = {"watch_experts": False, "aux_loss_weight": 0.0}
WATCHED = {"aux_loss_weight": 0.0}
BALANCED = {"freeze_router": False}


def plan_and_measurement(folder: Path, moe: dict[str, Any], *, checkpointing: bool) -> tuple[int, int]:
    train = {"batch_size": 2, "gradient_checkpointing": checkpointing}
    spec = run_spec(folder_of(MANY, folder), model={"dtype": "bfloat16"}, moe=moe, train=train)
    predicted = predict(find_architecture(spec), spec, rows=2, length=400).peak_bytes
    return predicted, measured_step(spec, 2, 400)[1]


@pytest.mark.parametrize("moe", [NEITHER, WATCHED, BALANCED], ids=["neither", "watched", "balanced"])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputed", "kept"])
def test_the_peak_is_predicted(tmp_path: Path, moe: dict[str, Any], checkpointing: bool) -> None:
    predicted, measured = plan_and_measurement(tmp_path, moe, checkpointing=checkpointing)
    assert -0.005 <= predicted / measured - 1 <= 0.02


def test_the_auxiliary_loss_keeps_six_bytes_a_token_expert_and_layer(tmp_path: Path) -> None:
    spec = run_spec(folder_of(MANY, tmp_path), model={"dtype": "bfloat16"}, moe=BALANCED)
    arch = find_architecture(spec)
    found = router_statistics(arch, memory_config_of(arch, spec))
    assert sum(found.logits) + sum(found.probabilities) == 6 * (2 + 4) * 256


def test_layers_without_experts_and_frozen_routers_keep_nothing(tmp_path: Path) -> None:
    arch = from_config({**MANY, "mlp_only_layers": [0, 1, 2]})
    for moe, logits, probabilities in ((BALANCED, 3, 3), ({}, 3, 0), (NEITHER, 0, 0), ({"aux_loss_weight": 0.1}, 3, 3)):
        spec = run_spec(folder_of(MANY, tmp_path), model={"dtype": "bfloat16"}, moe=moe)
        found = router_statistics(arch, memory_config_of(arch, spec))
        kept = sum(map(bool, found.probabilities)) if found.balances else 0
        assert (sum(map(bool, found.logits)), kept) == (logits, probabilities)
