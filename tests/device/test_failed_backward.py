"""After a backward pass that ran out of memory on CUDA, the thread of the backward pass may still free tensors, so
recovery waits until the allocated bytes no longer change."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from engine.device.base import MemoryReading
from engine.device.oom import STEADY_LIMIT, STEADY_READINGS, free_failed_graph, retry_on_oom, wait_until_steady


def test_it_waits_until_the_bytes_no_longer_change() -> None:
    falling = [900, 700, 300, 100, 100, 100, 100]
    left = iter(falling)
    pauses: list[float] = []
    assert wait_until_steady(lambda: next(left), pauses.append)
    assert list(left) == [100] and len(pauses) == 2 + STEADY_READINGS


def test_it_gives_up_on_bytes_that_never_settle() -> None:
    pauses: list[float] = []
    count = iter(range(10 * STEADY_LIMIT))
    assert not wait_until_steady(lambda: next(count), pauses.append)
    assert len(pauses) == STEADY_LIMIT - 1


class Card(SimpleNamespace):
    """A CUDA card on which another thread frees 100 bytes between two readings, until 100 are left."""

    kind = "cuda"
    allocated_bytes: int

    def memory(self) -> MemoryReading:
        self.allocated_bytes = max(100, self.allocated_bytes - 100)
        return MemoryReading(self.allocated_bytes, 1000, 1000, 0)

    def wait_until_idle(self) -> None:
        self.synchronised = True

    def release_cached(self) -> None:
        self.at_release = self.allocated_bytes


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    monkeypatch.setattr("engine.device.oom.time.sleep", lambda seconds: None)
    yield Card(allocated_bytes=1000, synchronised=False)


def test_cached_blocks_are_released_when_the_failed_graph_is_gone(card: Card) -> None:
    attempts = iter([True, False])

    def action() -> str:
        if next(attempts):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return "done"

    assert retry_on_oom(action, "backward", card, lambda *_: None) == "done"
    assert card.synchronised and card.at_release == 100


def test_devices_without_a_thread_of_their_own_are_not_waited_for(card: Card) -> None:
    host = Card(kind="metered", allocated_bytes=1000, synchronised=False)
    free_failed_graph(host)
    assert not host.synchronised and host.allocated_bytes == 1000
