"""Steps on two ranks equal steps on one, whatever fails on either of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.parallel.ranks import ALONE, Ranks
from engine.train.pricing import price
from tests.parallel.crew import run_crew
from tests.parallel.steps import FULL, LORA, Workbench, sample_of_faults, spec_of

KINDS = {"full": FULL, "lora": LORA}
FAULTS = 8


def both_kinds(ranks: Ranks, folder: Path) -> Any:
    found = {}
    for name, tables in KINDS.items():
        work = Workbench(folder, ranks, tables)
        clean = work.steps()
        counts = ranks.tell(work.allocations())
        faulty = [(faults, work.faulty_steps(faults)) for faults in sample_of_faults(counts, FAULTS, seed=7)]
        work.close()
        found[name] = (clean, faulty)
    return found


def uneven_devices(ranks: Ranks, folder: Path) -> Any:
    """Rank 1 has room for much smaller micro-batches than rank 0."""
    peaks = []
    for rows in (1, 5):
        tables = {**FULL, "train": {"micro_batch": rows}}
        work = Workbench(folder, ranks, tables)
        work.steps()
        peaks.append(work.transaction.work.peak_bytes)
        work.close()
    tight = sum(max(told) for told in zip(*ranks.tell(peaks), strict=True)) // 2
    work = Workbench(folder, ranks, tables, capacity_bytes=tight if ranks.rank == 1 else 2**30)
    result = work.steps()
    result["told"] = [(each.failed_rank, each.remedy.name) for each in work.told]
    result["budget"] = work.bench.parts.budget.as_json()
    work.close()
    return result


def planned_memory(ranks: Ranks, folder: Path) -> Any:
    """(planned, measured) peak bytes of this rank, where every sequence is as long as the longest."""
    equal = folder / "equal.jsonl"
    if ranks.is_first:
        equal.write_text('{"prompt": "abcdefgh abcdefgh", "completion": "xyzwxyzw"}\n' * 40)
    ranks.tell("written")
    found = {}
    for name, tables in KINDS.items():
        tables = {**tables, "data": {"sources": [{"name": "main", "path": str(equal)}]}, "train": {"batch_size": 16}}
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
def seen(folder: Path) -> dict[str, list[Any]]:
    return run_crew([both_kinds, uneven_devices, planned_memory], folder)


@pytest.fixture(scope="module")
def alone(folder: Path, seen: dict[str, list[Any]]) -> dict[str, Any]:
    results = {}
    for name, tables in KINDS.items():
        work = Workbench(folder, ALONE, tables)
        results[name] = work.steps()
        work.close()
    return results


def close(here: torch.Tensor, there: torch.Tensor) -> bool:
    return torch.allclose(here, there, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_what_one_process_learns(
    kind: str, seen: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    for clean, _ in (rank[kind] for rank in seen["both_kinds"]):
        assert clean["losses"] == pytest.approx(alone[kind]["losses"], rel=1e-5)
        assert clean["norms"] == pytest.approx(alone[kind]["norms"], rel=1e-5)
        assert clean["samples"] == alone[kind]["samples"]
        assert close(clean["weights"], alone[kind]["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stay_equal_bit_for_bit(kind: str, seen: dict[str, list[Any]]) -> None:
    (first, first_faulty), (second, second_faulty) = (rank[kind] for rank in seen["both_kinds"])
    assert torch.equal(first["weights"], second["weights"])
    for (_, here), (_, there) in zip(first_faulty, second_faulty, strict=True):
        assert torch.equal(here["weights"], there["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_allocation_on_any_rank_changes_nothing_that_is_learned(
    kind: str, seen: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    for rank in seen["both_kinds"]:
        for faults, result in rank[kind][1]:
            assert result["losses"] == pytest.approx(alone[kind]["losses"], rel=1e-5), faults
            assert close(result["weights"], alone[kind]["weights"]), faults
            assert result["samples"] == alone[kind]["samples"], faults


@pytest.mark.parametrize("kind", KINDS)
def test_every_failure_is_told_once_with_the_rank_it_struck(kind: str, seen: dict[str, list[Any]]) -> None:
    for faults, result in seen["both_kinds"][0][kind][1]:
        assert {rank for rank, _, _ in result["told"]} <= faults.keys(), faults
        assert 1 <= len(result["told"]) <= len(faults), faults


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_failed_attempt_is_left_over(kind: str, seen: dict[str, list[Any]]) -> None:
    for rank in seen["both_kinds"]:
        assert {result["left_bytes"] for _, result in rank[kind][1]} == {0}


def test_a_smaller_device_on_one_rank_sets_the_budget_of_all(
    seen: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    first, second = seen["uneven_devices"]
    assert first["told"] == second["told"] and {rank for rank, _ in first["told"]} == {1}
    assert first["budget"] == second["budget"]
    for result in (first, second):
        assert result["losses"] == pytest.approx(alone["full"]["losses"], rel=1e-5)
        assert close(result["weights"], alone["full"]["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_holds_what_the_plan_predicts_for_it(kind: str, seen: dict[str, list[Any]]) -> None:
    for planned, measured in (rank[kind] for rank in seen["planned_memory"]):
        assert planned == pytest.approx(measured, rel=0.005)
