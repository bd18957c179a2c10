"""Measures what each rank of a run with sharded weights receives, writes and reads to save a checkpoint.

Run: python -m benchmarks.saving [--ranks 4] [--width 2048]        (CPU and gloo, two minutes, 6 GB of memory)

Saves a full model of random fp32 weights (200 M parameters with the width 2048) and the state of AdamW. "received" came
from other ranks, "hashed" was read from the disk to be hashed, "host" is how far the process grew above what it held
before. Times mean little, since the ranks share processor cores and a disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from benchmarks.job import Job, spec_of, write_job
from benchmarks.ranks import measure_on_ranks
from benchmarks.shard_loading import status_bytes
from engine.config.schema.run import RunSpec
from engine.device.open import open_device
from engine.distributed.elastic import spec_of_rank
from engine.distributed.ranks import Ranks
from engine.journal import checkpoints_on_disk
from engine.journal.events import Journal
from engine.model.config import disable_progress_bars
from engine.train.run.checkpoint_files import size_bytes, write_checkpoint
from engine.train.run.setup import set_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    asked = parser.parse_args()
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder, "job"), [64] * 64, vocabulary=512, hidden=asked.width, steps=1)
        found = measure_on_ranks(measure, asked.ranks, _spec(job, asked.ranks))
    print(f"{found['parameters'] / 1e6:.0f} M parameters, checkpoint of {found['size'] / 2**20:.0f} MiB, "
          f"{found['seconds']:.1f} s; MiB of each rank:")  # fmt: skip
    print(f"{'rank':>5}{'received':>10}{'hashed':>10}{'host':>10}")
    for rank, each in enumerate(found["ranks"]):
        received, hashed, grown = (each[name] / 2**20 for name in ("received", "hashed", "grown"))
        print(f"{rank:>5}{received:>10.1f}{hashed:>10.1f}{grown:>10.1f}")


def measure(ranks: Ranks, spec: RunSpec) -> dict[str, Any]:
    """Save a checkpoint; returns what each rank received from others, hashed and grew by, in bytes."""
    device = open_device(spec_of_rank(spec, ranks.local_rank))
    with device.activate(), tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        context = set_up(spec, device, Journal(None), lambda _backoff: None, ranks).context
        storage = context.strategy.checkpoint_storage(context.optimizer)
        counts = _counted(patch, ranks)
        before, began = status_bytes("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here

        def save() -> int:
            def fill(path: Path) -> dict[Path, str]:
                return storage.write_weights(path / "weights") | storage.write_optimizer(path)

            return size_bytes(write_checkpoint(Path(folder), 1, fill).path)

        size = ranks.run_on_rank0(save)
        seconds = time.perf_counter() - began
        counts["grown"] = status_bytes("VmHWM") - before
        parameters = sum(parameter.numel() for parameter in context.loaded.model.parameters())
        return {"parameters": parameters, "size": size, "seconds": seconds, "ranks": ranks.all_gather_object(counts)}


def _counted(patch: pytest.MonkeyPatch, ranks: Ranks) -> dict[str, int]:
    """Count from now on: bytes received from other ranks, and bytes read to be hashed."""
    counts = {"received": 0, "hashed": 0}
    exchange, hashing = dist.all_to_all_single, checkpoints_on_disk.sha256

    def exchanging(received: Tensor, sent: Tensor, sizes: list[int], *more: Any) -> Any:
        counts["received"] += sum(sizes) - sizes[ranks.rank]
        return exchange(received, sent, sizes, *more)

    def reading(path: Path) -> str:
        counts["hashed"] += path.stat().st_size
        return hashing(path)

    patch.setattr(dist, "all_to_all_single", exchanging)
    patch.setattr(checkpoints_on_disk, "sha256", reading)
    return counts


def _spec(job: Job, ranks: int) -> RunSpec:
    spec = spec_of(job, "cpu").model_dump(by_alias=True)
    spec["profile"]["device"]["count"] = ranks
    spec["profile"]["parallel"] |= {"strategy": "sharded", "shard": "parameters"}
    return RunSpec.model_validate(spec)


if __name__ == "__main__":
    main()
