"""Tests the predicted bytes of each of several devices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.architecture.lookup import find_architecture
from engine.budget.advise.plan import Plan, make_plan
from engine.budget.predict.parallel_layout import BUCKET_BYTES, bucket_bytes, layout_of, static_of_a_rank
from engine.budget.predict.prediction import cost_model, predict
from engine.budget.trace.memory_config import memory_config_of
from engine.config.schema.run import RunSpec
from tests.budget.metered_step import run_spec

H100 = {"kind": "cuda", "memory_gib": 79.2, "compute_capability": 9.0}


def spec_for(count: int, parallel: dict[str, Any], model: str = "Qwen/Qwen2.5-7B", **tables: Any) -> RunSpec:
    spec = run_spec(model, {**H100, "count": count}, **tables)
    document = json.loads(spec.model_dump_json(by_alias=True))
    document["profile"]["parallel"].update(parallel)
    return RunSpec.model_validate(document)


def plan_for(count: int, parallel: dict[str, Any], model: str = "Qwen/Qwen2.5-7B", **tables: Any) -> Plan:
    return make_plan(spec_for(count, parallel, model, **tables))


FULL: dict[str, Any] = {"method": {"kind": "full"}, "train": {"micro_batch": 1}}
SHARDED, KEPT = {"strategy": "sharded"}, {"strategy": "sharded", "shard": "gradients"}


def test_sharding_makes_a_full_fine_tuning_fit() -> None:
    assert plan_for(1, {}, "Qwen/Qwen2.5-14B", **FULL).verdict != "fits"
    assert plan_for(4, SHARDED, "Qwen/Qwen2.5-14B", **FULL).verdict == "fits"


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "full"},
        {"kind": "full", "freeze": ["model.embed_tokens", "model.layers.*.mlp"]},
        {"kind": "lora", "also_train": ["model.embed_tokens", "lm_head"]},
    ],
    ids=["full", "partly frozen", "lora"],
)
def test_each_rank_holds_an_equal_part(method: dict[str, Any]) -> None:
    """Small differences are allowed, because parts of small tensors are rounded up to blocks of 512 bytes."""
    alone, quarter = (
        plan_for(count, parallel, **{**FULL, "method": method}).prediction.phases["optimizer_step"]
        for count, parallel in ((1, {}), (4, SHARDED))
    )
    for part in ("weights", "gradients", "optimizer"):
        assert 4 * quarter[part] == pytest.approx(alone[part], rel=1e-4)


def test_keeping_gathered_weights_costs_all_of_them() -> None:
    weights = plan_for(1, {}, **FULL).prediction.phases["load"]["weights"]
    dropped, kept = (plan_for(4, parallel, **FULL).peak_bytes for parallel in (SHARDED, KEPT))
    assert 0.8 * weights < kept - dropped < 1.2 * weights


def test_replicas_add_the_buffer_they_sum_gradients_in() -> None:
    alone, replica = (
        plan_for(count, parallel, train={"micro_batch": 1, "batch_size": 16 * count}).peak_bytes
        for count, parallel in ((1, {}), (2, {"strategy": "replicated"}))
    )
    assert replica - alone == BUCKET_BYTES


def test_few_trained_values_need_a_small_bucket() -> None:
    spec = spec_for(2, {"strategy": "replicated"}, "builtin:tiny", method={"rank": 1})
    arch = find_architecture(spec)
    config, layout = memory_config_of(arch, spec), layout_of(spec.profile)
    assert bucket_bytes(arch, config, layout) == static_of_a_rank(arch, config, layout).gradients < BUCKET_BYTES


def test_ranks_share_the_batch_and_neighbours_in_a_sequence_share_that() -> None:
    assert plan_for(4, SHARDED, train={"micro_batch": 2, "batch_size": 16}).accumulation == 2
    pairs = plan_for(4, {**SHARDED, "sequence": 2}, train={"micro_batch": 2, "batch_size": 16})
    assert pairs.accumulation == 4


ALL = {"gradient_checkpointing": True}


def test_parts_of_a_sequence_hold_parts_of_its_activations() -> None:
    whole, halves = (
        plan_for(4, {**SHARDED, "sequence": sequence}, train={"micro_batch": 1, **ALL}).prediction
        for sequence in (1, 2)
    )
    saved = [prediction.phases["layer_first"]["activations"] for prediction in (whole, halves)]
    assert saved[0] == pytest.approx(2 * saved[1], rel=0.01)


@pytest.mark.parametrize("parallel", [SHARDED, KEPT, {"strategy": "replicated"}], ids=str)
def test_the_cost_of_a_micro_batch_is_the_predicted_peak(parallel: dict[str, Any]) -> None:
    spec = spec_for(4, parallel, train={"batch_size": 64})
    arch = find_architecture(spec)
    cost = cost_model(arch, spec)
    assert cost.static_bytes + cost.bytes(2, 2048) == predict(arch, spec, rows=2, length=2048).peak_bytes


def test_a_plan_for_several_devices_says_that_it_is_a_prediction() -> None:
    assert plan_for(4, SHARDED).as_json()["predicted_only"] is True
    assert plan_for(1, {}).as_json()["predicted_only"] is False


def plan_over(machines: int, parallel: dict[str, Any], **tables: Any) -> Plan:
    spec = spec_for(4, parallel, **tables)
    nodes = spec.profile.nodes.model_copy(update={"count": machines})
    return make_plan(spec.model_copy(update={"profile": spec.profile.model_copy(update={"nodes": nodes})}))


def test_what_crosses_the_network_is_a_share_of_weights_and_gradients() -> None:
    """Each machine has to receive what it does not hold. `tests/distributed/test_sharded_steps.py` compares the totals
    with the buffers of real collectives."""
    elements = 7_615_616_512
    ends = 2 * 152_064 * 3584  # embedding and head, which are gathered once
    batch = {"micro_batch": 1, "batch_size": 32}
    assert plan_over(1, SHARDED, **FULL).as_json()["network"] is None
    for machines in (2, 4):
        share = (machines - 1) / machines
        plan = plan_over(machines, SHARDED, method={"kind": "full"}, train=batch)
        found = plan.as_json()["network"]
        weights, gradients = 2 * (2 * elements - ends) * share, 4 * elements * share
        assert found["machines"] == machines and plan.accumulation == 8 // machines
        assert found["weights_bytes_per_micro_batch"] == pytest.approx(weights, rel=1e-3)
        assert found["gradients_bytes_per_micro_batch"] == pytest.approx(gradients, rel=1e-3)
        assert found["bytes_per_step"] == pytest.approx(plan.accumulation * (weights + gradients), rel=1e-3)
        kept = plan_over(machines, KEPT, method={"kind": "full"}, train=batch).as_json()["network"]
        assert kept["weights_bytes_per_micro_batch"] == pytest.approx(2 * elements * share, rel=1e-3)
        whole = plan_over(machines, {"strategy": "replicated"}, method={"kind": "full"}, train=batch).as_json()
        assert whole["network"]["weights_bytes_per_micro_batch"] == 0
        assert whole["network"]["bytes_per_step"] == pytest.approx(2 * gradients, rel=1e-3)
