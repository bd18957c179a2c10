"""If a rank fails before a collective, the ranks that would wait in it learn of the failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.device.metered import MeteredDevice
from engine.device.oom import catch_oom
from engine.distributed.ranks import Ranks
from engine.distributed.votes import VotedGroup
from tests.distributed.rank_processes import run_ranks
from tests.present import present


def rounds_of(ranks: Ranks, voted_group: VotedGroup, failing: dict[int, int]) -> Callable[[list[int]], None]:
    """A function that runs three collectives on this rank. On rank r it allocates too much before collective number
    failing[r]; number 4 is after the last one."""

    def work(done: list[int]) -> None:
        for number in range(1, 5):
            size = 2**20 if failing.get(ranks.rank) == number else 1
            here = torch.ones(size)
            if number < 4:
                voted_group.ready()
                dist.all_reduce(here[:1])
                done.append(int(here[0]))

    return work


def failures(ranks: Ranks, _folder: Path) -> Any:
    device, found = MeteredDevice(2**20), []
    with device.activate():
        voted_group = VotedGroup(present(dist.group.WORLD), device.host_region)
        for failing in ({}, {1: 1}, {0: 2}, {1: 4}, {0: 3, 1: 3}, {0: 4, 1: 1}, {}):
            done: list[int] = []
            work = rounds_of(ranks, voted_group, failing)
            failure = catch_oom(lambda: voted_group.run_together(lambda: work(done)), device, "trying")  # noqa: B023
            found.append((failure is not None, len(done), left_on(device)))
    return found


def left_on(device: MeteredDevice) -> int:
    """Bytes still allocated once gloo's own thread has freed the last collective's tensor, shortly after it
    returned."""
    patience = time.monotonic() + 5.0
    while device.memory().allocated_bytes and time.monotonic() < patience:
        time.sleep(0.001)
    return device.memory().allocated_bytes


def ended(ranks: Ranks, _folder: Path) -> Any:
    """Whether all ranks have ended, as this rank is told while first no rank, then the first, then both have."""
    votes = VotedGroup(present(dist.group.WORLD))
    return [votes.all_true(ranks.rank < number) for number in range(3)]


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_ranks([failures, ended], tmp_path_factory.mktemp("voted_group"))


@pytest.fixture(scope="module")
def seen(crew: dict[str, list[Any]]) -> list[Any]:
    return crew["failures"]


def test_only_the_rank_that_ran_out_of_memory_has_a_failure(seen: list[Any]) -> None:
    first, second = ([failed for failed, _, _ in rank] for rank in seen)
    assert first == [False, False, True, False, True, False, False]
    assert second == [False, True, False, True, True, True, False]


def test_all_ranks_stop_at_the_same_collective(seen: list[Any]) -> None:
    for rank in seen:
        assert [done for _, done, _ in rank] == [3, 0, 1, 3, 2, 0, 3]


def test_nothing_of_an_attempt_that_a_peer_ended_stays_allocated(seen: list[Any]) -> None:
    assert [held for rank in seen for _, _, held in rank] == [0] * 14


def test_what_is_true_on_one_rank_is_not_true_on_all(crew: dict[str, list[Any]]) -> None:
    assert crew["ended"] == [[False, False, True]] * 2
