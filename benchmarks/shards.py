"""Measures the memory of ranks with sharded weights, compared with one process, and the cost of their votes.

Run: python -m benchmarks.shards [--ranks 1 2 4]        (CPU and gloo, a few minutes)

Runs steps of the engine on metered devices: full fine-tuning of a small model whose weights are gathered for each use
("parameters", ZeRO-3) or stay gathered from forward to backward ("gradients", ZeRO-2). The memory reported is that of
the rank that uses most, beside the planned memory. The ranks vote before every gathering of weights and every reduction
of gradients. After the step, when all ranks are ready, they repeat the same number of votes to measure the cost of
voting itself. Absolute times mean little, since the ranks share processor cores.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.job import Job, spec_of, write_job
from benchmarks.ranks import measure_on_ranks
from benchmarks.slices import measure_steps
from engine.config.schema.run import RunSpec
from engine.model.config import disable_progress_bars

TOKENS, WIDTH = 64, 192


def main() -> None:
    """Run the measurements and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    asked = parser.parse_args()
    disable_progress_bars()
    print("MiB on the rank that holds most:")
    print(f"{'ranks':>5} {'shard':<11}{'between steps':>14}{'peak':>8}{'planned':>9}", end="")
    print(f"{'step':>9}{'votes':>7}{'a vote':>10}{'share':>9}")
    for ranks in asked.ranks:
        for shard in ("parameters", "gradients") if ranks > 1 else ("-",):
            found = measure(ranks, shard)
            held = [found["static_bytes"], found["static_bytes"] + found["held_bytes"]]
            still, peak, planned = (each / 2**20 for each in (*held, found["static_bytes"] + found["planned_bytes"]))
            share = 100 * found["votes"] * found["vote_seconds"] / found["step_seconds"]
            memory = f"{ranks:>5} {shard:<11}{still:>14.1f}{peak:>8.1f}{planned:>9.1f}"
            cost = f"{found['step_seconds']:>7.2f} s{found['votes']:>7}{1000 * found['vote_seconds']:>7.2f} ms"
            print(f"{memory}{cost}{share:>7.1f} %", flush=True)


def measure(ranks: int, shard: str) -> dict[str, Any]:
    """Run two steps on `ranks` processes of this machine, with `shard` = "parameters" (ZeRO-3) or "gradients" (ZeRO-2).
    Returns what `benchmarks.slices.measure_steps` measured in the second step on rank 0: peak bytes, seconds, and the
    number of votes."""
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder, "job"), [TOKENS] * 64, vocabulary=512, hidden=WIDTH, steps=2)
        return measure_on_ranks(measure_steps, ranks, _spec(job, ranks, shard))


def _spec(job: Job, ranks: int, shard: str) -> RunSpec:
    spec = spec_of(job, "metered").model_dump(by_alias=True)
    spec["recipe"]["train"] |= {"micro_batch": 4}
    spec["profile"]["device"]["count"] = ranks
    strategy = {"strategy": "sharded", "shard": shard} if ranks > 1 else {"strategy": "single"}
    spec["profile"]["parallel"] |= strategy
    return RunSpec.model_validate(spec)


if __name__ == "__main__":
    main()
