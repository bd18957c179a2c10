"""With one vote per micro-batch, ranks learn what they learn with a vote before each collective, also when memory runs
out in the middle of a micro-batch on any of them.

The whole sweep is `make torture`: every single allocation of a step fails, on each rank alone and on all at once.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.device.metered import MeteredDevice
from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.distributed.votes import Collective, LostRankError, MicroBatchVotes, RepeatWithVotesError, VotedGroup
from engine.train.strategy.sharded import Sharded
from tests.distributed.faults import Asked, Fault, Faults, asked_by, complaints, differences, faulty_steps
from tests.distributed.rank_processes import Case, run_ranks
from tests.distributed.rank_workbench import FULL, LORA, NEEDS_SHARDS, RankWorkbench, sharded, small_model
from tests.present import present

pytestmark = NEEDS_SHARDS

CASES: dict[str, dict[str, Any]] = {
    "full, weights dropped": sharded(FULL, "parameters"),
    "lora, weights kept, tied": sharded(LORA, "gradients", tied=True, gradient_checkpointing=True),
}
SAMPLED = 2
"""Allocations that fail in the suite, in each case, each on one rank and on both."""
CELLS: dict[str, dict[str, Any]] = {
    **CASES,
    "full, weights kept, tied": sharded(FULL, "gradients", tied=True, gradient_checkpointing=False),
    "lora, weights dropped": sharded(LORA, "parameters", gradient_checkpointing=False),
}
STRIDE_OF_FOUR = 5
"""On four ranks every fifth allocation fails, so that the sweep takes about as long as on two."""


def few_votes(ranks: Ranks, folder: Path, cases: dict[str, dict[str, Any]], sample: int | None = None) -> Any:
    """For each case: the votes of two steps, where the first one has a vote before each collective, what differs
    from the steps with all votes, and what was wrong after each fault. With `sample`, so many allocations fail."""
    found = {}
    for name, tables in cases.items():
        tables = small_model(folder, tables, layers=1)
        work = RankWorkbench(folder, ranks, tables, count=2 if sample else 1)
        clean = work.steps()
        votes = votes_of_steps(work) if sample else []
        work.votes_once = True
        work.reset()
        found[name] = votes, same(work.steps(), clean), list(swept(work, clean, sample))
        work.close()
    return found


def votes_of_steps(work: RankWorkbench) -> list[int]:
    """The votes of the first step, which is one clean step short of few votes, and of the second."""
    voted_group, found = present(work.setup.context.strategy.voted_group), []
    work.votes_once = True
    work.reset()
    work.transaction.ceiling_watch._clean_steps -= 1
    for step in (1, 2):
        votes = voted_group.votes
        work.transaction.run(step, work.setup.order.step(step))
        found.append(voted_group.votes - votes)
    return found


def swept(work: RankWorkbench, clean: dict[str, Any], sample: int | None) -> Iterator[tuple[Faults, Any, Any]]:
    """Take steps with faults; yields the faults, the remedies, and what was wrong."""
    asked = [Asked(**each) for each in work.ranks.all_gather_object(asdict(asked_by(work)))]
    for faults in every_fault(asked, sample):
        result = faulty_steps(work, faults)
        facts = {name: result[name] for name in ("refused", "told", "left_bytes")}
        remedies = {remedy for _, _, remedy in work.ranks.all_gather_object(facts["told"])[0]}
        # Only a remedy that cuts micro-batches otherwise may change how sums are rounded.
        differing = same(result, clean) if remedies <= {"retry"} else differences(result, clean)
        everywhere = work.ranks.all_gather_object([facts, differing])
        yield faults, sorted(remedies), complaints(*map(list, zip(*everywhere, strict=True)))


def every_fault(asked: list[Asked], sample: int | None) -> Iterator[Faults]:
    """Each allocation fails on each rank alone and on all at once, and on one of them once more soon after; with
    `sample`, so many of them, evenly spread, in turn on one rank or on all."""
    every, last = range(len(asked)), max(max(map(max, rank.device.values())) for rank in asked)
    stride = STRIDE_OF_FOUR if len(asked) == 4 else 1
    numbers = range(1, last + 1, stride) if sample is None else [last * n // (sample + 1) for n in range(1, sample + 1)]
    for count, number in enumerate(numbers):
        who = [[rank] for rank in every] + [list(every)]
        yield from ({rank: Fault(number) for rank in ranks} for ranks in (who if sample is None else [who[count % 3]]))
        yield {count % len(asked): Fault(number, then=(1 + count % 4,))}


def same(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Names of the results that are not equal bit for bit."""
    found = [name for name in ("losses", "norms", "samples") if here[name] != there[name]]
    found += [] if torch.equal(here["weights"], there["weights"]) else ["weights"]
    both = zip(here["gradients"], there["gradients"], strict=True)
    return found + ([] if all(torch.equal(*each) for each in both) else ["gradients"])


def other_order(ranks: Ranks, folder: Path) -> Any:
    """Take steps where the collectives are not those that were recorded: there is one less, or one more."""
    work = RankWorkbench(folder, ranks, small_model(folder, CASES["full, weights dropped"], layers=1), votes_once=True)
    clean, found = work.steps(), []
    votes = cast(Sharded, work.setup.context.strategy).model.votes
    recorded = present(votes._recorded)
    for wrong in (recorded[:-1], (*recorded, recorded[-1])):
        work.reset()
        votes._recorded = wrong
        found.append((same(work.steps(), clean), [each.remedy for each in work.told], votes.checksum))
    work.close()
    return found


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases: list[Case] = [partial(few_votes, cases=CASES, sample=SAMPLED), other_order]
    return run_ranks(cases, tmp_path_factory.mktemp("votes"))


@pytest.mark.parametrize("case", CASES)
def test_ranks_vote_once_for_each_micro_batch_and_learn_the_same(case: str, crew: dict[str, list[Any]]) -> None:
    for rank in crew["few_votes"]:
        (many, few), differing, _ = rank[case]
        assert few < many and differing == []


@pytest.mark.parametrize("case", CASES)
def test_memory_that_runs_out_in_a_micro_batch_costs_a_retry_and_nothing_else(
    case: str, crew: dict[str, list[Any]]
) -> None:
    tried = crew["few_votes"][0][case][2]
    assert len(tried) == 2 * SAMPLED
    assert [each for each in tried if each[-1]] == []


def test_an_order_that_changes_is_repeated_with_all_votes(crew: dict[str, list[Any]]) -> None:
    assert crew["other_order"] == [[([], [], None)] * 2] * 2


class Ready:
    """Stands for a group of ranks that are always ready."""

    votes = 0

    def ready(self) -> None:
        self.votes += 1


def test_a_rank_joins_only_what_others_launch_without_a_vote() -> None:
    ready, collectives = Ready(), [Collective("all-gather", number, 8, torch.float32) for number in range(2)]
    votes = MicroBatchVotes(cast(VotedGroup, ready))

    def micro_batch(order: list[Collective]) -> None:
        with votes.micro_batch():
            for collective in order:
                with votes.launching(collective):
                    assert votes.due in (None, collective)

    votes.begin_attempt(once=False)
    micro_batch(collectives)
    assert ready.votes == 2 and votes.checksum is not None
    votes.begin_attempt(once=True)
    micro_batch(collectives)
    assert ready.votes == 3 and votes.due is None
    for wrong, due in ((collectives[:1], collectives[1]), (collectives[::-1], collectives[0])):
        votes.begin_attempt(once=True)
        with pytest.raises(RepeatWithVotesError):
            micro_batch(wrong)
        assert votes.due == due
    votes.begin_attempt(once=False)
    micro_batch(collectives)
    micro_batch(collectives[:1])
    assert votes.checksum is None and votes.due is None


def test_a_rank_without_room_to_join_the_others_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting:
        due = Collective("all-gather", 0, 8, torch.float32)

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    told: list[str] = []

    def report(_failure: OutOfMemory, remedy: str, _attempt: int) -> None:
        told.append(remedy)

    model = ShardedModel.__new__(ShardedModel)
    model.votes = cast(MicroBatchVotes, Waiting())
    monkeypatch.setattr(ShardedModel, "recover", lambda _: None)
    monkeypatch.setattr(ShardedModel, "_join", refuse)
    with pytest.raises(LostRankError, match="no memory left to finish the micro-batch"):
        model.join_others(MeteredDevice(2**20), report)
    assert told == ["retry", "retry", "give_up"]


@pytest.mark.torture
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cell", CELLS)
def test_every_allocation_may_fail(cell: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_ranks([partial(few_votes, cases={cell: CELLS[cell]})], tmp_path, size=size)["few_votes"]
    _, differing, tried = results[0][cell]
    remedies = Counter(remedy for _, each, _ in tried for remedy in each)
    with capsys.disabled():
        sys.stdout.write(f"\n{size} ranks, {cell}, one vote per micro-batch: {len(tried)} attempts, {dict(remedies)}\n")
    assert differing == []
    assert [each for each in tried if each[-1]] == []
