"""Failures that one rank recovered from alone are written to the journal by rank 0."""

from __future__ import annotations

import pytest

from engine.device.oom import OutOfMemory
from engine.distributed.ranks import Ranks
from engine.train.step.failures import MOST, LocalRecoveries, RecoveredOom


def failure(text: str) -> OutOfMemory:
    return OutOfMemory("device", 4096, text, "snapshot", 10, 10)


def never(recovered: RecoveredOom) -> None:
    pytest.fail(f"only rank 0 writes, not rank {recovered.oom.rank}")


def test_rank_0_writes_its_own_at_once() -> None:
    written: list[RecoveredOom] = []
    LocalRecoveries(Ranks(0, 2), written.append).note(failure("here"), "retry", 1, step=3)
    assert [(each.step, each.oom.rank, each.oom.failure.text) for each in written] == [(3, 0, "here")]


def test_more_than_can_be_sent_at_once_is_sent_later_and_none_is_lost() -> None:
    written: list[RecoveredOom] = []
    first, second = LocalRecoveries(Ranks(0, 2), written.append), LocalRecoveries(Ranks(1, 2), never)
    texts = [f"failure {number}" for number in range(2 * MOST + 1)]
    for text in texts:
        second.note(failure(text), "retry", 1, step=3)
    while sent := second.take():
        assert len(sent) <= MOST
        first.record([[], sent])
        second.record([[], sent])
    assert [(each.oom.rank, each.oom.failure.text) for each in written] == [(1, text) for text in texts]
