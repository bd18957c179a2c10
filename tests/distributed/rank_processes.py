"""Real ranks for tests: processes over gloo on this machine, started once for many cases.

Not a test module. `run_ranks(cases, size)` runs every case in order on all ranks, each in its own process, and returns
{case name: [result of rank 0, result of rank 1, ...]}. A case is a module-level function of (ranks, folder), or a
partial of one.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from engine.device.oom import frozen_gc
from engine.distributed.ranks import Ranks, process_group

multiprocessing.set_forkserver_preload(["tests.distributed.rank_workbench", "transformers.models.qwen2.modeling_qwen2"])
"""Ranks are forked from a process that has imported this and never does anything else: importing the engine takes
seconds of a processor, and there are dozens of ranks."""

Case = Callable[[Ranks, Path], Any]
LIMIT_SECONDS = 300.0
"""Ranks that wait for each other for so long are in a deadlock, on the slowest machine."""


def run_ranks(
    cases: Sequence[Case], folder: Path, *, size: int = 2, limit_seconds: float = LIMIT_SECONDS
) -> dict[str, list[Any]]:
    """Run `cases` on `size` ranks that wait for each other up to the limit; what a case raises on any rank fails the
    call."""
    arguments = arguments_of_ranks(cases, folder, size=size, limit_seconds=limit_seconds)
    start: Any = vars(mp)["start_processes"]  # torch gives it no types
    start(member, args=arguments, nprocs=size, start_method="forkserver")
    results = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(size)]
    return {name_of(case): [result[name_of(case)] for result in results] for case in cases}


def arguments_of_ranks(cases: Sequence[Case], folder: Path, *, size: int, limit_seconds: float) -> tuple[Any, ...]:
    """The arguments of `member`, besides its rank, for ranks that meet at a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return size, free.getsockname()[1], list(cases), str(folder), limit_seconds


def name_of(case: Case) -> str:
    """The name of the case's function."""
    return str((case.func if isinstance(case, partial) else case).__name__)


def member(rank: int, size: int, port: int, cases: list[Case], folder: str, limit_seconds: float) -> None:
    """Work as `rank` of `size` ranks: run all cases and write their results into the folder."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with process_group(limit_seconds, "cpu") as ranks, frozen_gc():
        results = {name_of(case): case(ranks, Path(folder)) for case in cases}
        torch.save(results, Path(folder) / f"rank-{rank}.pt")
        ranks.all_gather_object("done")
