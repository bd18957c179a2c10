"""Steps on ranks that each hold a part of the weights equal steps on one process, also when allocations fail on any of
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.model.liger import using
from tests.distributed.faults import differences, sampled, wrong_among
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import (
    FULL,
    LORA,
    NEEDS_SHARDS,
    RankWorkbench,
    exchanged_in_micro_batch,
    on_uneven_devices,
    planned_memory,
    sharded,
    small_model,
    wrong_on_uneven_devices,
)
from tests.model.torch_kernels import TorchKernels, with_fused_modules

pytestmark = NEEDS_SHARDS

CASES: dict[str, dict[str, Any]] = {
    "full, weights dropped": sharded(FULL, "parameters"),
    "full, weights kept, tied": sharded(FULL, "gradients", tied=True, gradient_checkpointing=True),
    "lora, weights dropped, tied": sharded(LORA, "parameters", tied=True, gradient_checkpointing=True),
    "lora, weights kept": sharded(LORA, "gradients"),
}
FAULTS = 4
PRECISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16, fp32 adapters": ("bfloat16", sharded(LORA, "parameters")),
    "bf16, fp32 adapters, an embedding learns in bf16": (
        "bfloat16", sharded({"method": {**LORA["method"], "also_train": ["model.embed_tokens"]}}, "gradients")
    ),
    "bf16, full": ("bfloat16", sharded(FULL, "parameters", gradient_checkpointing=True)),
    "fp32 weights under fp16 autocast": ("float16", sharded(FULL, "gradients")),
}  # fmt: skip
"""Name = the recipe's dtype, and tables."""
ROUNDING = {"bfloat16": 2e-2, "float16": 4e-3}
"""What another split may move loss and gradient by: a few units in the last place, of 8 and 11 bits."""


def every_case(ranks: Ranks, folder: Path) -> Any:
    found = {}
    for number, (name, tables) in enumerate(CASES.items()):
        work = RankWorkbench(folder, ranks, small_model(folder, tables))
        clean = work.steps()
        found[name] = (clean, sampled(work, FAULTS, seed=number))
        work.close()
    return found


def fused(ranks: Ranks, folder: Path) -> Any:
    found = {}
    for name, tables in CASES.items():
        work = RankWorkbench(folder, ranks, small_model(folder, tables))
        modules = with_fused_modules(work.setup)
        with using(kernels := TorchKernels()):
            found[name] = work.steps()
        assert kernels.norms > 0
        modules.remove()
        work.close()
    return found


def precisions(ranks: Ranks, folder: Path) -> Any:
    """Take steps in mixed precision; returns their results and the dtypes of the trainable parameters."""
    found = {}
    for name, (dtype, tables) in PRECISIONS.items():
        tables = small_model(folder, tables)
        work = RankWorkbench(folder, ranks, {**tables, "model": {**tables["model"], "dtype": dtype}})
        dtypes = [parameter.dtype for parameter in work.setup.context.strategy.parameters]
        found[name] = work.steps() | {"dtypes": dtypes}
        work.close()
    return found


def uneven_devices(ranks: Ranks, folder: Path) -> Any:
    return on_uneven_devices(ranks, folder, small_model(folder, CASES["full, weights dropped"]))


def memory(ranks: Ranks, folder: Path) -> Any:
    larger = {name: small_model(folder, tables, layers=3, width=64) for name, tables in CASES.items()}
    cases = {name: {**tables, "train": {**tables["train"], "batch_size": 8}} for name, tables in larger.items()}
    return planned_memory(ranks, folder, cases)


def exchanged(ranks: Ranks, folder: Path) -> Any:
    larger = {name: small_model(folder, tables, layers=3, width=64) for name, tables in CASES.items()}
    return {name: exchanged_in_micro_batch(ranks, folder, tables) for name, tables in larger.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def crew(folder: Path) -> dict[str, list[Any]]:
    return run_ranks([every_case, fused, precisions, uneven_devices, memory, exchanged], folder)


@pytest.fixture(scope="module")
def seen(crew: dict[str, list[Any]]) -> list[Any]:
    return crew["every_case"]


@pytest.fixture(scope="module")
def alone(folder: Path, seen: list[Any]) -> dict[str, Any]:
    results = {}
    for name, tables in CASES.items():
        work = RankWorkbench(folder, SINGLE_PROCESS, small_model(folder, tables))
        results[name] = work.steps()
        work.close()
    return results


@pytest.mark.parametrize("case", CASES)
def test_ranks_in_shards_learn_what_one_process_learns(case: str, seen: list[Any], alone: dict[str, Any]) -> None:
    for rank in seen:
        assert differences(rank[case][0], alone[case]) == []


@pytest.mark.parametrize("case", CASES)
def test_fused_modules_get_their_gathered_weights(case: str, crew: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    for rank in crew["fused"]:
        assert differences(rank[case], alone[case]) == []


def test_mixed_precision_in_shards_is_that_of_one_process(folder: Path, crew: dict[str, list[Any]]) -> None:
    alone = precisions(SINGLE_PROCESS, folder)
    for rank in crew["precisions"]:
        for name, found in rank.items():
            expected, tolerance = alone[name], ROUNDING[PRECISIONS[name][0]]
            assert found["dtypes"] == expected["dtypes"]
            assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance), name
            for here, there in zip(found["gradients"], expected["gradients"], strict=True):
                assert float((here - there).norm() / there.norm()) < tolerance, name


@pytest.mark.parametrize("case", CASES)
def test_a_failed_allocation_on_any_rank_is_told_once_and_changes_and_leaves_nothing(
    case: str, seen: list[Any], alone: dict[str, Any]
) -> None:
    assert wrong_among([rank[case][1] for rank in seen], alone[case]) == []


def test_a_smaller_device_on_one_rank_sets_the_budget_of_all(crew: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    assert wrong_on_uneven_devices(crew["uneven_devices"], alone["full, weights dropped"]) == []


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_the_plan_predicts_for_it(case: str, crew: dict[str, list[Any]]) -> None:
    for planned, measured in (rank[case] for rank in crew["memory"]):
        assert planned == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("case", CASES)
def test_a_micro_batch_exchanges_what_the_plan_says(case: str, crew: dict[str, list[Any]]) -> None:
    for planned, measured in (rank[case] for rank in crew["exchanged"]):
        assert measured == pytest.approx(planned, rel=0.01)
