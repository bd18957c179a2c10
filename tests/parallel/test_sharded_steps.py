"""Steps on ranks that each hold a part of the weights equal steps on one process, whatever fails on any of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.parallel.ranks import ALONE, Ranks
from engine.train.pricing import price
from tests.parallel.crew import run_crew
from tests.parallel.steps import (
    FULL,
    LORA,
    Workbench,
    sample_of_faults,
    sharded,
    small_model,
    spec_of,
    whole_weights,
)

CASES: dict[str, dict[str, Any]] = {
    "full, weights dropped": sharded(FULL, "parameters"),
    "full, weights kept, tied": sharded(FULL, "gradients", tied=True, gradient_checkpointing=True),
    "lora, weights dropped, tied": sharded(LORA, "parameters", tied=True, gradient_checkpointing=True),
    "lora, weights kept": sharded(LORA, "gradients"),
}
FAULTS = 4


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


def uneven_devices(ranks: Ranks, folder: Path) -> Any:
    """Rank 1 has room for much smaller micro-batches than rank 0."""
    peaks = []
    for rows in (1, 5):
        tables = {**CASES["full, weights dropped"], "train": {"micro_batch": rows}}
        work = Workbench(folder, ranks, small_model(folder, tables))
        work.steps()
        peaks.append(work.transaction.work.peak_bytes)
        work.close()
    tight = sum(max(told) for told in zip(*ranks.tell(peaks), strict=True)) // 2
    capacity = tight if ranks.rank == 1 else 2**30
    work = Workbench(folder, ranks, small_model(folder, tables), capacity_bytes=capacity)
    result = work.steps() | {"weights": whole_weights(work)}
    result |= {"told": [each.failed_rank for each in work.told], "budget": work.bench.parts.budget.as_json()}
    work.close()
    return result


def planned_memory(ranks: Ranks, folder: Path) -> Any:
    """(planned, measured) peak bytes of this rank, where sequences are equally long and nearly every token a target."""
    equal = folder / "equal.jsonl"
    if ranks.is_first:
        equal.write_text('{"prompt": "a", "completion": "abcdefgh abcdefgh xyzwxyzw xyzw"}\n' * 40)
    ranks.tell("written")
    found = {}
    for name, tables in CASES.items():
        tables = small_model(folder, tables, layers=3, width=64)
        tables |= {"data": {"sources": [{"name": "main", "path": str(equal)}]}}
        tables["train"] = {**tables["train"], "batch_size": 8}
        work = Workbench(folder, ranks, tables)
        longest = int(work.bench.parts.data.lengths.max())
        plan = price(spec_of(folder, ranks.size, tables), longest).plan
        assert plan is not None
        work.steps()
        found[name] = plan.peak_bytes, work.transaction.work.peak_bytes
        work.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def crew(folder: Path) -> dict[str, list[Any]]:
    return run_crew([every_case, uneven_devices, planned_memory], folder)


@pytest.fixture(scope="module")
def seen(crew: dict[str, list[Any]]) -> list[Any]:
    return crew["every_case"]


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


def test_a_smaller_device_on_one_rank_sets_the_budget_of_all(
    crew: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    first, second = crew["uneven_devices"]
    assert set(first["told"]) == set(second["told"]) == {1}
    assert first["budget"] == second["budget"]
    for result in (first, second):
        assert same(result, alone["full, weights dropped"])


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_the_plan_predicts_for_it(case: str, crew: dict[str, list[Any]]) -> None:
    """A buffer that gloo's own thread has not let go of yet may come on top: the lower of two ranks counts."""
    planned, measured = zip(*(rank[case] for rank in crew["planned_memory"]), strict=True)
    assert planned[0] == planned[1] == pytest.approx(min(measured), rel=0.02)


TORTURE_FAULTS = 60
"""For each case and number of ranks."""


def tortured(ranks: Ranks, folder: Path) -> Any:
    """Every case under many faults: those of one rank, of another, and of several at once."""
    found = {}
    for number, (name, tables) in enumerate(CASES.items()):
        work = Workbench(folder, ranks, small_model(folder, tables))
        clean = work.steps() | {"weights": whole_weights(work)}
        wrong, phases = [], Counter[str]()
        for faults in sample_of_faults(ranks.tell(work.allocations()), TORTURE_FAULTS, seed=100 + number):
            result = work.faulty_steps(faults)
            result["weights"] = whole_weights(work)
            phases.update(phase for _, phase, _ in result["told"])
            if not (same(result, clean) and result["left_bytes"] == 0 and 1 <= len(result["told"]) <= len(faults)):
                wrong.append((faults, result["told"], result["left_bytes"]))
        found[name] = wrong, phases
        work.close()
    return found


@pytest.mark.torture
@pytest.mark.parametrize("size", [2, 4])
def test_no_fault_among_many_changes_what_is_learned_or_leaves_anything(
    size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_crew([tortured], tmp_path, size=size)["tortured"]
    phases = sum((each for _, each in results[0].values()), Counter[str]())
    with capsys.disabled():
        sys.stdout.write(f"\n{size} ranks in shards: {TORTURE_FAULTS * len(CASES)} faults tried, {dict(phases)}\n")
    assert {"forward", "backward", "clip"} <= phases.keys()
    assert [wrong for result in results for wrong, _ in result.values() if wrong] == []
