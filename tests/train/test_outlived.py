"""Failures that one rank outlived by itself, on their way to the journal."""

from __future__ import annotations

import pytest

from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.train.recovery.local_recoveries import MOST, Outlived
from engine.train.step.context import Backoff


def failure(text: str) -> OutOfMemory:
    return OutOfMemory("device", 4096, text, "snapshot", 10, 10)


def never(backoff: Backoff) -> None:
    pytest.fail(f"rank 0 alone writes, not rank {backoff.failed_rank}")


def test_rank_0_writes_its_own_at_once() -> None:
    written: list[Backoff] = []
    Outlived(Ranks(0, 2), written.append).note(failure("here"), "retry", 1, step=3)
    assert [(each.step, each.failed_rank, each.failure.text) for each in written] == [(3, 0, "here")]


def test_more_than_can_be_told_at_once_is_told_later_and_none_is_lost() -> None:
    written: list[Backoff] = []
    first, second = Outlived(Ranks(0, 2), written.append), Outlived(Ranks(1, 2), never)
    texts = [f"failure {number}" for number in range(2 * MOST + 1)]
    for text in texts:
        second.note(failure(text), "retry", 1, step=3)
    while told := second.take():
        assert len(told) <= MOST
        first.record([[], told])
        second.record([[], told])
    assert [(each.failed_rank, each.failure.text) for each in written] == [(1, text) for text in texts]
