"""Measures the cost of votes: how many a step has, the time of a vote, and the share of all votes in a step.

Run: python -m benchmarks.votes [--ranks 2 4] [--steps 10]        (CPU and gloo, a minute or two)

The engine's replicated training runs on small models of two sizes. Every vote of a step is counted and timed. After the
step, when all ranks are ready, the ranks repeat the same number of votes: their time is the cost of voting itself. The
rest of the time in the step's votes is spent waiting for the slowest rank, for which the gradient all-reduce would wait
without votes, too. Only ratios within a step are meaningful, since the ranks share processor cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.job import spec_of, write_job
from benchmarks.ranks import LIMIT_SECONDS, measure_on_ranks
from engine.config.schema.run import RunSpec
from engine.device.oom import frozen_gc
from engine.device.open import open_device
from engine.distributed.elastic import spec_of_rank
from engine.distributed.ranks import Ranks
from engine.distributed.votes import HostGather
from engine.journal.control import RunRequests
from engine.journal.directory import RunDirectory
from engine.journal.events import Journal
from engine.model.config import disable_progress_bars
from engine.train.run.checkpoints import EmergencyHostMemory
from engine.train.run.loop import Training
from engine.train.run.run_context import RunContext, Watchdog
from engine.train.run.setup import set_up

SIZES = {"small": (64, 48), "larger": (192, 256)}
"""Hidden size of each model, and tokens per sequence; a step has 32 sequences."""

BETWEEN_STEPS = 2
"""Votes of the training loop between two steps: whether to end, and whether to write a checkpoint."""


@dataclass(frozen=True)
class Cost:
    """The cost of votes in one run: medians over the steps, measured on rank 0."""

    step_seconds: float
    votes: int
    """Votes of a step, including those between steps."""
    vote_seconds: float
    """Seconds of one vote when all ranks are ready."""
    share: float
    """Share of the step's time that its votes would take if all ranks were always ready."""
    waiting_share: float
    """Share of the step's time spent in votes waiting for another rank."""


class TimedHostGather(HostGather):
    """Wraps a HostGather: counts its gathers, each of which is a vote, and adds up their seconds."""

    def __init__(self, host_gather: HostGather) -> None:
        self._host_gather = host_gather
        self.votes, self.seconds = 0, 0.0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, gathered by the wrapped HostGather; count and time the call."""
        began = time.perf_counter()
        values = self._host_gather.gather(value)
        self.votes += 1
        self.seconds += time.perf_counter() - began
        return values


def main() -> None:
    """Run the measurements and print a table."""
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
    """Train for `steps` steps on `ranks` processes of this machine with the small model `size`, and return the cost of
    the votes."""
    with tempfile.TemporaryDirectory() as folder:
        width, tokens = SIZES[size]
        job = write_job(Path(folder, "job"), [tokens] * 32, vocabulary=512, hidden=width, steps=steps)
        return Cost(**measure_on_ranks(_measure_steps, ranks, _replicated(spec_of(job, "cpu"), ranks)))


def _replicated(spec: RunSpec, ranks: int) -> RunSpec:
    device = spec.profile.device.model_copy(update={"count": ranks})
    parallel = spec.profile.parallel.model_copy(update={"strategy": "replicated"})
    return spec.model_copy(update={"profile": spec.profile.model_copy(update={"device": device, "parallel": parallel})})


def _measure_steps(ranks: Ranks, spec: RunSpec) -> dict[str, Any]:
    """Run all steps; after each, repeat the same number of votes with all ranks ready. Returns a `Cost` as a dict."""
    assert ranks.host_gather is not None
    host_gather = ranks.host_gather = TimedHostGather(ranks.host_gather)
    device = open_device(spec_of_rank(spec, ranks.local_rank))
    with tempfile.TemporaryDirectory() as folder, device.activate(), frozen_gc():
        setup = set_up(spec, device, Journal(None), lambda _backoff: None, ranks)
        requests = RunRequests(None, None, None)
        journal = Journal(None)
        run = RunContext(RunDirectory(Path(folder)), journal, requests, Watchdog(journal, LIMIT_SECONDS))
        training = Training(setup, run, EmergencyHostMemory())
        training.probe()
        rows = [_one_step(ranks, host_gather, training) for _ in range(setup.total_steps)][1:]
    step, votes, ready, inside = (statistics.median(column) for column in zip(*rows, strict=True))
    share = statistics.median(row[1] * row[2] / row[0] for row in rows)
    return asdict(Cost(step, int(votes), ready, share, max(0.0, inside / step - share)))


def _one_step(ranks: Ranks, host_gather: TimedHostGather, training: Training) -> tuple[float, int, float, float]:
    """Run one step, then repeat its votes with all ranks ready. Returns the seconds of the step, the number of its
    votes, the seconds of one vote with all ranks ready, and the seconds that the step spent in votes."""
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


if __name__ == "__main__":
    main()
