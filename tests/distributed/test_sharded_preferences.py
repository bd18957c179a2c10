"""Preferences on ranks that each hold a part of the weights: what is learned and scored is that of one process, also
when allocations fail on any rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.evaluate.scores import evaluate, sequence_log_probabilities
from engine.model.decoder import eval_mode
from engine.train.run.preferences import evaluation_context
from engine.train.strategy.evaluation import gather_results
from tests.distributed.faults import differences, sampled, wrong_among
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import DPO, KTO, NEEDS_SHARDS, RankWorkbench, sharded, small_model

pytestmark = NEEDS_SHARDS

CASES: dict[str, dict[str, Any]] = {
    "dpo": sharded(DPO, "parameters"),
    "dpo in full, a sequence at a time": sharded(
        {"method": {"kind": "full", "objective": "dpo"}}, "gradients", micro_batch=1, batch_size=4
    ),
    "kto": sharded(KTO, "parameters", tied=True),
}
FAULTS = 2
MANY = 5_000
"""Values of a stored reference: more than fit into one exchange between ranks."""


def stored_values(ranks: Ranks, _folder: Path) -> Any:
    """What each rank gets of the values that rank 0 has computed."""
    return gather_results(ranks, many_values() if ranks.is_rank0 else [])[0]


def many_values() -> list[float]:
    return [float(value) for value in np.random.default_rng(0).normal(size=MANY)]


def every_case(ranks: Ranks, folder: Path) -> Any:
    found = {}
    for number, (name, tables) in enumerate(CASES.items()):
        work = RankWorkbench(folder, ranks, small_model(folder, tables))
        clean = work.steps()
        scores = held_out(work)
        found[name] = (clean, sampled(work, FAULTS, seed=number), scores)
        work.close()
    return found


def held_out(work: RankWorkbench) -> dict[str, float]:
    """The scores of the data after the steps."""
    step = work.setup.context
    context = replace(
        evaluation_context(work.setup), preference=work.spec.recipe.preference, references=step.references
    )
    joined = step.strategy.join_evaluation(context, step.data)

    def scores() -> dict[str, float]:
        found = evaluate(joined, step.data, ["loss"], limit=7, samples=0).metrics
        if step.data.mismatched is not None:
            with eval_mode(step.loaded.model):
                values, _ = sequence_log_probabilities(joined, step.data.mismatched, np.arange(7))
            found |= {"mismatched": float(values.sum())}
        return found

    found: dict[str, float] = work.ranks.run_on_rank0(scores)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preferences")


@pytest.fixture(scope="module")
def on_ranks(folder: Path) -> dict[str, list[Any]]:
    return run_ranks([stored_values, every_case], folder)


@pytest.fixture(scope="module")
def seen(on_ranks: dict[str, list[Any]]) -> list[Any]:
    return on_ranks["every_case"]


@pytest.fixture(scope="module")
def alone(folder: Path, seen: list[Any]) -> dict[str, Any]:
    results = {}
    for name, tables in CASES.items():
        work = RankWorkbench(folder, SINGLE_PROCESS, small_model(folder, tables))
        results[name] = {**work.steps(), "scores": held_out(work)}
        work.close()
    return results


@pytest.mark.parametrize("case", CASES)
def test_ranks_in_shards_learn_what_one_process_learns(case: str, seen: list[Any], alone: dict[str, Any]) -> None:
    """Here a pair that does not fit passes through the model on one rank, and the others run as many passes."""
    for rank in seen:
        assert differences(rank[case][0], alone[case]) == []


@pytest.mark.parametrize("case", CASES)
def test_ranks_score_what_one_process_scores(case: str, seen: list[Any], alone: dict[str, Any]) -> None:
    """With kto also the sequences beside the data, from which the divergence is estimated."""
    scores = alone[case]["scores"]
    assert seen[0][case][2] == pytest.approx(scores, rel=1e-4, abs=1e-5)
    assert scores.keys() >= {"loss", "rewards_margin"} and ("mismatched" in scores) == (case == "kto")


@pytest.mark.parametrize("case", CASES)
def test_a_failed_allocation_on_any_rank_is_told_once_and_changes_and_leaves_nothing(
    case: str, seen: list[Any], alone: dict[str, Any]
) -> None:
    assert wrong_among([rank[case][1] for rank in seen], alone[case]) == []


def test_a_long_stored_reference_reaches_all_ranks(on_ranks: dict[str, list[Any]]) -> None:
    assert on_ranks["stored_values"] == [many_values()] * 2
