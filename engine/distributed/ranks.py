"""Who else works on this run: rank and size, and the three ways of talking on the host.

`tell` is a vote of all, bounded in time. `from_first` is rank 0 deciding for all. `behind_first` lets rank 0 work alone
for as long as it takes (tokenising, evaluating, writing a checkpoint) while the others wait, as long as it gives signs
of life. What it cannot do alone, because each rank holds a part of the weights, it asks of all of them meanwhile.
A run of one process is `ALONE`: the same calls, nothing to wait for.

Try: `pytest tests/distributed/test_ranks.py`
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.distributed.host_gather import Ballot, LostRankError, losing_a_rank_ends_it
from engine.distributed.rendezvous import fresh_store
from engine.distributed.voted_group import Joint

ERRAND_POLL_SECONDS = 0.05
"""Between looks at whether rank 0 is done; the first ones come sooner."""

LIFE_SECONDS = 5.0
"""Between signs of life of rank 0 for those who wait while it works alone; a quarter of the patience if shorter."""

COLLECTIVE_PATIENCE = 2
"""Collectives on the device wait this many times longer than votes: a lost rank is to be found by a vote."""


@dataclass(eq=False)
class Ranks:
    """One process's view of the ranks of its run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the ranks of this machine."""
    ballot: Ballot | None = None
    store: dist.Store | None = None
    patience_seconds: float = 600.0
    """How long the others wait for a sign of life."""
    host_region: Callable[[], AbstractContextManager[None]] = nullcontext
    """The device's region for host memory: the buffers of votes are none of its own."""
    duties: dict[str, Callable[..., None]] = field(default_factory=dict)
    """What rank 0 may ask of all ranks while they wait behind it."""
    _errands: int = 0

    @property
    def is_first(self) -> bool:
        """Rank 0 writes events, checkpoints and results."""
        return self.rank == 0

    def tell(self, value: Any) -> list[Any]:
        """Every rank's value (JSON), in the order of ranks. Raises LostRankError."""
        if self.ballot is None:
            return [value]
        with self.host_region():
            return self.ballot.cast(value)

    def joint(self) -> Joint:
        """Votes of one flag among all ranks, for collectives that a rank may be unable to take part in."""
        assert self.ballot is not None
        return Joint(self.ballot.group, self.host_region)

    def from_first(self, value: Any) -> Any:
        """Rank 0's value. Raises LostRankError."""
        return self.tell(value if self.is_first else None)[0]

    def behind_first(self, action: Callable[[], Any]) -> Any:
        """Rank 0 runs `action` and all get its result (JSON). The others do nothing meanwhile but what it asks of them.

        Where it raises, it raises on rank 0 alone; the others get LostRankError once that has recorded its end.
        """
        if self.store is None:
            return action()
        if self.is_first:
            result = action()
            self._post(self.store, {"result": result})
            return result
        while "result" not in (word := self._word_of_first(self.store)):
            self.duties[word["duty"]](**word["details"])
        return word["result"]

    def ask(self, duty: str, **details: Any) -> None:
        """On rank 0, inside `behind_first`: have all ranks do one of their `duties`, this one included."""
        if self.store is not None:
            self._post(self.store, {"duty": duty, "details": details})
        self.duties[duty](**details)

    def _post(self, store: dist.Store, word: dict[str, Any]) -> None:
        self._errands += 1
        with losing_a_rank_ends_it():
            store.set(f"errand/{self._errands}", json.dumps(word))

    def _word_of_first(self, store: dist.Store) -> Any:
        self._errands += 1
        key = f"errand/{self._errands}"
        signs, heard_at, pause_seconds = -1, time.monotonic(), ERRAND_POLL_SECONDS / 32
        with losing_a_rank_ends_it():
            while not store.check([key]):
                if store.check(["over"]):
                    raise LostRankError("rank 0 has ended the run", fix="its journal says why")
                before, signs = signs, store.add("alive", 0)
                heard_at = time.monotonic() if signs != before else heard_at
                if time.monotonic() - heard_at > self.patience_seconds:
                    raise LostRankError(
                        f"rank 0 has given no sign of life for {self.patience_seconds:.0f} s: it is stopped or stuck",
                        fix="the run goes on from its last checkpoint",
                    )
                time.sleep(pause_seconds)
                pause_seconds = min(ERRAND_POLL_SECONDS, 2 * pause_seconds)
            return json.loads(store.get(key))

    def say_over(self) -> None:
        """Rank 0 has recorded the end of the run: nobody need wait for it any more."""
        if self.store is not None:
            self.store.set("over", "1")

    def note_error(self, error: dict[str, Any]) -> None:
        """Leave word of why this rank gives up, for rank 0 to record."""
        if self.store is not None:
            self.store.set(f"error/{self.rank}", json.dumps(error))

    def noted_error(self) -> dict[str, Any] | None:
        """What another rank gave up for, if one did."""
        if self.store is None:
            return None
        with losing_a_rank_ends_it():
            for rank in range(self.size):
                if self.store.check([f"error/{rank}"]):
                    return {"rank": rank, **json.loads(self.store.get(f"error/{rank}"))}
        return None


@contextmanager
def signs_of_life(store: dist.Store, every_seconds: float) -> Iterator[None]:
    """While the block runs, a thread counts up what the waiting ranks look at: a stopped process counts no further."""
    over = threading.Event()

    def count() -> None:
        # Where the store is gone, so are those who would look at it.
        with suppress(RuntimeError):
            while not over.wait(every_seconds):
                store.add("alive", 1)

    thread = threading.Thread(target=count, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


ALONE = Ranks()
"""A run of one process."""


@contextmanager
def joined(timeout_seconds: float, device_type: str, device_index: int = 0) -> Iterator[Ranks]:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...), and leave them at the end.

    Raises LostRankError when not all of them come within the time limit.
    """
    limit = timedelta(seconds=timeout_seconds)
    with losing_a_rank_ends_it():
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))
        store = fresh_store(store, rank, size, limit)
        if device_type == "cuda":
            torch.cuda.set_device(device_index)
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        store.set_timeout(limit)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("groups", store),
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_PATIENCE * limit,
        )
        ballot = Ballot(dist.new_group(backend="gloo", timeout=limit))
    words = dist.PrefixStore("words", store)
    ranks = Ranks(rank, size, int(os.environ.get("LOCAL_RANK", rank)), ballot, words, timeout_seconds)
    with signs_of_life(words, min(LIFE_SECONDS, timeout_seconds / 4)) if ranks.is_first else nullcontext():
        yield ranks
    # Not after an error: with a peer gone, taking the groups down may wait for it.
    dist.destroy_process_group()
