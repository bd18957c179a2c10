"""Who else works on this run: this process's rank, the number of ranks, ways to exchange values on the host, and which
sequences of a step each rank gets."""

from __future__ import annotations

import heapq
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from engine.distributed.rendezvous import rendezvous_store, settle_interface
from engine.distributed.votes import HostGather, LostRankError, VotedGroup, raising_lost_rank


def assign_samples(lengths: Sequence[int] | NDArray[np.int32], ranks: int) -> list[list[int]]:
    """For each rank the positions in `lengths` of its sequences, ascending; each position goes to exactly one rank.

    Longest first, each to the rank with the fewest tokens so far (Graham 1969, list scheduling: at worst a third above
    the best assignment), among equals the one with fewer sequences, then the lower rank.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    waiting = [(0, 0, rank) for rank in range(ranks)]
    for position in sorted(range(len(lengths)), key=lambda index: (-int(lengths[index]), index)):
        tokens, count, rank = heapq.heappop(waiting)
        hands[rank].append(position)
        heapq.heappush(waiting, (tokens + int(lengths[position]), count + 1, rank))
    return [sorted(hand) for hand in hands]


MESSAGE_POLL_SECONDS = 0.05
"""Longest pause between two checks whether rank 0 is done; the first pauses are shorter."""

LIFE_SECONDS = 5.0
"""Interval of rank 0's signs of life while it works alone; a quarter of the time limit of votes if that is shorter."""

COUNTS_AT_ONCE = 4000
"""Numbers of up to 14 digits, as JSON, that fit one exchange (`engine.distributed.votes.SLOT_BYTES`)."""

COLLECTIVE_PATIENCE = 2
"""Collectives on the device time out this many times later than votes, so that a vote finds a lost rank first."""


@dataclass(eq=False)
class Ranks:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """This rank's number among the ranks of its machine."""
    host_gather: HostGather | None = None
    """None in a run of one process."""
    store: Store | None = None
    """torch's key-value store, for messages of rank 0; None in a run of one process."""
    patience_seconds: float = 600.0
    """How long other ranks wait without a sign of life from rank 0, before they raise LostRankError."""
    host_region: Callable[[], AbstractContextManager[None]] = nullcontext
    """The device's context for host allocations, so that buffers of votes do not count as device memory."""
    handlers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions by name that `request` runs on all ranks while they wait in `run_on_rank0`."""
    _messages: int = 0

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON), by rank. All ranks call this. Raises LostRankError."""
        if self.host_gather is None:
            return [value]
        with self.host_region():
            return self.host_gather.gather(value)

    def sums(self, values: list[float]) -> list[float]:
        """The sums over all ranks of lists of the same length. All ranks call this. Raises LostRankError."""
        return [sum(each) for each in zip(*self.all_gather_object(values), strict=True)]

    def sum_of_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum over all ranks of arrays of one shape, sent in pieces that fit one exchange. Raises LostRankError."""
        if self.size == 1:
            return counts
        flat = counts.ravel()
        pieces = [flat[first : first + COUNTS_AT_ONCE] for first in range(0, len(flat), COUNTS_AT_ONCE)]
        sums = [np.sum(self.all_gather_object(piece.tolist()), axis=0, dtype=np.int64) for piece in pieces]
        return np.concatenate(sums).reshape(counts.shape)

    def voted_group(self) -> VotedGroup:
        """All ranks, voting before each collective, which one may be unable to join for want of memory."""
        assert self.host_gather is not None
        return VotedGroup(self.host_gather.group, self.host_region)

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value` (JSON) on every rank. All ranks call this. Raises LostRankError."""
        return self.all_gather_object(value if self.is_rank0 else None)[0]

    def run_on_rank0(self, action: Callable[[], Any]) -> Any:
        """`action`'s result (JSON), from rank 0, on all ranks; the others wait and run what it requests. All ranks call
        this.

        Its error is raised on rank 0 alone; the others get LostRankError once rank 0 has recorded the end of the run,
        or has given no sign of life for `patience_seconds`.
        """
        if self.store is None:
            return action()
        if self.is_rank0:
            result = action()
            self._post(self.store, {"result": result})
            return result
        while "result" not in (message := self._message_of_rank0(self.store)):
            self.handlers[message["handler"]](**message["details"])
        return message["result"]

    def request(self, handler: str, **details: Any) -> Any:
        """On rank 0, inside `run_on_rank0`: run a handler on all ranks; returns rank 0's result."""
        if self.store is not None:
            self._post(self.store, {"handler": handler, "details": details})
        return self.handlers[handler](**details)

    def _post(self, store: Store, message: dict[str, Any]) -> None:
        self._messages += 1
        with raising_lost_rank():
            store.set(f"message/{self._messages}", json.dumps(message))

    def _message_of_rank0(self, store: Store) -> Any:
        self._messages += 1
        key = f"message/{self._messages}"
        signs, heard_at, pause_seconds = -1, time.monotonic(), MESSAGE_POLL_SECONDS / 32
        with raising_lost_rank():
            while True:
                # Asked first: rank 0 posts its last message before it says that the run is over.
                is_over = store.check(["over"])
                if store.check([key]):
                    return json.loads(store.get(key))
                if is_over:
                    raise LostRankError("rank 0 has ended the run", fix="its journal has the reason")
                before, signs = signs, store.add("alive", 0)
                heard_at = time.monotonic() if signs != before else heard_at
                if time.monotonic() - heard_at > self.patience_seconds:
                    raise LostRankError(
                        f"rank 0 has not responded for {self.patience_seconds:.0f} s: it is suspended or stuck",
                        fix="the run continues from its last checkpoint",
                    )
                time.sleep(pause_seconds)
                pause_seconds = min(MESSAGE_POLL_SECONDS, 2 * pause_seconds)

    def mark_finished(self) -> None:
        """Tell the other ranks that rank 0 has recorded the end of the run, so that none waits for it."""
        if self.store is not None:
            self.store.set("over", "1")

    def note_error(self, error: dict[str, Any]) -> None:
        """Leave the error that this rank ends with in the store, for rank 0 to record."""
        if self.store is not None:
            self.store.set(f"error/{self.rank}", json.dumps(error))

    def noted_error(self) -> dict[str, Any] | None:
        """The error that another rank left; None if no rank did."""
        if self.store is None:
            return None
        with raising_lost_rank():
            for rank in range(self.size):
                if self.store.check([f"error/{rank}"]):
                    return {"rank": rank, **json.loads(self.store.get(f"error/{rank}"))}
        return None


@contextmanager
def signs_of_life(store: Store, every_seconds: float) -> Iterator[None]:
    """While the block runs, a thread shows waiting ranks that this process is not stopped: it increments a counter."""
    over = threading.Event()

    def count() -> None:
        # If the store is gone, no rank is waiting either.
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


SINGLE_PROCESS = Ranks()
"""A run of one process: the same calls return at once."""


@contextmanager
def process_group(timeout_seconds: float, device_type: str, device_index: int = 0) -> Iterator[Ranks]:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, …) and leave them at the end.
    `timeout_seconds` bounds each vote and the wait for signs of life. LostRankError: not all ranks come in time."""
    limit = timedelta(seconds=timeout_seconds)
    with raising_lost_rank():
        store, rank, size = next(rendezvous("env://", timeout=limit))
        store = rendezvous_store(store, rank, size, limit)
        if device_type == "cuda":
            torch.cuda.set_device(device_index)
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        store.set_timeout(limit)
        settle_interface(PrefixStore("interfaces", store), rank, size, os.environ["MASTER_ADDR"])
        dist.init_process_group(
            backend,
            store=PrefixStore("groups", store),
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_PATIENCE * limit,
        )
        host_gather = HostGather(dist.new_group(backend="gloo", timeout=limit))
    words = PrefixStore("words", store)
    ranks = Ranks(rank, size, int(os.environ.get("LOCAL_RANK", rank)), host_gather, words, timeout_seconds)
    with signs_of_life(words, min(LIFE_SECONDS, timeout_seconds / 4)) if ranks.is_rank0 else nullcontext():
        yield ranks
    # Not after an error: with a rank lost, destroying the groups may wait for it.
    dist.destroy_process_group()
