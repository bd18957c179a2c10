"""Who else works on this run: rank and size, and the three ways of talking on the host.

`tell` is a vote of all, bounded in time. `from_first` is rank 0 deciding for all. `behind_first` lets rank 0 work alone
for as long as it takes (tokenising, evaluating, writing a checkpoint) while the others wait without a time limit.
A run of one process is `ALONE`: the same calls, nothing to wait for.

Try: `pytest tests/parallel/test_ranks.py`
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.parallel.votes import Ballot, LostRankError, losing_a_rank_ends_it

ERRAND_POLL_SECONDS = 0.05
"""Between looks at whether rank 0 is done. Its death is noticed by the supervisor, not by a clock."""

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
    _errands: int = 0

    @property
    def is_first(self) -> bool:
        """Rank 0 writes events, checkpoints and results."""
        return self.rank == 0

    def tell(self, value: Any) -> list[Any]:
        """Every rank's value (JSON), in the order of ranks. Raises LostRankError."""
        return [value] if self.ballot is None else self.ballot.cast(value)

    def from_first(self, value: Any) -> Any:
        """Rank 0's value. Raises LostRankError."""
        return self.tell(value if self.is_first else None)[0]

    def behind_first(self, action: Callable[[], Any]) -> Any:
        """Rank 0 runs `action` and all get its result (JSON). Nobody else does anything meanwhile.

        Where it raises, it raises on rank 0 alone; the others get LostRankError once that has recorded its end.
        """
        if self.store is None:
            return action()
        self._errands += 1
        key = f"errand/{self._errands}"
        if self.is_first:
            result = action()
            with losing_a_rank_ends_it():
                self.store.set(key, json.dumps(result))
            return result
        with losing_a_rank_ends_it():
            while not self.store.check([key]):
                if self.store.check(["over"]):
                    raise LostRankError("rank 0 has ended the run", fix="its journal says why")
                time.sleep(ERRAND_POLL_SECONDS)
            return json.loads(self.store.get(key))

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


ALONE = Ranks()
"""A run of one process."""


@contextmanager
def joined(timeout_seconds: float, device_type: str) -> Iterator[Ranks]:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...), and leave them at the end.

    Raises LostRankError when not all of them come within the time limit.
    """
    limit = timedelta(seconds=timeout_seconds)
    with losing_a_rank_ends_it():
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
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
    try:
        yield Ranks(rank, size, int(os.environ.get("LOCAL_RANK", rank)), ballot, dist.PrefixStore("words", store))
    finally:
        dist.destroy_process_group()
