"""Steps on two ranks equal steps on one, also when allocations fail on either of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from tests.distributed.faults import Fault, asked_by, differences, faulty_steps, sampled, wrong_among
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import (
    DPO,
    FULL,
    KTO,
    LADDER,
    LORA,
    ROWS,
    RankWorkbench,
    on_uneven_devices,
    planned_memory,
    small_model,
    wrong_on_uneven_devices,
)

KINDS = {
    name: {**kind, "backoff": LADDER, "tied": True}
    for name, kind in (("full", FULL), ("lora", LORA), ("dpo", DPO), ("kto", KTO), ("rows", ROWS))
}
PLANNED = ("full", "lora")
FAULTS = 8


def both_kinds(ranks: Ranks, folder: Path) -> Any:
    found = {}
    for name, tables in KINDS.items():
        work = RankWorkbench(folder, ranks, small_model(folder, tables))
        clean = work.steps()
        found[name] = (clean, sampled(work, FAULTS, seed=7))
        work.close()
    return found


def uneven_devices(ranks: Ranks, folder: Path) -> Any:
    return on_uneven_devices(ranks, folder, small_model(folder, KINDS["full"]))


def no_room_for_the_optimizer(ranks: Ranks, folder: Path) -> Any:
    """Take steps with the optimizer state on the host, in which rank 1 cannot allocate memory for the state on its
    device. Returns the faults and the results."""
    work = RankWorkbench(folder, ranks, {**small_model(folder, KINDS["full"]), "train": {"optimizer_offload": True}})
    work.steps()
    room = asked_by(work).device["optimizer"][0]
    faults = {1: Fault(room)}
    result = faulty_steps(work, faults)
    work.close()
    return [(faults, result)]


def shortage_at_start(ranks: Ranks, folder: Path) -> Any:
    """(rank, phase, remedy) of each failure that is reported if rank 1 runs out of memory while it loads the model."""
    work = RankWorkbench(folder, ranks, FULL, at_start=Fault(3) if ranks.rank == 1 else None)
    told = [(each.oom.rank, each.oom.failure.phase, each.remedy) for each in work.told]
    work.close()
    return told


def memory(ranks: Ranks, folder: Path) -> Any:
    larger = {name: small_model(folder, KINDS[name], layers=3, width=64) for name in PLANNED}
    return planned_memory(ranks, folder, {name: {**each, "train": {"batch_size": 16}} for name, each in larger.items()})


CASES = [both_kinds, uneven_devices, no_room_for_the_optimizer, shortage_at_start, memory]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, list[Any]]:
    return run_ranks(CASES, folder)


@pytest.fixture(scope="module")
def alone(folder: Path, seen: dict[str, list[Any]]) -> dict[str, Any]:
    results = {}
    for name, tables in KINDS.items():
        work = RankWorkbench(folder, SINGLE_PROCESS, small_model(folder, tables))
        results[name] = work.steps()
        work.close()
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_what_one_process_learns(kind: str, seen: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    for clean, _ in (rank[kind] for rank in seen["both_kinds"]):
        assert differences(clean, alone[kind]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stay_equal_bit_for_bit(kind: str, seen: dict[str, list[Any]]) -> None:
    (first, first_faulty), (second, second_faulty) = (rank[kind] for rank in seen["both_kinds"])
    assert torch.equal(first["weights"], second["weights"])
    for (_, here), (_, there) in zip(first_faulty, second_faulty, strict=True):
        assert torch.equal(here["weights"], there["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_allocation_on_any_rank_is_told_once_and_changes_and_leaves_nothing(
    kind: str, seen: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    assert wrong_among([rank[kind][1] for rank in seen["both_kinds"]], alone[kind]) == []


def test_a_smaller_device_on_one_rank_sets_the_budget_of_all(seen: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    assert wrong_on_uneven_devices(seen["uneven_devices"], alone["full"]) == []


def test_no_rank_takes_a_step_that_another_has_no_room_for(seen: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    assert wrong_among(seen["no_room_for_the_optimizer"], alone["full"]) == []
    assert [phase for _, phase, _ in seen["no_room_for_the_optimizer"][0][0][1]["told"]] == ["optimizer"]


def test_what_another_rank_outlived_by_itself_is_told_by_the_one_that_writes(seen: dict[str, list[Any]]) -> None:
    assert seen["shortage_at_start"] == [[(1, "load", "retry")], []]


@pytest.mark.parametrize("kind", PLANNED)
def test_each_rank_holds_what_the_plan_predicts_for_it(kind: str, seen: dict[str, list[Any]]) -> None:
    for planned, measured in (rank[kind] for rank in seen["memory"]):
        assert planned == pytest.approx(measured, rel=0.005)
