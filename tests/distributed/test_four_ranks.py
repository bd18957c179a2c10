"""Four ranks learn what one process learns with every strategy, and use the memory that the plan predicts for each."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.distributed.ranks import Ranks
from tests.distributed.faults import Fault, differences, faulty_steps, wrong_among
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import FULL, LORA, NEEDS_SHARDS, RankWorkbench, planned_memory, small_model
from tests.distributed.test_rank_faults import SHARING, Cell, alone

pytestmark = NEEDS_SHARDS

RANKS = 4
KINDS = {"full": FULL, "lora": LORA}
DIAGONAL = [Cell("full", checkpointing=True, several=True), Cell("lora", checkpointing=False, several=False)]
"""Both of everything."""
SINGLE = DIAGONAL[0]
MEASURED = ("replicated", "weights in shards", "gradients in shards")
"""What ranks that share sequences hold is in `tests.distributed.test_sequence`."""


def clean_steps(ranks: Ranks, folder: Path) -> Any:
    """Take steps without a fault; returns the results for each strategy and kind of training."""
    found = {}
    for sharing, cell in product(SHARING, DIAGONAL):
        work = RankWorkbench(folder, ranks, cell.tables(folder, sharing))
        found[sharing, cell] = work.steps()
        work.close()
    return found


def one_after_another(ranks: Ranks, folder: Path) -> Any:
    """Take steps in shards in which each rank in turn runs out of memory, with micro-batches of one sequence, so that
    hardly anything can be made smaller. Only shards are tested, where the failure of one rank ends the attempt of all.
    Returns the faults and the results."""
    tables = SINGLE.tables(folder, "weights in shards")
    train, backoff = {**tables["train"], "micro_batch": 1}, {"ladder": ["retry", "cut"]}
    work = RankWorkbench(folder, ranks, {**tables, "train": train, "backoff": backoff})
    faults = {rank: Fault(20 * (rank + 1)) for rank in range(RANKS)}
    result = faulty_steps(work, faults)
    work.close()
    return faults, result


def memory(ranks: Ranks, folder: Path) -> Any:
    cases = {}
    for sharing, cell in product(MEASURED, DIAGONAL):
        tables = small_model(folder, {**KINDS[cell.kind], "tied": cell.kind == "lora"}, layers=3, width=64)
        train = {"batch_size": 16, "gradient_checkpointing": cell.checkpointing}
        cases[sharing, cell] = {**tables, "parallel": SHARING[sharing], "train": train}
    return planned_memory(ranks, folder, cases)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, list[Any]]:
    return run_ranks([clean_steps, one_after_another, memory], folder, size=RANKS)


def test_four_ranks_learn_what_one_process_learns(seen: dict[str, list[Any]], folder: Path) -> None:
    expected = alone(folder, {cell: cell.tables(folder, "replicated") for cell in DIAGONAL})
    for rank in seen["clean_steps"]:
        assert [(sharing, cell) for (sharing, cell), found in rank.items() if differences(found, expected[cell])] == []


def test_each_of_four_ranks_may_run_out_of_memory_in_one_step(seen: dict[str, list[Any]], folder: Path) -> None:
    expected = alone(folder, {SINGLE: SINGLE.tables(folder, "replicated")})[SINGLE]
    tried = [[each] for each in seen["one_after_another"]]
    assert wrong_among(tried, expected) == []
    assert sorted(rank for rank, _, _ in tried[0][0][1]["told"]) == list(range(RANKS))


@pytest.mark.parametrize("sharing", MEASURED)
def test_each_of_four_ranks_holds_what_the_plan_predicts_for_it(sharing: str, seen: dict[str, list[Any]]) -> None:
    for planned, measured in (rank[sharing, cell] for rank in seen["memory"] for cell in DIAGONAL):
        assert planned == pytest.approx(measured, rel=0.005)
