"""Vision-language models: the closed form against the engine's own step on the metered device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.budget.lookup import find_architecture
from engine.budget.predict import predict
from tests.budget.metered import WITH_TOWER, folder_of, measured_step, run_spec

LORA: dict[str, Any] = {"rank": 8}
FULL: dict[str, Any] = {"kind": "full"}
SAVING, KEEPING = {"gradient_checkpointing": True}, {"gradient_checkpointing": False}


@pytest.mark.parametrize("family", WITH_TOWER)
@pytest.mark.parametrize(
    ("method", "train", "data"),
    [(LORA, SAVING, {}), (FULL, SAVING, {}), (LORA, KEEPING, {"packing": True})],
    ids=("lora", "full", "packed"),
)
def test_the_peak_of_training_on_text_is_predicted(
    family: str, method: dict[str, Any], train: dict[str, Any], data: dict[str, Any], tmp_path: Path
) -> None:
    spec = run_spec(
        folder_of(WITH_TOWER[family], tmp_path),
        method=method, train={**train, "batch_size": 2}, model={"dtype": "bfloat16"}, data={"max_length": 256, **data},
    )
    static_bytes, peak_bytes = measured_step(spec, 2, 200)
    predicted = predict(find_architecture(spec), spec, rows=2, length=200)
    assert sum(predicted.phases["load"].values()) <= static_bytes
    assert -0.005 <= predicted.peak_bytes / peak_bytes - 1 <= 0.01
