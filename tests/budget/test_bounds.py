"""A kind of layers that never decides, as a rule, is bounded instead of walked: the table must not show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.budget.growth import dearest, shape_of
from engine.budget.lookup import find_architecture
from engine.budget.predict import predict
from engine.budget.setting import setting_of
from engine.budget.step import step_cost
from tests.budget.metered import GEMMA3, QWEN2, folder_of, measured_step, run_spec


@pytest.mark.parametrize("config", [QWEN2, GEMMA3], ids=lambda config: config["model_type"])
@pytest.mark.parametrize(("rows", "length"), [(1, 2), (1, 40), (2, 130), (4, 400)])
def test_the_row_of_every_phase_is_that_of_exact_alternatives(
    config: dict[str, Any], rows: int, length: int, tmp_path: Path
) -> None:
    train = {"gradient_checkpointing": True, "batch_size": rows}
    spec = run_spec(folder_of(config, tmp_path), method={"rank": 64}, data={"max_length": 512}, train=train)
    arch = find_architecture(spec)
    setting = setting_of(arch, spec)
    shape = shape_of(rows, length, setting.chunk_tokens)
    phases = step_cost(arch, setting, False)
    assert any(cost.closer for costs in phases.values() for cost in costs)
    for costs in phases.values():
        assert dearest(costs, shape)[0] == max(cost.exact().at(shape) for cost in costs)
        assert all(cost.exact().at(shape) <= cost.at(shape) for cost in costs)


def test_a_first_layer_with_large_adapters_and_few_tokens_is_what_the_metered_device_counts(tmp_path: Path) -> None:
    train = {"gradient_checkpointing": True, "batch_size": 1}
    spec = run_spec(folder_of(QWEN2, tmp_path), method={"rank": 512}, model={"dtype": "bfloat16"}, train=train)
    predicted = predict(find_architecture(spec), spec, rows=1, length=6).peak_bytes
    assert predicted == pytest.approx(measured_step(spec, 1, 6)[1], rel=0.005)
