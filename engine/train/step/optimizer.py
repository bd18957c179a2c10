"""Optimizers: built from the recipe, their learning-rate schedule with warm-up, and their step made all-or-nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from engine.config.check.notes import warmup_steps_of
from engine.config.files.machine import install_command
from engine.errors import EnvironmentProblem
from engine.model.trained import parameter_groups
from engine.train.step.optimizer_offload import HostState
from engine.train.step.optimizer_state import Rounding, allocate_state, state_tensors
from engine.train.step.piecewise_update import PiecewiseUpdate

if TYPE_CHECKING:
    from engine.config.schema.recipe import Train
    from engine.device.base import Device
    from engine.model.loaded import LoadedModel


@dataclass(frozen=True)
class Schedule:
    """The learning rate at each of `total_steps` steps, as a share (0 to 1) of the peak rate."""

    kind: str
    total_steps: int
    warmup_steps: int
    floor_ratio: float
    cycles: int
    power: float = 1.0
    decay_ratio: float = 0.1
    decay_shape: str = "cosine"

    @classmethod
    def of(cls, train: Train, total_steps: int) -> Schedule:
        """A warm-up longer than the run is shortened."""
        warmup = warmup_steps_of(train, total_steps)
        floor = train.min_learning_rate / train.peak_learning_rate
        ratio, shape = train.decay_ratio or 0.1, train.decay_shape or "cosine"
        return cls(train.scheduler, total_steps, warmup, floor, train.restarts, train.power, ratio, shape)

    def factor(self, step: int) -> float:
        """Share of the peak rate at optimizer step `step` (from 1). It is that of `step` - 1 finished steps, as in
        transformers' schedulers: with warm-up (warmup) the first step has rate 0."""
        done = step - 1
        if done < self.warmup_steps:
            share = done / max(1, self.warmup_steps)
            return self.floor_ratio + (1.0 - self.floor_ratio) * share if self.kind == "wsd" else share
        if self.kind == "constant":
            return 1.0
        progress = min(1.0, (done - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.kind == "wsd":
            decay_steps = max(1, math.ceil(self.decay_ratio * self.total_steps))
            progress = min(1.0, max(0, done - (self.total_steps - decay_steps)) / decay_steps)
        return self.floor_ratio + (1.0 - self.floor_ratio) * self._decay(progress)

    def _decay(self, progress: float) -> float:
        """From 1 down to 0 over the steps after warm-up (`progress` 0 to 1), before the minimum rate is applied."""
        shape = self.decay_shape if self.kind == "wsd" else self.kind
        if shape == "linear":
            return 1.0 - progress
        if shape == "polynomial":
            return float((1.0 - progress) ** self.power)
        if shape == "1-sqrt":
            return 1.0 - math.sqrt(progress)
        if self.kind == "cosine_with_restarts":
            return 0.0 if progress >= 1.0 else 0.5 * (1.0 + math.cos(math.pi * ((self.cycles * progress) % 1.0)))
        return 0.5 * (1.0 + math.cos(math.pi * progress))


SNAPSHOT_LIMIT_BYTES = 512 * 2**20
"""Weights plus state up to this size are copied to the host before a step that may allocate: 0.5 GiB takes about 10 ms
over PCIe 5 (64 GB/s, datasheet). Above it a failed step goes back to the last checkpoint."""


def build_optimizer(
    train: Train, named: Sequence[tuple[str, Parameter]], others: Mapping[str, Sequence[str]] | None = None
) -> torch.optim.Optimizer:
    """Each parameter group keeps its peak learning rate as `peak_lr`. `others`: other names of tied weights.
    EnvironmentProblem: no bitsandbytes."""
    groups = [
        dict(group, peak_lr=group.get("lr", train.peak_learning_rate))
        for group in parameter_groups(named, train, others)
    ]
    if train.optimizer == "adamw_8bit":
        return _adamw_8bit(groups, train)
    if train.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=train.peak_learning_rate, foreach=False)
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.peak_learning_rate, momentum=train.momentum, fused=True)
    betas = (train.betas[0], train.betas[1])
    return torch.optim.AdamW(groups, lr=train.peak_learning_rate, betas=betas, eps=train.eps, fused=True)


def _adamw_8bit(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as missing:
        raise EnvironmentProblem(
            'train.optimizer = "adamw_8bit" needs bitsandbytes, which is not installed',
            fix=f'{install_command("cuda", ["bitsandbytes"])}, or set train.optimizer = "adamw"',
        ) from missing
    betas = (train.betas[0], train.betas[1])
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=train.peak_learning_rate, betas=betas, eps=train.eps)
    return optimizer


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set every group to `factor` times its peak; returns the first group's rate."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["peak_lr"]
    return float(optimizer.param_groups[0]["lr"])


def guarded_optimizer(train: Train, loaded: LoadedModel, device: Device) -> StepGuard:
    """`guard_parameters` for a model's trainable weights."""
    named = loaded.trainable()
    return guard_parameters(train, named, device, loaded.first_elements, loaded.names_of(name for name, _ in named))


def guard_parameters(
    train: Train,
    named: Sequence[tuple[str, Parameter]],
    device: Device,
    first_elements: Mapping[str, int] | None = None,
    others: Mapping[str, Sequence[str]] | None = None,
) -> StepGuard:
    """Build the recipe's optimizer, allocate its state on device or host, and return its StepGuard. `first_elements`:
    of sharded weights, by name, the flat index in the whole parameter at which this rank's part begins. `others`: other
    names of tied weights.

    EnvironmentProblem: adamw_8bit without bitsandbytes. torch.OutOfMemoryError: the state does not fit.
    """
    optimizer, rounding = build_optimizer(train, named, others), Rounding.of(train)
    offload = train.optimizer_offload and device.kind != "cpu"
    if offload:
        allocate_state(optimizer, rounding, device.park)
    else:
        allocate_state(optimizer, rounding)
    update = PiecewiseUpdate(optimizer, named, rounding, first_elements)
    guard = StepGuard(update, named, device)
    guard.host_state.on = offload and not guard.host_state.empty
    return guard


class StepGuard:
    """Makes `optimizer.step()` all or nothing.

    torch's fused AdamW and SGD allocate nothing once their state and the update's scratch exist (a test counts the
    allocations), so no copy is taken. For other optimizers, weights and state are copied to the host first, if small
    enough; else `restore` returns False after a failure and the caller goes back to the last checkpoint.
    """

    def __init__(self, update: PiecewiseUpdate, named: Sequence[tuple[str, Parameter]], device: Device) -> None:
        self.update, self.optimizer, self.device = update, update.optimizer, device
        self.host_state = HostState(self.optimizer, device)
        self._named = named
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())
        self.never_allocates = update.allocation_free
        self.takes_copy = not self.never_allocates and size_bytes <= SNAPSHOT_LIMIT_BYTES
        self._counted = [parameter for _, parameter in named if "step" in self.optimizer.state.get(parameter, {})]
        self._copies: list[torch.Tensor] = []
        self._stepping = False
        self.steps = 0
        """Steps taken and accepted in this process."""
        self._counters: list[float] = []
        self.read_counters()

    @property
    def can_undo(self) -> bool:
        """Whether a step that fails half-way can be undone without a checkpoint."""
        return self.takes_copy or self.never_allocates

    def read_counters(self) -> None:
        """Remember the step counters for `restore`; call this after the state was read from a checkpoint."""
        self._counters = [float(self.optimizer.state[parameter]["step"]) for parameter in self._counted]

    def distrust(self) -> None:
        """From now on undo failed steps only by a checkpoint: the optimizer has state that `restore` does not reach."""
        self.never_allocates = self.takes_copy = False
        self._counted = []
        self.read_counters()

    def prepare(self) -> None:
        """Copy weights and state if needed, and allocate the step's buffers; if this fails, nothing has changed. No
        rank may step before all ranks are prepared, because only a copy or a checkpoint can undo a step."""
        self._copies = [self.device.download(tensor) for tensor in self._tensors()] if self.takes_copy else []
        self.host_state.make_room()
        self.update.make_room()

    def step(self, number: int) -> None:
        """Needs `prepare` first. Until `accept`, `restore` can try to undo the step."""
        self._stepping = True
        self.host_state.step(partial(self.update.step, number))

    def accept(self) -> None:
        """Make the current step final, after it succeeded on every rank. Without a current step, only free buffers."""
        if self._stepping:
            self.steps += 1
            self._counters = [
                counter + (parameter.grad is not None)
                for counter, parameter in zip(self._counters, self._counted, strict=True)
            ]
        self._let_go()

    def restore(self) -> bool:
        """Undo a step that raised, or failed on another rank; returns whether weights and state are exactly as before.
        May be repeated. Without a copy the step counters decide: fused optimizers advance them before they change a
        weight."""
        if self._stepping and self.takes_copy:
            with torch.no_grad():
                for tensor, copy in zip(self._tensors(), self._copies, strict=True):
                    tensor.copy_(copy)
        elif self._stepping and (not self._counted or self._counters_moved()):
            return False
        self._let_go()
        return True

    def _let_go(self) -> None:
        """Free the copies and the staging buffer of the finished step."""
        self._stepping = False
        self._copies = []
        self.host_state.give_room_back()
        self.update.give_room_back()

    def _tensors(self) -> list[torch.Tensor]:
        """All that an optimizer step changes: weights and state."""
        state = [tensor for _, tensor in state_tensors(self.optimizer, self._named)]
        return [parameter.data for _, parameter in self._named] + state

    def _counters_moved(self) -> bool:
        now = [float(self.optimizer.state[parameter]["step"]) for parameter in self._counted]
        return now != self._counters

    def forget(self) -> None:
        """Discard the copies and buffers of the failed step, after weights and state were read from a checkpoint."""
        self._let_go()
        self.read_counters()
