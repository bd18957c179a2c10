"""Ranks find each other under a new name, also in a store that has the keys of an earlier start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store

from engine.distributed.rendezvous import rendezvous_store

LIMIT = timedelta(seconds=30)


def meet(store: Store, size: int) -> list[bytes]:
    """Let `size` ranks start on the store; returns the value that each rank reads after rank 0 has written it."""
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: rendezvous_store(store, rank, size, LIMIT), range(size)))
    assert not any(each.check(["here"]) for each in found)
    found[0].set("here", "now")
    return [each.get("here") for each in found]


def test_all_ranks_find_each_other_at_every_start_of_one_store() -> None:
    store = HashStore()
    for _ in range(3):
        assert meet(store, 4) == [b"now"] * 4


def test_ranks_may_come_before_rank_0() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(rendezvous_store, store, 1, 2, LIMIT)
        store.wait(["asks/1"], LIMIT)
        first = pool.submit(rendezvous_store, store, 0, 2, LIMIT)
        first.result().set("here", "now")
        assert second.result().get("here") == b"now"


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with pytest.raises(RuntimeError, match="not all 2 ranks"):
        rendezvous_store(HashStore(), 0, 2, timedelta(seconds=0.1))
