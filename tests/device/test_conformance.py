"""Compares the meter with torch's profiler, which records the operations of the CPU allocator itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from engine.device.metered import MeteredDevice
from engine.distributed.ranks import Ranks
from tests.distributed.rank_processes import run_ranks
from tests.present import grad_of

STEPS = 12


class Allocator:
    """What the profiler saw the CPU allocator do, in bytes: the balance at the end and the highest one on the way."""

    def __init__(self, work: Callable[[], object]) -> None:
        gc.collect()
        gc.disable()  # freeing somebody else's garbage is not part of the work
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                self.kept = work()
        finally:
            gc.enable()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        balance = self.peak_bytes = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            balance += event.nbytes()
            self.peak_bytes = max(self.peak_bytes, balance)
        self.balance_bytes = balance


def rows(count: int = 64, *, grad: bool = False) -> torch.Tensor:
    """float32 [count, 128]: 512 bytes a row, so that the meter's rounding changes nothing."""
    return torch.linspace(-1, 1, count * 128).view(count, 128).requires_grad_(grad)


def resized() -> torch.Tensor:
    tensor = rows()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(64 * 512)
    return tensor


def through_backward(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The gradient [64, 128] of a function's input, where the gradient of the output is the output's own value."""
    leaf = rows(grad=True)
    output = function(leaf)
    output.backward(output.detach().clone())
    return grad_of(leaf)


WORK: dict[str, Callable[[], object]] = {
    "ones": lambda: torch.ones(64, 128),
    "add": lambda: rows() + rows(),
    "in place": lambda: rows().add_(1).mul_(2),
    "mm": lambda: rows() @ rows().t(),
    "linear": lambda: functional.linear(rows(), rows(128)),
    "transpose and copy": lambda: rows(128).t().contiguous(),
    "cat and split": lambda: torch.cat([rows(), rows()]).split(32),
    "stack": lambda: torch.stack([rows(), rows()]),
    "index": lambda: rows()[torch.arange(64)],
    "embedding": lambda: functional.embedding(torch.arange(64), rows()),
    "cast": lambda: rows().to(torch.bfloat16).to(torch.float32),
    "softmax": lambda: torch.softmax(rows(), -1),
    "topk": lambda: rows(128).topk(128, 0),
    "foreach": lambda: torch._foreach_mul([rows(), rows()], 2.0),
    "out=": lambda: torch.mul(rows(), 2, out=torch.empty(0)),
    "resize_": lambda: torch.empty(0).resize_(64, 128),
    "storage resize_": resized,
    "where": lambda: torch.where(rows() > 0, rows(), rows()),
    "backward of gelu": lambda: through_backward(functional.gelu),
    "backward of silu": lambda: through_backward(functional.silu),
    "backward of a product": lambda: through_backward(lambda leaf: leaf @ rows(128)),
    "backward of softmax": lambda: through_backward(lambda leaf: torch.softmax(leaf, -1)),
}


@pytest.mark.parametrize("name", WORK)
def test_what_is_left_allocated_agrees_with_the_allocator(name: str) -> None:
    device = MeteredDevice(2**30)
    with device.activate():
        WORK[name]()  # warm: lazily made constants are no part of the comparison
        gc.collect()
        before_bytes = device.memory().allocated_bytes
        seen = Allocator(WORK[name])
        assert device.memory().allocated_bytes - before_bytes == seen.balance_bytes > 0


def test_the_peak_of_a_step_agrees_with_the_allocator() -> None:
    device = MeteredDevice(2**30)
    with device.activate():
        layers = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(4)))
        batch = rows(256)

        def step() -> None:
            hidden = batch
            for layer in layers:
                hidden = functional.silu(layer(hidden))
            hidden.backward(batch)
            layers.zero_grad(set_to_none=True)

        step()
        gc.collect()
        device.reset_peak()
        static_bytes = device.memory().allocated_bytes
        seen = Allocator(step)
        assert device.memory().peak_bytes - static_bytes == pytest.approx(seen.peak_bytes, rel=0.01)
        assert device.memory().allocated_bytes == static_bytes


def a_step_in_shards(ranks: Ranks, folder: Path) -> tuple[int, int, int]:
    """For steps in shards: the peak above the static bytes as the meter counts it, the same peak as the allocator
    counts it, and the metered bytes that are left after the steps.

    A thread of gloo frees a buffer some time after its operation, which can only increase a peak, so the least peak of
    several steps is returned.
    """
    device = MeteredDevice(2**30)
    with device.activate():
        net = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(4)))
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        batch = rows(256)

        def step() -> None:
            net(batch).backward(batch)
            net.zero_grad(set_to_none=True)

        step()
        gc.collect()
        static_bytes = device.memory().allocated_bytes
        metered, seen = [], []
        for _ in range(STEPS):
            device.reset_peak()
            seen.append(Allocator(step).peak_bytes)
            metered.append(device.memory().peak_bytes - static_bytes)
        return min(metered), min(seen), device.memory().allocated_bytes - static_bytes


def test_the_peak_of_a_step_in_shards_agrees_with_the_allocator(tmp_path: Path) -> None:
    """FSDP2 resizes storages without a dispatched operation, gathers weights into them and frees them again."""
    for metered_bytes, seen_bytes, left_bytes in run_ranks([a_step_in_shards], tmp_path)["a_step_in_shards"]:
        assert metered_bytes == pytest.approx(seen_bytes, rel=0.01)
        assert left_bytes == 0
