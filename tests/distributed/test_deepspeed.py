"""Steps of ranks that share a model through DeepSpeed equal steps of one process.

Real where deepspeed is installed (its CPU accelerator, gloo), left out elsewhere. What it does not do, and how a run is
refused without it, is tested in test_deepspeed_refusals.py everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.distributed.ranks import ALONE, Ranks
from engine.errors import DivergedError
from tests.distributed.crew import run_crew
from tests.distributed.zero_cases import CASES, Zerobench, deepspeed, needs_deepspeed

pytestmark = needs_deepspeed

UNEVEN = "uneven"
"""Seven sequences: one rank has three micro-batches, the other two and one that counts for nothing."""

TABLES = {**CASES, UNEVEN: deepspeed({"method": {"kind": "full"}}, "parameters", micro_batch=1, batch_size=7)}


def every_case(ranks: Ranks, folder: Path) -> Any:
    found = {}
    for name, tables in TABLES.items():
        bench = Zerobench(folder, ranks, tables)
        found[name] = bench.steps()
        bench.close()
    return found


def broken_loss(ranks: Ranks, folder: Path) -> Any:
    """What is raised when the head's weights are no numbers, and whether the embedding moved."""
    bench = Zerobench(folder, ranks, CASES["full, ZeRO-2"])
    parts = bench.bench.parts
    named = dict(parts.loaded.trainable())
    with torch.no_grad():
        next(weight for name, weight in named.items() if name.endswith("norm.weight")).fill_(float("nan"))
    before = {name: weight.detach().clone() for name, weight in named.items()}
    try:
        bench.transaction.run(1, bench.bench.order.step(1))
    except DivergedError as error:
        kept = {name: torch.equal(weight.nan_to_num(), before[name].nan_to_num()) for name, weight in named.items()}
        return type(error).__name__, [name for name, same in kept.items() if not same]
    finally:
        bench.close()
    return None, []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def crew(folder: Path) -> dict[str, list[Any]]:
    return run_crew([every_case, broken_loss], folder)


@pytest.fixture(scope="module")
def alone(folder: Path, crew: dict[str, list[Any]]) -> dict[str, Any]:
    results = {}
    for name, tables in TABLES.items():
        bench = Zerobench(folder, ALONE, tables)
        results[name] = bench.steps()
        bench.close()
    return results


@pytest.mark.parametrize("name", TABLES)
def test_losses_norms_and_weights_are_those_of_one_process(
    name: str, crew: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    first, second = (rank[name] for rank in crew["every_case"])
    for curve in ("losses", "norms"):
        assert first[curve] == second[curve]
        assert first[curve] == pytest.approx(alone[name][curve], rel=1e-5)
    torch.testing.assert_close(first["weights"], alone[name]["weights"], rtol=1e-5, atol=1e-6)


def test_gradients_were_clipped(crew: dict[str, list[Any]]) -> None:
    """So that the clipping of DeepSpeed is held to ours."""
    assert all(norm > 0.5 for norm in crew["every_case"][0]["full, ZeRO-2"]["norms"])


def test_a_rank_with_fewer_micro_batches_keeps_the_other_company(crew: dict[str, list[Any]]) -> None:
    assert all(sorted(counts) == [2, 3] for counts in crew["every_case"][0][UNEVEN]["micro_batches"])


def test_a_loss_that_is_no_number_moves_nothing(crew: dict[str, list[Any]]) -> None:
    assert crew["broken_loss"] == [("DivergedError", []), ("DivergedError", [])]
