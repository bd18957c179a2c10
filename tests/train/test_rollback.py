"""Everything that a step changes beside gradients and weights is restored: statistics, router biases, random state."""

from __future__ import annotations

import torch

from engine.device.cpu import CpuDevice
from engine.train.step.context import LossScaler
from engine.train.step.rollback import Rollback
from tests.present import present


class Routed(torch.nn.Module):
    """A model whose forward pass changes its buffers: the statistics of a batch norm, a bias in place, and a buffer
    that is replaced by a new tensor."""

    bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("frequencies", torch.ones(2))
        self.register_buffer("constant", torch.arange(3.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.bias.add_(values.mean(0).detach())
        self.frequencies = torch.full((5,), 2.0)
        normed: torch.Tensor = self.norm(values)
        return normed + self.bias


def test_buffers_and_random_state_go_back_however_they_were_changed() -> None:
    model = Routed()
    rollback = Rollback(model, CpuDevice(2**30), seed=1)
    rollback.take(step=3)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    first = model(torch.rand(8, 4))
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    assert {"norm.running_mean", "norm.running_var", "bias", "frequencies"} <= set(changed)
    rollback.restore()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(model(torch.rand(8, 4)), first)


def test_each_step_goes_back_to_its_own_start() -> None:
    model = Routed()
    rollback = Rollback(model, CpuDevice(2**30), seed=1)
    for step in (1, 2):
        rollback.take(step)
        mean = present(model.norm.running_mean).clone()
        model(torch.rand(8, 4))
    rollback.restore()
    assert torch.equal(present(model.norm.running_mean), mean)


def test_buffers_that_move_are_saved_and_loaded() -> None:
    model, fresh = Routed(), Routed()
    rollback = Rollback(model, CpuDevice(2**30), seed=1)
    model(torch.rand(8, 4))
    saved = {name: tensor.clone() for name, tensor in rollback.moving()}
    assert "constant" not in saved
    Rollback(fresh, CpuDevice(2**30), seed=1).load(saved)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), fresh.buffers(), strict=True))


def test_an_overflow_backs_off_until_nothing_is_scaled_up() -> None:
    scaler = LossScaler.start(True)
    while scaler.can_back_off:
        scaler.overflowed()
    assert scaler.scale == 1.0
    assert not LossScaler.start(False).can_back_off
