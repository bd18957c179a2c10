"""Makes the communicators of the device's collectives before anything else takes memory, and explains why they cannot
be made.

NCCL makes a communicator at a group's first collective and allocates its buffers then, outside torch's allocator and
its cap (0.7 to 1.6 GB, according to reports by others): a failure in the first step would look like a lost rank. Every
kind of collective is run once, because some allocate more at their first use.

Binding groups to a device (`init_process_group(device_id=...)`) would make communicators early, too, but torch then
splits the communicator of all ranks for every later group; for a gloo group only the ranks outside it would do so, and
would wait for ever (`_new_process_group_helper` of torch 2.13; pytorch issue 145376).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from engine.device.base import Device, within
from engine.device.oom import classify
from engine.distributed.votes import LostRankError, raising_lost_rank
from engine.errors import EnvironmentProblem, MemoryExhaustedError, TunedeckError

VALUES = 256
"""Elements that each rank sends to each rank in each collective of the warm-up."""
PERIOD = 1021
"""Values repeat after so many, so that their sums over ranks are exact in fp32 at any size."""

_SHARED_MEMORY = re.compile(r"(/dev/shm|nccl-shm|shared memory segment)|posix_fallocate", re.IGNORECASE)
"""In NCCL's last error, quoted by torch: src/misc/shmutils.cc and, before NCCL 2.10, include/shm.h."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def warm_up(device: Device, seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """Run every kind of collective once on the device, in `group` or among all ranks; all of them call this.

    EnvironmentProblem: no room in /dev/shm, or a wrong result. MemoryExhaustedError: no room on the device.
    LostRankError: another rank failed, or did not come within `seconds`.
    """

    def run() -> None:
        with device.activate(), _explained():
            run_each_collective(device.torch_device, group)
            device.synchronize()

    within(seconds, run, lambda: LostRankError(f"not all ranks created their communicators within {seconds:.0f} s"))


def run_each_collective(
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    values: int = VALUES,
    ready: Callable[[], None] = lambda: None,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Run every kind of collective that training uses, all of them also after a wrong result; returns the seconds of
    each.

    Each rank sends `values` elements to each rank. `ready` is called before each collective, `synchronize` waits for
    the device around it. EnvironmentProblem: a wrong result on this rank; errors of NCCL or gloo pass unchanged.
    """
    seconds, wrong = dict[str, float](), []

    def timed(kind: str, launch: Callable[[], object]) -> None:
        synchronize()
        ready()
        began = time.perf_counter()
        launch()
        synchronize()
        seconds[kind] = time.perf_counter() - began

    for kind, run in KINDS.items():
        found, expected = run(_Numbers(device, group, values), partial(timed, kind))
        if not torch.equal(found, expected):
            wrong.append(kind)
    if wrong:
        raise EnvironmentProblem(
            f"the {' and '.join(wrong)} between the ranks gives a wrong result",
            expected="exact sums of small integers",
            fix="see tunedeck doctor; NCCL_P2P_DISABLE=1 avoids transfers between GPUs that the host cannot isolate",
        )
    return seconds


class _Numbers:
    """What this rank sends: small whole numbers, plus its rank, a slot of `values` for each rank."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, values: int) -> None:
        self.group, self.size, self.rank, self.values = group, dist.get_world_size(group), dist.get_rank(group), values
        self.plain = (torch.arange(self.size * values, device=device) % PERIOD).float()
        self.slot = slice(self.rank * values, (self.rank + 1) * values)

    def sent(self) -> Tensor:
        return self.plain + self.rank

    def total(self) -> Tensor:
        """The sum of what all ranks send."""
        return self.size * self.plain + self.size * (self.size - 1) / 2


Timed = Callable[[Callable[[], object]], None]
"""Calls a function, which launches a collective, and times it."""


def _summed(numbers: _Numbers, timed: Timed) -> tuple[Tensor, Tensor]:
    summed = numbers.sent()
    timed(lambda: dist.all_reduce(summed, group=numbers.group))
    return summed, numbers.total()


def _scattered(numbers: _Numbers, timed: Timed) -> tuple[Tensor, Tensor]:
    sent, scattered = numbers.sent(), torch.empty_like(numbers.plain[numbers.slot])
    timed(lambda: _reduce_scatter(scattered, sent, group=numbers.group))
    return scattered, numbers.total()[numbers.slot]


def _gathered(numbers: _Numbers, timed: Timed) -> tuple[Tensor, Tensor]:
    sent, gathered = numbers.plain[numbers.slot].clone(), torch.empty_like(numbers.plain)
    timed(lambda: _all_gather(gathered, sent, group=numbers.group))
    return gathered, numbers.plain


def _exchanged(numbers: _Numbers, timed: Timed) -> tuple[Tensor, Tensor]:
    sent, exchanged = numbers.sent(), torch.empty_like(numbers.plain)
    timed(lambda: dist.all_to_all_single(exchanged, sent, group=numbers.group))
    senders = torch.arange(numbers.size, device=sent.device).float()
    return exchanged, (numbers.plain[numbers.slot] + senders[:, None]).flatten()


def _broadcast(numbers: _Numbers, timed: Timed) -> tuple[Tensor, Tensor]:
    first = numbers.sent()
    timed(lambda: dist.broadcast(first, group=numbers.group, group_src=0))
    return first, numbers.plain


KINDS: dict[str, Callable[[_Numbers, Timed], tuple[Tensor, Tensor]]] = {
    "all-reduce": _summed,
    "reduce-scatter": _scattered,
    "all-gather": _gathered,
    "all-to-all": _exchanged,
    "broadcast": _broadcast,
}
"""By kind: a function that runs it and returns (result, expected result)."""


@contextmanager
def _explained() -> Iterator[None]:
    """Inside the block, `explain` errors of communicators; unknown ones become LostRankError."""
    try:
        with raising_lost_rank():
            yield
    except (LostRankError, RuntimeError, OSError) as error:
        known = explain(error.__cause__ if isinstance(error, LostRankError) and error.__cause__ else error)
        if known is None:
            raise
        raise known from error


def explain(error: BaseException) -> TunedeckError | None:
    """EnvironmentProblem if /dev/shm is full, MemoryExhaustedError if the device is; None for any other cause."""
    text = str(error)
    if _SHARED_MEMORY.search(text) and "No space left on device" in text:
        return EnvironmentProblem(
            "NCCL has no space in /dev/shm, which the GPUs of a machine use to communicate",
            expected="about 10 MB for each pair of GPUs; containers often have 64 MB in total",
            fix="docker run --shm-size=2g or --ipc=host, in Kubernetes an emptyDir of medium Memory at /dev/shm; "
            "NCCL_SHM_DISABLE=1 works without it, but slower",
        )
    found = classify(error)
    if found is None or found.kind != "device":
        return None
    return MemoryExhaustedError(
        f"not enough device memory for the communicators of the ranks: {text.splitlines()[-1]}",
        fix="raise device.reserve_gib in the profile, or end other processes that hold memory on the GPUs",
    )
