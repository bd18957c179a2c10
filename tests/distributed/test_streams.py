"""Memory goes back to the driver only after every stream of the device was waited for, within a bound.

Ranks on the CPU have no streams. Here they have pretended ones: what a rank allocates, gathers and reduces is noted as
work queued on a stream of that name, until the CUDA device's own code waits for the card. The code that releases cached
blocks is the CUDA device's, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from engine.device.cuda import CudaDevice, wait_for_card
from engine.device.oom import StuckDeviceError
from engine.distributed.ranks import Ranks
from tests.distributed import rank_workbench
from tests.distributed.faults import Fault, Witness
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import FULL, NEEDS_SHARDS, RankWorkbench, sharded, small_model


class StreamedDevice(Witness):
    """A metered device with pretended streams, that releases memory as a CUDA device does."""

    def release_cached(self) -> None:
        CudaDevice.release_cached(cast(CudaDevice, self))

    def wait_until_idle(self) -> None:
        CudaDevice.wait_until_idle(cast(CudaDevice, self))


class Streams:
    """The pretended streams of a rank."""

    def __init__(self) -> None:
        self.busy: set[str] = set()
        self.releases = 0
        self.too_early: list[list[str]] = []
        """The streams that had work, for each time that memory was released before they were waited for."""

    def synchronize(self, device: torch.device | None = None) -> None:
        """Stands for torch.cuda.synchronize."""
        self.busy.clear()

    def empty_cache(self) -> None:
        """Stands for torch.cuda.empty_cache."""
        self.releases += 1
        if self.busy:
            self.too_early.append(sorted(self.busy))

    def queueing(self, name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        """`launch`, noted as work on the stream `name`."""

        def launched(*arguments: Any, **named: Any) -> Any:
            self.busy.add(name)
            return launch(*arguments, **named)

        return launched


@contextmanager
def pretended_streams() -> Iterator[Streams]:
    """Inside, torch.cuda waits for and releases pretended streams, and collectives of FSDP2 are noted on them."""
    streams, patch = Streams(), pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "synchronize", streams.synchronize)
    patch.setattr(torch.cuda, "empty_cache", streams.empty_cache)
    patch.setattr(rank_workbench, "Witness", StreamedDevice)
    patch.setattr(StreamedDevice, "upload", streams.queueing("compute", StreamedDevice.upload))
    for kind, name in (("DefaultAllGather", "all-gather"), ("DefaultReduceScatter", "reduce-scatter")):
        collective = getattr(_fsdp_collectives, kind)
        patch.setattr(collective, "__call__", streams.queueing(name, collective.__call__))
    try:
        yield streams
    finally:
        patch.undo()


def failing(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Let an allocation of rank 1 fail while the model is loaded, then in a backward pass. Returns the releases after
    each, and those that came too early."""
    with pretended_streams() as streams:
        tables = small_model(folder, sharded(FULL, "parameters"))
        at_load = Fault(3) if ranks.rank == 1 else None
        work = RankWorkbench(folder, ranks, tables, at_start=at_load)
        releases = [streams.releases]
        first = len(work.device.asked)
        work.steps()
        backward = [n for n, place in enumerate(work.device.asked[first:], 1) if place == "backward"]
        work.reset()
        if ranks.rank == 1:
            work.device.fail_at(backward[1])
        work.steps()
        releases.append(streams.releases)
        told = [(each.oom.rank, each.oom.failure.phase) for each in work.told]
        work.close()
        return {"releases": releases, "too_early": streams.too_early, "told": told}


@NEEDS_SHARDS
def test_every_stream_is_waited_for_before_memory_is_released(tmp_path: Path) -> None:
    for found in run_ranks([failing], tmp_path)["failing"]:
        assert found["too_early"] == []
        assert 0 < found["releases"][0] < found["releases"][1]
        assert (1, "backward") in found["told"]


def test_work_that_never_ends_is_an_error_within_the_bound() -> None:
    never = threading.Event()
    with pytest.raises(StuckDeviceError, match="a rank is missing in a collective"):
        wait_for_card(cast(Callable[[], None], never.wait), 0.05)
    never.set()


def test_errors_of_queued_work_are_raised_where_it_is_waited_for() -> None:
    def broken() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)

    for seconds in (None, 60.0):
        with pytest.raises(torch.AcceleratorError):
            wait_for_card(broken, seconds)
