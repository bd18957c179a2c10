"""Real ranks for tests: processes over gloo on this machine, started once for many cases.

Not a test module. `run_crew(cases, size)` imports torch once per rank, runs every case in order on all ranks, and
returns {case name: [result of rank 0, result of rank 1, ...]}. A case is a module-level function of (ranks, folder).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from engine.parallel.ranks import Ranks, joined
from engine.train.failure import quick_to_collect

Case = Callable[[Ranks, Path], Any]
LIMIT_SECONDS = 60.0


def run_crew(cases: Sequence[Case], folder: Path, *, size: int = 2) -> dict[str, list[Any]]:
    """Run `cases` on `size` ranks; what a case raises on any rank fails the call."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_member, args=(size, port, list(cases), str(folder)), nprocs=size)
    results = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(size)]
    return {case.__name__: [result[case.__name__] for result in results] for case in cases}


def _member(rank: int, size: int, port: int, cases: list[Case], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with joined(LIMIT_SECONDS, "cpu") as ranks, quick_to_collect():
        results = {case.__name__: case(ranks, Path(folder)) for case in cases}
        torch.save(results, Path(folder) / f"rank-{rank}.pt")
        ranks.tell("done")
