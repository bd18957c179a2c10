"""Weights that are stored in bf16 are updated as torch's optimizers update them in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from engine.device.metered import MeteredDevice
from engine.train.step.optimizer_state import REMAINDER, Rounding, allocate_state, state_tensors
from engine.train.step.piecewise_update import PiecewiseUpdate, join_
from tests.train.rounding_modes import RoundingMode

SHAPES = ((48, 33), (7,), (300, 5), (1,), (2, 3, 4))
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=2e-5, eps=1e-8, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-4, fused=True),
    "sgd, momentum": lambda groups: torch.optim.SGD(groups, lr=1e-4, momentum=0.9, fused=True),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-4, foreach=False),
}
PIECE = 1024
"""Elements of scratch in these tests: the largest weight is cut in two."""


def weights(dtype: torch.dtype = torch.bfloat16) -> list[Parameter]:
    torch.manual_seed(1)
    return [Parameter((0.02 * torch.randn(shape)).bfloat16().to(dtype)) for shape in SHAPES]


def groups_of(parameters: list[Parameter]) -> list[dict[str, Any]]:
    """Two parameter groups with different weight decay, as the engine makes them for matrices and vectors."""
    return [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]


def gradients(step: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return [(torch.randn(shape, generator=drawn) + 0.3).bfloat16() for shape in SHAPES]


class Updated:
    """Parameters, and the optimizer that updates them piece by piece."""

    def __init__(self, kind: str, mode: RoundingMode, state_dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.parameters = weights()
        self.optimizer = OPTIMIZERS[kind](groups_of(self.parameters))
        self.named = [(f"w{number}", parameter) for number, parameter in enumerate(self.parameters)]
        rounding = Rounding(mode, state_dtype, 3)
        allocate_state(self.optimizer, rounding)
        self.update = PiecewiseUpdate(self.optimizer, self.named, rounding, **{"piece_elements": PIECE} | options)

    def step(self, number: int, given: list[Tensor] | None = None) -> None:
        for parameter, gradient in zip(self.parameters, given or gradients(number), strict=True):
            parameter.grad = gradient.clone()
        self.update.make_room()
        self.update.step(number)
        self.update.give_room_back()

    def joined(self) -> list[Tensor]:
        """The fp32 weights, joined from the bf16 parameters and their remainders."""
        found = []
        for parameter in self.parameters:
            bits = torch.empty(parameter.numel(), dtype=torch.int32)
            join_(parameter.data.view(-1), self.optimizer.state[parameter][REMAINDER].view(-1), bits)
            found.append(bits.view(torch.float32).view(parameter.shape))
        return found


def in_fp32(kind: str, steps: int) -> tuple[list[Parameter], torch.optim.Optimizer]:
    """The parameters and the optimizer after the same `steps` steps with fp32 weights."""
    parameters = weights(torch.float32)
    optimizer = OPTIMIZERS[kind](groups_of(parameters))
    for step in range(1, steps + 1):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.float()
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_exact_weights_and_remainders_are_the_fp32_weights_after_200_steps(kind: str) -> None:
    updated = Updated(kind, "exact")
    for step in range(1, 201):
        updated.step(step)
    expected, optimizer = in_fp32(kind, 200)
    for here, there, parameter in zip(updated.joined(), expected, updated.parameters, strict=True):
        assert torch.equal(here, there.data)
        for key, value in optimizer.state[there].items():
            assert torch.equal(updated.optimizer.state[parameter][key].view(value.shape), value), key


def test_nearest_with_state_in_bf16_is_torchs_own_optimizer_on_bf16_weights() -> None:
    updated, alone = Updated("adamw", "nearest", torch.bfloat16), weights()
    optimizer = OPTIMIZERS["adamw"](groups_of(alone))
    for step in range(1, 6):
        updated.step(step)
        for parameter, gradient in zip(alone, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert all(torch.equal(here, there) for here, there in zip(updated.parameters, alone, strict=True))


def moved(updated: Updated) -> float:
    """How far the weights moved in 100 steps with a constant gradient, as a fraction of the distance that fp32 weights
    move."""
    given = [torch.ones(shape, dtype=torch.bfloat16) for shape in SHAPES]
    for step in range(1, 101):
        updated.step(step, given)
    start = torch.cat([weight.detach().flatten().double() for weight in weights()])
    end = torch.cat([weight.detach().flatten().double() for weight in updated.parameters])
    return float((start - end).sum() / (len(start) * 100 * 2e-5))


def test_stochastic_rounding_loses_no_movement_that_rounding_to_nearest_loses() -> None:
    assert moved(Updated("adamw", "exact")) == pytest.approx(1.0, abs=0.02)
    assert moved(Updated("adamw", "stochastic")) == pytest.approx(1.0, abs=0.05)
    assert moved(Updated("adamw", "stochastic", torch.bfloat16)) == pytest.approx(1.0, abs=0.05)
    assert moved(Updated("adamw", "nearest")) < 0.6


def test_a_second_moment_in_bf16_decays() -> None:
    updated = Updated("adamw", "stochastic", torch.bfloat16)
    updated.step(1)
    before = updated.optimizer.state[updated.parameters[0]]["exp_avg_sq"].double().mean()
    zeros = [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES]
    for step in range(2, 402):
        updated.step(step, zeros)
    after = updated.optimizer.state[updated.parameters[0]]["exp_avg_sq"].double().mean()
    assert float(after / before) == pytest.approx(0.999**400, rel=0.02)


@pytest.mark.parametrize(("mode", "dtype"), [("exact", torch.bfloat16), ("stochastic", torch.float32)])
def test_the_result_depends_neither_on_the_size_of_pieces_nor_on_the_parts_of_ranks(
    mode: RoundingMode, dtype: torch.dtype
) -> None:
    one, many = Updated("adamw", mode, dtype, piece_elements=10**6), Updated("adamw", mode, dtype)
    for step in (1, 2, 3):
        one.step(step)
        many.step(step)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters, many.parameters, strict=True))
    part = Updated("adamw", mode, dtype)
    rows = [(parameter.shape[0] // 2) for parameter in part.parameters]
    halves = [Parameter(parameter.data[row:].clone()) for parameter, row in zip(weights(), rows, strict=True)]
    firsts = {f"w{n}": row * weight[:1].numel() for n, (row, weight) in enumerate(zip(rows, weights(), strict=True))}
    part.parameters, part.optimizer = halves, OPTIMIZERS["adamw"](groups_of(halves))
    rounding = Rounding(mode, dtype, 3)
    allocate_state(part.optimizer, rounding)
    named = [(f"w{number}", half) for number, half in enumerate(halves)]
    part.update = PiecewiseUpdate(part.optimizer, named, rounding, firsts, PIECE)
    for step in (1, 2, 3):
        part.step(step, [gradient[row:] for gradient, row in zip(gradients(step), rows, strict=True)])
    assert all(torch.equal(half, w[row:]) for half, w, row in zip(halves, one.parameters, rows, strict=True))


@pytest.mark.parametrize("kind", ["adamw", "sgd, momentum"])
@pytest.mark.parametrize("mode", ["exact", "stochastic", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_allocates_nothing_once_there_is_room(kind: str, mode: RoundingMode, dtype: torch.dtype) -> None:
    device = MeteredDevice(2**30)
    with device.activate():
        updated = Updated(kind, mode, dtype)
        updated.step(1)
        for parameter, gradient in zip(updated.parameters, gradients(2), strict=True):
            parameter.grad = gradient
        updated.update.make_room()
        before = device.allocations
        updated.update.step(2)
        assert device.allocations == before
        assert updated.update.allocation_free


def test_adafactor_holds_the_update_of_one_weight_at_a_time() -> None:
    """Regression: torch's loop held the one before while it computed the next, which no plan counted."""
    shape = (512, 256)
    parameters = [Parameter(torch.ones(shape)) for _ in range(3)]
    optimizer = OPTIMIZERS["adafactor"](groups_of(parameters))
    rounding = Rounding("exact", torch.float32, 3)
    allocate_state(optimizer, rounding)
    update = PiecewiseUpdate(optimizer, [(f"w{n}", each) for n, each in enumerate(parameters)], rounding)
    for parameter in parameters:
        parameter.grad = torch.ones(shape)
    alike = [Parameter(parameter.detach().clone()) for parameter in parameters]
    plain = OPTIMIZERS["adafactor"](groups_of(alike))
    for parameter in alike:
        parameter.grad = torch.ones(shape)
    plain.step()
    device = MeteredDevice(2**30)
    with device.activate():
        update.step(1)
        peak_bytes = device.memory().peak_bytes
    assert parameters[0].numel() * 4 <= peak_bytes < 1.5 * parameters[0].numel() * 4
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parameters, alike, strict=True))


def test_a_parameter_without_gradient_keeps_weight_state_and_counter() -> None:
    updated = Updated("adamw", "exact")
    updated.step(1)
    before = [weight.detach().clone() for weight in updated.parameters]
    state = {name: tensor.clone() for name, tensor in state_tensors(updated.optimizer, updated.named)}
    updated.update.make_room()
    for parameter in updated.parameters:
        parameter.grad = None
    updated.parameters[0].grad = gradients(2)[0]
    updated.update.step(2)
    assert not torch.equal(updated.parameters[0], before[0])
    assert all(torch.equal(a, b) for a, b in zip(updated.parameters[1:], before[1:], strict=True))
    now = dict(state_tensors(updated.optimizer, updated.named))
    assert all(torch.equal(now[name], state[name]) for name in state if not name.startswith("w0::"))
    assert now["w0::step"] == 2 and now["w1::step"] == 1
