"""Makes the communicators of the device's collectives before anything else takes memory, and explains why they cannot
be made.

NCCL makes a communicator at the first collective of a group and allocates its buffers then, outside torch's allocator
and its cap (0.7 to 1.6 GB, according to reports by others). Without a warm-up, a failure of this allocation happens in
the middle of the first step, where it looks as if a rank was lost. Every kind of collective is run once, because some
allocate more at their first use.

Binding groups to a device (`init_process_group(device_id=...)`) would make communicators early, too, but is not
possible: torch then splits the communicator of all ranks for every later group. For a later gloo group only the ranks
outside it would do so, and would wait for the ranks inside it for ever (`_new_process_group_helper` of torch 2.13;
pytorch issue 145376).

Try: `pytest tests/distributed/test_warm_up.py`
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from engine.device.base import Device
from engine.device.bounded import within
from engine.device.oom import classify
from engine.distributed.host_gather import LostRankError, raising_lost_rank
from engine.errors import EnvironmentProblem, MemoryExhaustedError, TunedeckError

VALUES = 256
"""Elements that each rank sends in each collective."""

_SHARED_MEMORY = re.compile(r"(/dev/shm|nccl-shm|shared memory segment)|posix_fallocate", re.IGNORECASE)
"""In NCCL's last error, quoted by torch: src/misc/shmutils.cc and, before NCCL 2.10, include/shm.h."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def warm_up(device: Device, seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """Run every kind of collective once on device tensors, in `group` or among all ranks; all of them call this.

    Raises:
        EnvironmentProblem: NCCL found no room in /dev/shm, or a collective gave a wrong result.
        MemoryExhaustedError: NCCL found no room on the device.
        LostRankError: another rank failed, or did not come within `seconds`.
    """

    def run() -> None:
        with device.activate(), _explained():
            run_each_collective(device.torch_device, group)
            device.synchronize()

    within(seconds, run, lambda: LostRankError(f"not all ranks made their communicators within {seconds:.0f} s"))


def run_each_collective(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Run every kind of collective that training uses and check the results. All ranks of the group run all of them,
    also after a wrong result. Raises EnvironmentProblem for a wrong result on this rank; errors of NCCL or gloo are
    raised unchanged."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    numbers = torch.arange(size * VALUES, dtype=torch.float32, device=device)
    here, total = numbers + rank, size * numbers + size * (size - 1) / 2
    mine = slice(rank * VALUES, (rank + 1) * VALUES)
    summed, first, scattered = here.clone(), here.clone(), torch.empty_like(here[mine])
    gathered, exchanged = torch.empty_like(here), torch.empty_like(here)
    dist.all_reduce(summed, group=group)
    _reduce_scatter(scattered, here.clone(), group=group)
    _all_gather(gathered, total[mine].clone(), group=group)
    dist.all_to_all_single(exchanged, here.clone(), group=group)
    dist.broadcast(first, group=group, group_src=0)
    places = torch.arange(size, device=device).float().repeat_interleave(VALUES)
    found = {
        "all-reduce": torch.equal(summed, total),
        "reduce-scatter": torch.equal(scattered, total[mine]),
        "all-gather": torch.equal(gathered, total),
        "all-to-all": torch.equal(exchanged, numbers[mine].repeat(size) + places),
        "broadcast": torch.equal(first, numbers),
    }
    if wrong := [kind for kind, right in found.items() if not right]:
        raise EnvironmentProblem(
            f"the {' and '.join(wrong)} of the ranks gives a wrong result",
            expected="exact sums of small whole numbers",
            fix="see tunedeck doctor; NCCL_P2P_DISABLE=1 avoids transfers between GPUs that the host cannot isolate",
        )


@contextmanager
def _explained() -> Iterator[None]:
    """Inside the block, turn errors of communicators into errors with a cause and advice, as `explain` does; errors
    that `explain` does not know are raised as LostRankError."""
    try:
        with raising_lost_rank():
            yield
    except (LostRankError, RuntimeError, OSError) as error:
        known = explain(error.__cause__ if isinstance(error, LostRankError) and error.__cause__ else error)
        if known is None:
            raise
        raise known from error


def explain(error: BaseException) -> TunedeckError | None:
    """The error to raise when a communicator could not be made: EnvironmentProblem if /dev/shm is full,
    MemoryExhaustedError if the device is; None for any other cause."""
    text = str(error)
    if _SHARED_MEMORY.search(text) and "No space left on device" in text:
        return EnvironmentProblem(
            "NCCL found no room in /dev/shm, through which the GPUs of a machine talk",
            expected="some 10 MB for each pair of GPUs; containers often have 64 MB in all",
            fix="docker run --shm-size=2g or --ipc=host, in Kubernetes an emptyDir of medium Memory at /dev/shm; "
            "NCCL_SHM_DISABLE=1 works without it, slower",
        )
    found = classify(error)
    if found is None or found.kind != "device":
        return None
    return MemoryExhaustedError(
        f"no room on the device for the communicators of the ranks: {text.splitlines()[-1]}",
        fix="raise device.reserve_gib in the profile, or close what else holds memory on the GPUs",
    )
