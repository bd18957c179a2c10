"""Rendezvous of the ranks over the launcher's store, under a name that no earlier start of them has used.

A launcher that restarts its ranks may keep the store of the first start, with the addresses of ended processes in it,
and gloo would connect to those (torch 2.13, torchrun's static rendezvous). The number of restarts cannot be that name:
on several machines each agent counts its own restarts. So rank 0 makes a random name. Every other rank asks for it
under a random token; requests that ended processes left behind are answered, too, which does no harm.

Try: `pytest tests/distributed/test_rendezvous.py`
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

POLL_SECONDS = 0.02


def rendezvous_store(store: Store, rank: int, size: int, limit: timedelta) -> Store:
    """Return a part of `store` under a prefix that only the ranks of this start know. All `size` ranks call this.

    Raises:
        RuntimeError: not all ranks came within the time limit, or the store is gone.
    """
    name = _publish_name(store, size, limit) if rank == 0 else _ask(store, rank, limit)
    return PrefixStore(name, store)


def _ask(store: Store, rank: int, limit: timedelta) -> str:
    word = secrets.token_hex(8)
    store.set(f"asks/{rank}", word)
    store.wait([f"answer/{word}"], limit)
    name: str = store.get(f"answer/{word}").decode()
    store.add(f"{name}/came", 1)
    return name


def _publish_name(store: Store, size: int, limit: timedelta) -> str:
    name = f"start-{secrets.token_hex(8)}"
    answered: set[bytes] = set()
    deadline = time.monotonic() + limit.total_seconds()
    while store.add(f"{name}/came", 0) < size - 1:
        for rank in range(1, size):
            if store.check([f"asks/{rank}"]) and (word := store.get(f"asks/{rank}")) not in answered:
                store.set(f"answer/{word.decode()}", name)
                answered.add(word)
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {size} ranks came within {limit.total_seconds():.0f} s")
        time.sleep(POLL_SECONDS)
    return name
