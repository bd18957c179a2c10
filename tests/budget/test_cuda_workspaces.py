"""Plans for CUDA count cuBLAS workspaces, and the scratch of attention's backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.architecture.lookup import find_architecture
from engine.budget.predict.non_torch_memory import non_torch_memory
from engine.budget.predict.prediction import predict
from engine.budget.trace.attention import scratch_per_token
from engine.config.schema.run import RunSpec
from engine.extras.simulate.step import simulate_step
from tests.budget.metered_step import QWEN2, folder_of, run_spec

MIB = 2**20
CARD = {"kind": "cuda", "memory_gib": 80.0, "compute_capability": 8.0}
WIDE_HEADS = {**QWEN2, "num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 16}
"""A model whose attention needs more memory than its feed-forward block, so that it decides the peak of a layer."""


@pytest.mark.parametrize(
    ("device", "train", "expected"),
    [
        (CARD | {"compute_capability": 9.0}, {}, 64 * MIB),
        (CARD | {"compute_capability": 12.0}, {}, 64 * MIB),
        (CARD, {}, 16 * MIB + 256 * 1024),
        (CARD, {"deterministic": True}, 64 * MIB),
        ({"kind": "metered", "memory_gib": 1.0}, {}, 0),
    ],
)
def test_the_threads_of_forward_and_backward_have_a_workspace_each(
    device: dict[str, Any], train: dict[str, Any], expected: int
) -> None:
    spec = run_spec("Qwen/Qwen2.5-7B", device, train=train)
    assert non_torch_memory(spec).workspace_bytes == expected
    assert predict(find_architecture(spec), spec, rows=1, length=512).components["workspace"] == expected


def test_scratch_has_the_kernels_width_and_a_gradient_for_each_query_head() -> None:
    accumulator, expanded = 4 * 28 * 128, 2 * 2 * 28 * 128
    assert scratch_per_token(28, 4, 128) == accumulator + 8 * 28 + expanded
    assert scratch_per_token(16, 16, 80) == 4 * 16 * 96 + 8 * 16
    assert scratch_per_token(8, 8, 160) == 4 * 8 * 192 + 8 * 8


def spec_of(folder: Path, device: dict[str, Any], **model: str) -> RunSpec:
    return run_spec(
        folder_of(WIDE_HEADS, folder), device, method={"kind": "full"}, model={"dtype": "bfloat16", **model}
    )


def test_scratch_counts_where_attention_decides(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, CARD)
    phase = predict(find_architecture(spec), spec, rows=4, length=256).phases["layer_first"]
    simulated = simulate_step(spec, rows=4, length=256).sums["layer_first"]
    assert sum(phase.values()) == pytest.approx(simulated, rel=0.01)
    assert phase["buffers"] > 4 * 256 * scratch_per_token(8, QWEN2["num_key_value_heads"], 64)


def test_scratch_is_of_lengths_rounded_up_to_whole_blocks(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, CARD)
    arch = find_architecture(spec)
    one, all_of_it = (predict(arch, spec, rows=4, length=length).phases["layer_first"] for length in (129, 256))
    assert one["buffers"] > 0.9 * all_of_it["buffers"]


@pytest.mark.parametrize(
    ("device", "model"),
    [(CARD, {"dtype": "float32"}), (CARD, {"attention": "eager"}), ({"kind": "metered", "memory_gib": 1.0}, {})],
)
def test_other_runs_have_no_scratch(tmp_path: Path, device: dict[str, Any], model: dict[str, str]) -> None:
    spec = spec_of(tmp_path, device, **model)
    phase = predict(find_architecture(spec), spec, rows=4, length=256).phases["layer_first"]
    assert phase["buffers"] < 4 * 256 * scratch_per_token(8, QWEN2["num_key_value_heads"], 64)
