"""Compares the simulation with real steps on the CPU, whose allocations torch's profiler records; no metered device is
involved.

The steps are in fp32, in which the CPU computes as a card does. The profiler also sees memory that an operation
allocates and frees internally, which the simulation does not count; at the peaks tested here there is none.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.extras.simulate.step import simulate_step
from tests.budget.metered_step import GEMMA2, LLAMA, MIXTRAL, PHI3, QWEN2, QWEN3, folder_of, loaded_step, run_spec
from tests.device.test_conformance import Allocator

CPU = {"kind": "cpu", "memory_gib": 4.0}
LORA: dict[str, Any] = {"rank": 8}
FULL: dict[str, Any] = {"kind": "full"}
SAVING, KEEPING = {"gradient_checkpointing": True}, {"gradient_checkpointing": False}
ROWS, LENGTH, MICRO_BATCHES = 2, 128, 2


@pytest.mark.parametrize(
    ("config", "method", "train"),
    [
        (QWEN2, LORA, SAVING),
        (QWEN2, LORA, KEEPING),
        (QWEN2, FULL, {**KEEPING, "loss": "plain"}),
        (QWEN3, {**LORA, "dora": True}, SAVING),
        (LLAMA, FULL, SAVING),
        (GEMMA2, FULL, SAVING),
        (PHI3, FULL, {**SAVING, "optimizer": "sgd"}),
        (MIXTRAL, LORA, KEEPING),
    ],
    ids=lambda value: value.get("model_type") or "-".join(map(str, value.values())),
)
def test_it_holds_what_the_allocator_was_asked_for(
    config: dict[str, Any], method: dict[str, Any], train: dict[str, Any], tmp_path: Path
) -> None:
    tables = {"method": method, "model": {"dtype": "float32"}, "train": {**train, "batch_size": ROWS * MICRO_BATCHES}}
    spec = run_spec(folder_of(config, tmp_path), CPU, **tables)
    simulated = simulate_step(spec, rows=ROWS, length=LENGTH)
    with loaded_step(spec) as bench:
        bench.step(ROWS, LENGTH, MICRO_BATCHES)  # warm: what is made once is no part of the comparison
        gc.collect()
        seen = Allocator(lambda: bench.step(ROWS, LENGTH, MICRO_BATCHES))
    assert seen.balance_bytes == 0
    # A checkpoint notes the state of the host's random numbers, which is in host memory whatever the device.
    noted_bytes = config["num_hidden_layers"] * torch.get_rng_state().nbytes * train["gradient_checkpointing"]
    assert simulated.peak_bytes - simulated.static_bytes == pytest.approx(seen.peak_bytes - noted_bytes, rel=1e-3)
