"""Proof: a failure on any rank is known to all ranks after the next vote. Also measures how long votes take, on an idle
machine and while host and device compute.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.distributed.voted_group import VotedGroup
from engine.errors import EnvironmentProblem
from engine.train.proofs.ranks.exchange import require_none
from engine.train.proofs.ranks.sharded_oom import queue_work
from engine.train.setup import TrainingSetup

VOTES = 50
"""Votes that are timed."""
WIDTH = 256
"""Rows and columns of the matrices that the host multiplies meanwhile."""


class _Rehearsed(Exception):
    """The error with which a rank fails."""


def prove(setup: TrainingSetup) -> str:
    """Let each rank fail in turn, then time votes. All ranks call this; it votes. Returns what was shown, in a few
    words. Raises DisprovedError on all ranks if one did not learn of a failure."""
    ranks = setup.context.ranks
    for rank in range(ranks.size):
        learned = _learned(ranks.voted_group(), here=rank == ranks.rank)
        require_none(ranks, "" if learned else "nothing is known of it", f"after rank {rank} has failed")
    idle = _seconds(ranks.voted_group())
    with _load(setup):
        loaded = _seconds(ranks.voted_group())
    return f"all learn of a failure on any rank; a vote takes {_ms(idle)} idle and {_ms(loaded)} under load"


def fall_back(setup: TrainingSetup) -> str:
    """Raise EnvironmentProblem, which ends the run, because an out-of-memory error on one rank would hang the
    others."""
    raise EnvironmentProblem(
        "the ranks do not learn of each other's failures",
        expected="every vote to reach every rank",
        fix="see the network between the ranks and GLOO_SOCKET_IFNAME; then tunedeck doctor --gpus",
    )


def _learned(votes: VotedGroup, *, here: bool) -> bool:
    """Fail in a piece of work that all ranks do together, if `here` is true; returns whether this rank knows of the
    failure."""

    def work() -> None:
        if here:
            raise _Rehearsed

    try:
        return not votes.run_together(work)
    except _Rehearsed:
        return True


def _seconds(votes: VotedGroup) -> list[float]:
    """Seconds that each of several votes took."""
    taken = []
    for _ in range(VOTES):
        began = time.perf_counter()
        votes.ready()
        taken.append(time.perf_counter() - began)
    return sorted(taken)


def _ms(seconds: list[float]) -> str:
    return f"{1000 * seconds[len(seconds) // 2]:.2f} ms (at most {1000 * seconds[-1]:.1f})"


@contextmanager
def _load(setup: TrainingSetup) -> Iterator[None]:
    """Context manager: inside the block, another thread computes on the host as data preparation does, and the device
    has work queued."""
    over, device = threading.Event(), setup.context.device

    def compute() -> None:
        product = torch.ones((WIDTH, WIDTH))
        while not over.is_set():
            torch.mm(product, product)

    with device.host_region():
        queue_work(device)
        thread = threading.Thread(target=compute, name="load", daemon=True)
        thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
