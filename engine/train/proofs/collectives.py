"""Proof: every kind of collective gives exact results among the ranks of the run. Also measures how long a vote takes.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

import time

from engine.distributed.warm_up import run_each_collective
from engine.errors import EnvironmentProblem
from engine.train.proofs.record import DisprovedError
from engine.train.setup import TrainingSetup

VOTES = 20
"""Votes that are timed; their mean is reported."""


def applies(setup: TrainingSetup) -> bool:
    """Whether the run has several ranks."""
    return setup.context.ranks.size > 1


def prove(setup: TrainingSetup) -> str:
    """Run every kind of collective on small whole numbers, then some votes. All ranks call this. Returns what was
    shown, in a few words. Raises DisprovedError if a result is wrong on this rank, and LostRankError."""
    device, ranks = setup.context.device, setup.context.ranks
    with device.host_region():
        try:
            run_each_collective(device.torch_device)
        except EnvironmentProblem as wrong:
            raise DisprovedError(wrong.found) from wrong
        finally:
            vote_seconds = _vote_seconds(setup)
    return f"five kinds of collectives among {ranks.size} ranks are exact; a vote takes {1000 * vote_seconds:.2f} ms"


def _vote_seconds(setup: TrainingSetup) -> float:
    voted_group = setup.context.ranks.voted_group()
    began = time.perf_counter()
    for _ in range(VOTES):
        voted_group.ready()
    return (time.perf_counter() - began) / VOTES


def fall_back(setup: TrainingSetup) -> str:
    """Raise EnvironmentProblem, which ends the run, because nothing can replace collectives."""
    raise EnvironmentProblem(
        "collectives between the ranks of this run give wrong results",
        expected="exact sums of small whole numbers",
        fix="see tunedeck doctor --gpus; NCCL_P2P_DISABLE=1 avoids transfers that a host in between may break",
    )
