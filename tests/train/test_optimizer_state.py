"""Optimizer state exists before the first step, with optimizers of torch and others, and is saved, moved and rolled
back as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from engine.device.metered import MeteredDevice
from engine.train.step.optimizer import StepGuard
from engine.train.step.optimizer_state import REMAINDER, Rounding, allocate_state, state_tensors
from engine.train.step.piecewise_update import PiecewiseUpdate, join_
from tests.train.blockwise_adamw import BlockwiseAdamW
from tests.train.rounding_modes import RoundingMode

SHAPES = ((70, 70), (2, 4096), (33,))
NAMES = ("matrix", "wide", "vector")


def weights(dtype: torch.dtype) -> list[Parameter]:
    torch.manual_seed(2)
    return [Parameter((0.02 * torch.randn(shape)).bfloat16().to(dtype)) for shape in SHAPES]


def groups_of(parameters: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:]}]


def gradient_of(shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)).bfloat16()


class EightBits:
    """Parameters with an optimizer that has 8-bit state, and the guard that can undo the optimizer's steps."""

    def __init__(self, dtype: torch.dtype, mode: RoundingMode = "exact") -> None:
        self.device = MeteredDevice(2**30)
        self.parameters = weights(dtype)
        self.named = list(zip(NAMES, self.parameters, strict=True))
        self.optimizer = BlockwiseAdamW(groups_of(self.parameters))
        rounding = Rounding(mode, torch.float32, 0)
        allocate_state(self.optimizer, rounding)
        update = PiecewiseUpdate(self.optimizer, self.named, rounding, piece_elements=2048)
        self.guard = StepGuard(update, self.named, self.device)

    def step(self, number: int) -> None:
        for parameter in self.parameters:
            parameter.grad = gradient_of(parameter.shape, number).to(parameter.dtype)
        self.guard.prepare()
        self.guard.step(number)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in state_tensors(self.optimizer, self.named)}

    def in_fp32(self) -> list[Tensor]:
        found = []
        for parameter in self.parameters:
            bits = torch.empty(parameter.numel(), dtype=torch.int32)
            join_(parameter.data.view(-1), self.optimizer.state[parameter][REMAINDER].view(-1), bits)
            found.append(bits.view(torch.float32).view(parameter.shape))
        return found


def test_eight_bit_state_is_made_by_the_optimizer_before_the_first_step() -> None:
    state = EightBits(torch.bfloat16).state()
    assert {name for name in state if name.startswith("matrix::")} == {
        "matrix::absmax1", "matrix::absmax2", "matrix::remainder", "matrix::state1", "matrix::state2", "matrix::step"
    }  # fmt: skip
    assert state["matrix::state1"].dtype == torch.uint8 and state["vector::state1"].dtype == torch.float32
    assert [float(state[f"{name}::step"]) for name in NAMES] == [0.0, 0.0, 0.0]


def test_exact_weights_beside_eight_bit_state_are_those_of_fp32_bit_for_bit() -> None:
    exact, alone = EightBits(torch.bfloat16), weights(torch.float32)
    optimizer = BlockwiseAdamW(groups_of(alone))
    for step in range(1, 8):
        exact.step(step)
        exact.guard.accept()
        for parameter in alone:
            parameter.grad = gradient_of(parameter.shape, step).float()
        optimizer.step()
    assert all(torch.equal(here, there.data) for here, there in zip(exact.in_fp32(), alone, strict=True))
    for (name, _), there in zip(exact.named, alone, strict=True):
        for key, value in optimizer.state[there].items():
            if not key.startswith("qmap"):
                assert torch.equal(exact.state()[f"{name}::{key}"], torch.as_tensor(value)), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_that_is_undone_takes_its_counter_back(dtype: torch.dtype) -> None:
    there = EightBits(dtype)
    there.step(1)
    there.guard.accept()
    before = there.state() | {name: parameter.detach().clone() for name, parameter in there.named}
    there.step(2)
    assert there.guard.restore()
    after = there.state() | dict(there.named)
    assert all(torch.equal(after[name], before[name]) for name in before)
    there.step(2)
    there.guard.accept()
    assert [float(there.state()[f"{name}::step"]) for name in NAMES] == [2.0, 2.0, 2.0]


def test_state_on_the_host_gives_the_same_steps() -> None:
    here, offloaded = EightBits(torch.bfloat16), EightBits(torch.bfloat16)
    offloaded.guard.host_state.move(to_host=True)
    for step in (1, 2):
        for each in (here, offloaded):
            each.step(step)
            each.guard.accept()
    assert all(torch.equal(a, b) for a, b in zip(here.parameters, offloaded.parameters, strict=True))
    assert all(torch.equal(tensor, offloaded.state()[name]) for name, tensor in here.state().items())


def test_state_of_weights_in_bf16_has_its_own_dtype_and_takes_no_more_memory_while_it_is_made() -> None:
    device = MeteredDevice(2**30)
    with device.activate():
        parameter = Parameter(torch.zeros(1000, 100, dtype=torch.bfloat16))
        device.reset_peak()
        before = device.memory().allocated_bytes
        optimizer = torch.optim.AdamW([parameter], fused=True)
        allocate_state(optimizer, Rounding("exact", torch.float32, 0))
        state = optimizer.state[parameter]
        assert {key: value.dtype for key, value in state.items()} == {
            "step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32, "remainder": torch.int16
        }  # fmt: skip
        assert all(value.is_contiguous() for value in state.values())
        assert device.memory().peak_bytes - before <= 100_000 * (4 + 4 + 2) + 3 * 512
