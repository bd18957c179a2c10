"""Optimizer state on the host: the same steps whatever the batches, and copies beside the updates that wait for what
they must wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from engine.device.metered import MeteredDevice
from engine.train.step import optimizer_offload
from engine.train.step.optimizer_offload import ALIGNMENT, HostState
from engine.train.step.optimizer_state import Rounding, allocate_state, state_tensors
from tests.device.lazy_streams import ComputedSoFar, LazyDevice

STAGE_BYTES = 16 * 2**10 + 2 * ALIGNMENT
STAGE_BYTES = 16 * 2**10 + 2 * ALIGNMENT
SMALL, HALF, MIDDLE, LARGE = 100, 1000, 1600, 3000
"""Elements; the state of HALF takes half of the staging buffer of 16 KiB, that of LARGE all of a larger one."""
ORDERS = (
    (HALF,) * 5,
    (SMALL,) * 30,
    (HALF, MIDDLE, HALF, HALF, MIDDLE, MIDDLE, SMALL),
    (LARGE, HALF, HALF, SMALL, HALF, LARGE),
    (SMALL,),
)


class Steps:
    """AdamW over parameters of `sizes` elements, with its state on the host of `device`."""

    def __init__(self, sizes: tuple[int, ...], device: MeteredDevice | None = None) -> None:
        torch.manual_seed(0)
        self.parameters = [Parameter(torch.randn(size)) for size in sizes]
        self.device = device or MeteredDevice(2**30)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1, fused=True)
        allocate_state(self.optimizer, Rounding("nearest", torch.float32, 0))
        self.host = HostState(self.optimizer, self.device)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        with self.device.activate():
            self.host.make_room()
            self.host.step(self._update)

    def _update(self) -> None:
        self.optimizer.step()
        if isinstance(self.device, LazyDevice):
            self.device.lazy.computation.passes += 1

    def found(self) -> list[Tensor]:
        named = [(str(number), parameter) for number, parameter in enumerate(self.parameters)]
        state = [tensor.clone() for _, tensor in state_tensors(self.optimizer, named)]
        return [*(parameter.detach() for parameter in self.parameters), *state]


def equal(sizes: tuple[int, ...], device: LazyDevice) -> bool:
    """Whether three steps with state on the host of `device` are those without offload."""
    plain, offloaded = Steps(sizes), Steps(sizes, device)
    with device.activate():
        offloaded.host.move(to_host=True)
    for number in range(3):
        plain.step(number)
        offloaded.step(number)
    return all(torch.equal(a, b) for a, b in zip(plain.found(), offloaded.found(), strict=True))


@pytest.fixture(autouse=True)
def _small_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(optimizer_offload, "STAGE_BYTES", STAGE_BYTES)


@pytest.mark.parametrize("sizes", ORDERS, ids=len)
def test_state_that_is_copied_as_late_as_events_allow_gives_the_same_steps(sizes: tuple[int, ...]) -> None:
    assert equal(sizes, LazyDevice(2**30))


def test_the_staging_buffer_is_no_larger_than_planned() -> None:
    for sizes in ORDERS:
        steps = Steps(sizes)
        steps.host.on = True
        states = [sum(optimizer_offload._room(t) for t in s.values()) for s in steps.optimizer.state.values()]
        steps.host.make_room()
        assert steps.host._stage is not None
        assert max(states) <= steps.host._stage.numel() <= min(sum(states), max(*states, STAGE_BYTES))


def _of_computation(event: Any) -> bool:
    return isinstance(event, ComputedSoFar)


def _of_copies(event: Any) -> bool:
    return not isinstance(event, ComputedSoFar)


@pytest.mark.parametrize(
    ("stream", "ignores"),
    [
        ("back", _of_computation),
        ("back", _of_copies),
        ("out", _of_computation),
        ("computation", _of_copies),
        ("host", None),
    ],
)
def test_no_wait_is_superfluous(stream: str, ignores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the waits in the module's docstring, left out, gives other steps or is noticed by the streams."""
    device = LazyDevice(2**30)
    if stream == "host":
        monkeypatch.setattr(device.lazy, "wait_on_host", lambda stream: None)
    else:
        deaf = device.lazy.computation if stream == "computation" else getattr(device.lazy, stream)
        listen = deaf.wait_event
        monkeypatch.setattr(deaf, "wait_event", lambda event: None if ignores(event) else listen(event))
    try:
        same = equal((HALF,) * 5, device)
    except AssertionError:
        same = False
    assert not same
