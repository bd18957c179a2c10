"""Runs a measurement on several ranks, each a process of this machine, and returns the result of rank 0.

Try: `python -m benchmarks.votes --ranks 2 --steps 3`
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from engine.config.schema.run import RunSpec
from engine.distributed.ranks import SINGLE_PROCESS, Ranks, process_group
from engine.model.config import disable_progress_bars

LIMIT_SECONDS = 300.0
"""Time limit of a collective."""

RankMeasurement = Callable[[Ranks, RunSpec], dict[str, Any]]
"""A module-level function (the processes import it), called on every rank; returns a JSON object."""


def measure_on_ranks(measurement: RankMeasurement, size: int, spec: RunSpec) -> dict[str, Any]:
    """Run `measurement` on `size` ranks, each in its own process, and return the result of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, args=(measurement, size, _free_port(), spec, folder), nprocs=size)
        return dict(json.loads(Path(folder, "result.json").read_text()))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _run_rank(rank: int, measurement: RankMeasurement, size: int, port: int, spec: RunSpec, folder: str) -> None:
    torch.set_num_threads(1)
    disable_progress_bars()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    if size == 1:
        Path(folder, "result.json").write_text(json.dumps(measurement(SINGLE_PROCESS, spec)))
        return
    with process_group(LIMIT_SECONDS, "cpu") as ranks:
        result = measurement(ranks, spec)
        if ranks.is_rank0:
            Path(folder, "result.json").write_text(json.dumps(result))
        ranks.all_gather_object("done")
