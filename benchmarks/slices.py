"""Measures the memory of ranks that share one long sequence (sequence parallelism), and the cost of their votes.

Run: python -m benchmarks.slices [--ranks 1 2 4] [--tokens 4096]        (CPU and gloo, a minute or two)

Runs steps of the engine on metered devices: LoRA on a small model with gradient checkpointing, one sequence at a time.
The memory reported is that of the rank that uses most, beside the planned memory. The ranks vote before every exchange
of heads and positions. After the step, when all ranks are ready, they repeat the same number of votes to measure the
cost of voting itself. Absolute times mean little, since the ranks share processor cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.job import Job, spec_of, write_job
from benchmarks.ranks import measure_on_ranks
from engine.batching.predicted_cost import micro_batch_cost
from engine.config.schema.run import RunSpec
from engine.device.open import open_device
from engine.distributed.elastic import spec_of_rank
from engine.distributed.ranks import Ranks
from engine.journal.events import Journal
from engine.model.config import disable_progress_bars
from engine.train.run.setup import set_up
from engine.train.step.transaction import StepTransaction

STEPS = 2


def main() -> None:
    """Run the measurements and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=4096)
    asked = parser.parse_args()
    disable_progress_bars()
    print(f"one sequence of {asked.tokens} tokens, MiB above weights, adapters and optimizer state:")
    print(f"{'ranks':>5}{'held':>10}{'planned':>10}{'step':>9}{'votes':>7}{'a vote':>10}{'share':>9}")
    for ranks in asked.ranks:
        found = measure(ranks, asked.tokens)
        shares = f"{found['step_seconds']:>7.1f} s{found['votes']:>7}{1000 * found['vote_seconds']:>7.2f} ms"
        share = found["votes"] * found["vote_seconds"] / found["step_seconds"]
        held, planned = (found[name] / 2**20 for name in ("held_bytes", "planned_bytes"))
        print(f"{ranks:>5}{held:>10.2f}{planned:>10.2f}{shares}{100 * share:>7.2f} %", flush=True)


def measure(ranks: int, tokens: int) -> dict[str, Any]:
    """Run two steps of sequences of `tokens` tokens on `ranks` processes with sequence parallelism; returns what
    `measure_steps` returns on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder, "job"), [tokens] * 2 * STEPS, vocabulary=512, hidden=256, steps=STEPS)
        return measure_on_ranks(measure_steps, ranks, _spec(job, ranks, tokens))


def _spec(job: Job, ranks: int, tokens: int) -> RunSpec:
    """Return the run spec: LoRA on sequences of `tokens` tokens that `ranks` ranks share, two sequences per step and
    one per micro-batch."""
    spec = spec_of(job, "metered").model_dump(by_alias=True)
    spec["recipe"]["method"] = {"kind": "lora", "rank": 8}
    spec["recipe"]["data"]["max_length"] = tokens + 1
    spec["recipe"]["train"] |= {"batch_size": 2, "micro_batch": 1, "gradient_checkpointing": True}
    spec["profile"]["device"]["count"] = ranks
    spec["profile"]["parallel"] |= {"strategy": "replicated" if ranks > 1 else "single", "sequence": ranks}
    return RunSpec.model_validate(spec)


def measure_steps(ranks: Ranks, spec: RunSpec) -> dict[str, Any]:
    """Run two steps, then repeat the votes of the second step with all ranks ready.

    Returns bytes of the rank that uses most (`static_bytes` between steps; `held_bytes` and `planned_bytes`, measured
    and planned, above these at the peak), the `step_seconds` of the second step, its number of `votes`, and
    `vote_seconds`, the time of one vote.
    """
    device = open_device(spec_of_rank(spec, ranks.local_rank))
    with device.activate():
        setup = set_up(spec, device, Journal(None), lambda _backoff: None, ranks)
        transaction, voted_group = StepTransaction(setup.context), setup.context.strategy.voted_group
        transaction.run(1, setup.order.step(1))
        voted, began = voted_group.votes if voted_group else 0, time.perf_counter()
        transaction.run(2, setup.order.step(2))
        took, votes = time.perf_counter() - began, voted_group.votes - voted if voted_group else 0
        began = time.perf_counter()
        for _ in range(votes):
            assert voted_group is not None
            voted_group.ready()
        vote_seconds = (time.perf_counter() - began) / max(1, votes)
        plan = micro_batch_cost(spec, setup.context.bounds).plan
        assert plan is not None
        peaks = ranks.all_gather_object(transaction.work.peak_bytes)
    static_bytes = setup.context.static_bytes
    return {
        "static_bytes": static_bytes,
        "held_bytes": max(peaks) - static_bytes,
        "planned_bytes": plan.peak_bytes - static_bytes,
        "step_seconds": took,
        "votes": votes,
        "vote_seconds": vote_seconds,
    }


if __name__ == "__main__":
    main()
