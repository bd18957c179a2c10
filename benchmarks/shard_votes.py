"""Measures steps of sharded ranks with a vote before each collective and with one vote per micro-batch, in turn.

Run: python -m benchmarks.shard_votes [--ranks 2 4] [--pairs 12] [--layers 24]        (CPU and gloo, some minutes)

Full fine-tuning of a model with many small layers, whose weights are gathered for each use. Steps alternate between the
two ways of voting, so both see the same load of the machine; a pair is one step of each. Reported are medians of the
steps, the median over pairs of the time saved, and the time of one vote with all ranks ready. Absolute times mean
little, since the ranks share processor cores: on GPUs the same votes wait for the host alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.job import BATCH, Job, spec_of, write_job
from benchmarks.ranks import measure_on_ranks
from engine.batching.micro_batches import MicroBatch
from engine.config.schema.run import RunSpec
from engine.device.open import open_device
from engine.distributed.elastic import spec_of_rank
from engine.distributed.ranks import Ranks
from engine.distributed.votes import VotedGroup
from engine.journal.events import Journal
from engine.model.config import disable_progress_bars
from engine.train.run.setup import set_up
from engine.train.step.budget_growth import CeilingWatch
from engine.train.step.transaction import StepTransaction

TOKENS, WIDTH, ROWS = 32, 64, 4
"""Tokens of a sequence, hidden size of the model, and sequences of a micro-batch."""
VOTES_MEASURED = 500


class ChosenDistance(CeilingWatch):
    """Stands for the watch of the ceiling: every plan is as far from it as was chosen."""

    far = False

    def is_far(self, plan: Sequence[MicroBatch]) -> bool:
        """Return what was chosen."""
        return self.far


def main() -> None:
    """Run the measurements and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--layers", type=int, default=24)
    asked = parser.parse_args()
    disable_progress_bars()
    print(f"{'ranks':>5}{'votes of a micro-batch':>24}{'a step':>22}{'saved':>9}{'a vote':>10}")
    for ranks in asked.ranks:
        found = measure(ranks, asked.pairs, asked.layers)
        votes = f"{found['votes'][0]:.1f} -> {found['votes'][1]:.1f}"
        steps = f"{1000 * found['seconds'][0]:.0f} -> {1000 * found['seconds'][1]:.0f} ms"
        saved = f"{100 * found['saved']:>7.1f} %"
        print(f"{ranks:>5}{votes:>24}{steps:>22}{saved}{1000 * found['vote_seconds']:>7.2f} ms", flush=True)


def measure(ranks: int, pairs: int, layers: int) -> dict[str, Any]:
    """Take `pairs` pairs of steps on `ranks` processes of this machine; returns what `_measure_pairs` returns on rank
    0."""
    with tempfile.TemporaryDirectory() as folder:
        steps = 2 * pairs + 2
        lengths = [TOKENS] * (BATCH * steps)
        job = write_job(Path(folder, "job"), lengths, vocabulary=512, hidden=WIDTH, steps=steps, layers=layers)
        return measure_on_ranks(_measure_pairs, ranks, _spec(job, ranks))


def _spec(job: Job, ranks: int) -> RunSpec:
    spec = spec_of(job, "cpu").model_dump(by_alias=True)
    spec["recipe"]["train"] |= {"micro_batch": ROWS}
    spec["profile"]["device"]["count"] = ranks
    spec["profile"]["parallel"] |= {"strategy": "sharded", "shard": "parameters"}
    return RunSpec.model_validate(spec)


def _measure_pairs(ranks: Ranks, spec: RunSpec) -> dict[str, Any]:
    """Take all steps, in turn with many votes and with few.

    Returns pairs of medians (many, few): `votes` of a micro-batch and `seconds` of a step; the share of the time that
    was `saved`, median over pairs of steps; and `vote_seconds`, the time of one vote with all ranks ready.
    """
    device = open_device(spec_of_rank(spec, ranks.local_rank))
    with device.activate():
        setup = set_up(spec, device, Journal(None), lambda _backoff: None, ranks)
        transaction, voted_group = StepTransaction(setup.context), setup.context.strategy.voted_group
        assert voted_group is not None
        transaction.ceiling_watch = watch = ChosenDistance(setup.context)
        measured = []
        for step in range(1, setup.total_steps + 1):
            watch.far = step % 2 == 0
            votes, began = voted_group.votes, time.perf_counter()
            outcome = transaction.run(step, setup.order.step(step))
            measured.append((time.perf_counter() - began, (voted_group.votes - votes) / outcome.micro_batches))
        vote_seconds = _time_of_vote(ranks, voted_group)
    many, few = measured[2::2], measured[3::2]  # the first step of each kind warms up
    return {
        "seconds": [statistics.median(seconds for seconds, _ in each) for each in (many, few)],
        "votes": [statistics.median(votes for _, votes in each) for each in (many, few)],
        "saved": statistics.median(1 - later[0] / earlier[0] for earlier, later in zip(many, few, strict=True)),
        "vote_seconds": vote_seconds,
    }


def _time_of_vote(ranks: Ranks, voted_group: VotedGroup) -> float:
    """Seconds of one vote, with all ranks ready."""
    ranks.all_gather_object("ready")
    began = time.perf_counter()
    for _ in range(VOTES_MEASURED):
        voted_group.ready()
    return (time.perf_counter() - began) / VOTES_MEASURED


if __name__ == "__main__":
    main()
