"""Ranks with weights in shards share the samples of an evaluation: the scores are those of one process, also when
memory runs out on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.batching.budget import MicroBatchBudget
from engine.config.schema.recipe import Generate
from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.evaluate import context as passes
from engine.evaluate.context import EvaluationContext, FailedPass
from engine.evaluate.scores import evaluate
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import FULL, NEEDS_SHARDS, RankWorkbench, sharded, small_model

pytestmark = NEEDS_SHARDS

COUNT = 11
"""Samples: an odd number, so that a rank has none in a pass."""


def scores(ranks: Ranks, folder: Path) -> Any:
    """Score samples, without and with an allocation that fails on the last rank. Returns for both: loss and answers (on
    rank 0), the samples of each pass of this rank, and the failures."""
    work = RankWorkbench(folder, ranks, small_model(folder, sharded(FULL, "parameters")))
    found = [score_once(work, fails=fails) for fails in (False, True)]
    work.close()
    return found


def score_once(work: RankWorkbench, *, fails: bool) -> Any:
    step, ranks, told = work.setup.context, work.ranks, list[tuple[int, str]]()

    def report(failed: FailedPass, remedy: str, *_: Any) -> None:
        told.append((failed.rank, remedy))

    budget = MicroBatchBudget(step.budget.budget_bytes, step.budget.top_bytes)
    alone = EvaluationContext(
        work.device, step.loaded, step.loss, step.cost, budget, Generate(max_new_tokens=6), report
    )
    joined = step.strategy.join_evaluation(alone, step.data)
    computed: list[tuple[str, list[int]]] = []

    def noting(kind: str, whole: Any) -> Any:
        def run(context: EvaluationContext, data: Any, chosen: list[int]) -> Any:
            computed.append((kind, list(chosen)))
            if fails and ranks.rank == ranks.size - 1 and len(computed) == 2:
                work.device.fail_at(3)
            return whole(context, data, chosen)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for kind, whole in passes.PASSES.items():
            patch.setitem(passes.PASSES, kind, noting(kind, whole))
        result = ranks.run_on_rank0(lambda: _asked(joined, step.data))
    return result, computed, told


def _asked(context: EvaluationContext, data: Any) -> list[Any]:
    found = evaluate(context, data, ["loss", "exact_match"], limit=COUNT, samples=COUNT)
    return [found.metrics, found.samples]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[Any]:
    return run_ranks([scores], folder)["scores"]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    return scores(SINGLE_PROCESS, folder)[0]


@pytest.mark.parametrize("fails", [False, True])
def test_two_ranks_in_shards_give_the_scores_and_answers_of_one(seen: list[Any], expected: Any, fails: bool) -> None:
    metrics, answers = seen[0][fails][0]
    assert metrics == pytest.approx(expected[0][0], rel=1e-6)
    assert answers == expected[0][1]


@pytest.mark.parametrize("kind", ["evaluate", "generate"])
def test_each_rank_computes_samples_of_its_own(seen: list[Any], kind: str) -> None:
    first, second = ([chosen for each, chosen in rank[False][1] if each == kind] for rank in seen)
    assert len(first) == len(second)
    own = [[sample for chosen in rank for sample in chosen] for rank in (first, second)]
    assert set(own[0]) | set(own[1]) == set(range(COUNT))
    assert len(own[0]) + len(own[1]) <= COUNT + 1, "a rank without samples repeats one of another rank"
    assert max(map(len, own)) < COUNT


def test_a_failure_of_one_rank_repeats_the_pass_on_both(seen: list[Any]) -> None:
    clean, failed = seen[0]
    assert clean[2] == []
    assert [rank for rank, _ in failed[2]] == [1]
    for rank in seen:
        assert len(rank[True][1]) > len(rank[False][1])
