"""Steps on ranks that each hold a part of the weights equal steps on one process, whatever fails on any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.parallel.ranks import ALONE, Ranks
from tests.parallel.crew import run_crew
from tests.parallel.steps import FULL, LORA, Workbench, sample_of_faults, sharded, small_model, whole_weights

CASES: dict[str, dict[str, Any]] = {
    "full, weights dropped": sharded(FULL, "parameters"),
    "full, weights kept, tied": sharded(FULL, "gradients", tied=True, gradient_checkpointing=True),
    "lora, weights dropped, tied": sharded(LORA, "parameters", tied=True, gradient_checkpointing=True),
    "lora, weights kept": sharded(LORA, "gradients"),
}
FAULTS = 6


def every_case(ranks: Ranks, folder: Path) -> Any:
    found = {}
    for number, (name, tables) in enumerate(CASES.items()):
        work = Workbench(folder, ranks, small_model(folder, tables))
        clean = work.steps() | {"weights": whole_weights(work)}
        counts = ranks.tell(work.allocations())
        faulty = []
        for faults in sample_of_faults(counts, FAULTS, seed=number):
            result = work.faulty_steps(faults)
            faulty.append((faults, result | {"weights": whole_weights(work)}))
        found[name] = (clean, faulty)
        work.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[Any]:
    return run_crew([every_case], folder)["every_case"]


@pytest.fixture(scope="module")
def alone(folder: Path, seen: list[Any]) -> dict[str, Any]:
    results = {}
    for name, tables in CASES.items():
        work = Workbench(folder, ALONE, small_model(folder, tables))
        results[name] = work.steps()
        work.close()
    return results


def same(here: dict[str, Any], there: dict[str, Any]) -> bool:
    close = torch.allclose(here["weights"], there["weights"], rtol=1e-5, atol=1e-6)
    curves = ("losses", "norms")
    return close and all(here[curve] == pytest.approx(there[curve], rel=1e-5) for curve in curves)


@pytest.mark.parametrize("case", CASES)
def test_ranks_in_shards_learn_what_one_process_learns(case: str, seen: list[Any], alone: dict[str, Any]) -> None:
    for rank in seen:
        assert same(rank[case][0], alone[case])
        assert rank[case][0]["samples"] == alone[case]["samples"]


@pytest.mark.parametrize("case", CASES)
def test_a_failed_allocation_on_any_rank_changes_nothing_that_is_learned(
    case: str, seen: list[Any], alone: dict[str, Any]
) -> None:
    for rank in seen:
        for faults, result in rank[case][1]:
            assert same(result, alone[case]), faults
            assert result["samples"] == alone[case]["samples"], faults


@pytest.mark.parametrize("case", CASES)
def test_every_failure_is_told_once_with_the_rank_it_struck(case: str, seen: list[Any]) -> None:
    for faults, result in seen[0][case][1]:
        assert {rank for rank, _, _ in result["told"]} <= faults.keys(), faults
        assert 1 <= len(result["told"]) <= len(faults), faults


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_a_failed_attempt_is_left_over(case: str, seen: list[Any]) -> None:
    for rank in seen:
        assert {result["left_bytes"] for _, result in rank[case][1]} == {0}
