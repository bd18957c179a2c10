"""What it costs several ranks to agree: votes per step, what one takes, and their share of a step.

Run: python -m benchmarks.votes [--ranks 2 4] [--steps 10]        (CPU and gloo, a minute or two)

The steps are the engine's own, replicated, on small models of two sizes. In each step every vote is counted and timed;
after it the ranks, all ready, cast as many votes again with nothing between them. Those are the cost of voting itself;
what the votes of the step took beyond it is waiting for the slowest rank, which the sum of gradients would wait for
anyway. Everything is compared within a step: on shared cores only ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.job import Job, spec_of, write_job
from engine.device import open_device
from engine.device.catch_oom import frozen_gc
from engine.distributed.host_gather import HostGather
from engine.distributed.ranks import Ranks, process_group
from engine.journal.directory import RunDirectory
from engine.model.library_output import disable_progress_bars
from engine.spec.schema.run import RunSpec
from engine.train.loop import Training
from engine.train.monitor.journal import Journal
from engine.train.monitor.watchdog import Watchdog
from engine.train.recovery.emergency_memory import EmergencyHostMemory
from engine.train.run_context import RunContext
from engine.train.run_requests import RunRequests
from engine.train.setup import set_up

SIZES = {"small": (64, 48), "larger": (192, 256)}
"""Name = width of the model, tokens of a sequence; 32 sequences a step."""

BETWEEN_STEPS = 2
"""Votes that the loop takes between two steps: whether to end, and whether to write a checkpoint."""

LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Cost:
    """Medians over the steps of one run, on rank 0."""

    size: str
    ranks: int
    step_seconds: float
    votes: int
    """In each step, with those around it."""
    vote_seconds: float
    """One, with every rank ready."""
    share: float
    """Of the step, for its votes at that price."""
    waiting_share: float
    """Of the step, for what its votes took beyond that."""


class WatchedBallot(HostGather):
    """Counts and times the gathers of another HostGather."""

    def __init__(self, host_gather: HostGather) -> None:
        self._ballot = host_gather
        self.votes, self.seconds = 0, 0.0

    def gather(self, value: Any) -> list[Any]:
        """The other HostGather's gather."""
        began = time.perf_counter()
        told = self._ballot.cast(value)
        self.votes += 1
        self.seconds += time.perf_counter() - began
        return told


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    disable_progress_bars()
    print(f"{'model':8}{'ranks':>6}{'step':>10}{'votes':>7}{'a vote':>10}{'share':>9}{'waiting':>9}")
    for size in SIZES:
        for ranks in asked.ranks:
            cost = measure(size, ranks, asked.steps)
            step, vote = 1000 * cost.step_seconds, 1000 * cost.vote_seconds
            shares = f"{100 * cost.share:>7.2f} %{100 * cost.waiting_share:>7.1f} %"
            print(f"{size:8}{ranks:>6}{step:>7.0f} ms{cost.votes:>7}{vote:>7.2f} ms{shares}", flush=True)


def measure(size: str, ranks: int, steps: int) -> Cost:
    """One run on `ranks` processes of this machine."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        width, tokens = SIZES[size]
        job = write_job(Path(name, "job"), [tokens] * 32, vocabulary=512, hidden=width, steps=steps)
        spawn(_member, args=(ranks, port, job, size, name), nprocs=ranks)
        return Cost(**json.loads(Path(name, "cost.json").read_text()))


def _member(rank: int, size: int, port: int, job: Job, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    disable_progress_bars()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with process_group(LIMIT_SECONDS, "cpu") as ranks, frozen_gc():
        cost = _steps(ranks, _replicated(spec_of(job, "cpu"), size), Path(folder, "run"), name)
        if ranks.is_rank0:
            Path(folder, "cost.json").write_text(json.dumps(asdict(cost)))
        ranks.all_gather_object("done")


def _replicated(spec: RunSpec, ranks: int) -> RunSpec:
    device = spec.profile.device.model_copy(update={"count": ranks})
    parallel = spec.profile.parallel.model_copy(update={"strategy": "replicated"})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"device": device, "parallel": parallel})})


def _steps(ranks: Ranks, spec: RunSpec, folder: Path, name: str) -> Cost:
    """Take the steps, each followed by as many bare votes as it had."""
    assert ranks.host_gather is not None
    host_gather = ranks.host_gather = WatchedBallot(ranks.host_gather)
    device = open_device(spec.model_copy(update={"profile": _of_one(spec)}))
    with device.activate():
        setup = set_up(spec, device, Journal(None), lambda _backoff: None, ranks)
        requests = RunRequests(None, None, None)
        journal = Journal(None)
        run = RunContext(RunDirectory(folder), journal, requests, Watchdog(journal, LIMIT_SECONDS))
        training = Training(setup, run, EmergencyHostMemory())
        training.probe()
        rows = [_one_step(ranks, host_gather, training) for _ in range(setup.total_steps)][1:]
    step, votes, bare, inside = (statistics.median(column) for column in zip(*rows, strict=True))
    share = statistics.median(row[1] * row[2] / row[0] for row in rows)
    return Cost(name, ranks.size, step, int(votes), bare, share, max(0.0, inside / step - share))


def _one_step(ranks: Ranks, host_gather: WatchedBallot, training: Training) -> tuple[float, int, float, float]:
    """Seconds of the step, its votes, seconds of a bare vote, and seconds inside the step's votes."""
    votes, seconds, began = host_gather.votes, host_gather.seconds, time.perf_counter()
    training.one_step()
    for _ in range(BETWEEN_STEPS):
        ranks.broadcast_object([False, False])
    took, votes, inside = time.perf_counter() - began, host_gather.votes - votes, host_gather.seconds - seconds
    ranks.all_gather_object("ready")
    began = time.perf_counter()
    for _ in range(votes):
        ranks.all_gather_object(None)
    return took, votes, (time.perf_counter() - began) / votes, inside


def _of_one(spec: RunSpec) -> Any:
    return spec.profile.model_copy(update={"device": spec.profile.device.model_copy(update={"count": 1})})


if __name__ == "__main__":
    main()
