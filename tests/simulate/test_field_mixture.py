"""The largest stage of the recipe expert-merge: its simulated memory is what the parameters of its config take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.architecture.lookup import find_config
from engine.budget.advise.staged_plan import planning_specs, with_model
from engine.config.load import resolve
from engine.extras.simulate.step import simulate_step

GIB = 2**30

BYTES_A_WEIGHT = 2 + 2 + 8
"""A bf16 weight, the 16 bits that rounding drops (`train.rounding = "exact"`), two fp32 moments; 2 more are the
gradient. With `rounding = "nearest"` and `state_dtype = "bfloat16"`, as in torch's own AdamW on bf16 weights, they are
8 with the gradient instead of 14, and the stage's peak is 30.1 instead of 51.7 GiB."""


def parameters(config: dict[str, int]) -> int:
    """The number of parameters of a Qwen2-MoE with tied embeddings, counted from its config alone."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    keys = config["num_key_value_heads"] * hidden // heads
    attention = 2 * hidden * hidden + 2 * hidden * keys + hidden + 2 * keys  # biases of query, keys and values
    experts = config["num_experts"] * (3 * hidden * config["moe_intermediate_size"] + hidden)  # with their router rows
    shared = 3 * hidden * config["shared_expert_intermediate_size"] + hidden  # with its gate
    norms = 2 * hidden
    layers = config["num_hidden_layers"] * (attention + experts + shared + norms)
    return config["vocab_size"] * hidden + layers + hidden


def test_the_last_stage_of_expert_merge_takes_what_is_counted_from_its_config(tmp_path: Path) -> None:
    """Simulated with 2 of its 28 layers. At its peak, gradients reach the embeddings: beside weights, gradients and
    state there are three tensors of their size (the head's gradient, theirs, the sum of both)."""
    full = planning_specs(resolve("80gb", "expert-merge").spec)[-1]
    config = find_config(full.recipe.model.id, None)
    embeddings = 2 * config["vocab_size"] * config["hidden_size"]
    count = parameters(config)
    assert count == 3_864_253_952
    assert ((BYTES_A_WEIGHT + 2) * count + 3 * embeddings) / GIB == pytest.approx(51.69, rel=1e-3)
    shallow = {**config, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shallow), "utf-8")
    found = simulate_step(with_model(full, {"id": str(tmp_path)}), rows=1, length=512)
    assert found.static_bytes == pytest.approx(BYTES_A_WEIGHT * parameters(shallow), rel=1e-4)
    assert found.components["gradients"] == 2 * parameters(shallow)
    assert found.deciding_phase == "embedding_backward"
    assert found.peak_bytes == pytest.approx((BYTES_A_WEIGHT + 2) * parameters(shallow) + 3 * embeddings, rel=1e-3)
