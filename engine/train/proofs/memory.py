"""Proofs: the allocator refuses what exceeds the cap and still counts correctly afterwards; after an OOM in backward
all memory is free and the gradient is right.

Recovery from an out-of-memory error works only if both hold.

Try: `pytest tests/train/proofs/test_state.py`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.device.base import Device
from engine.device.catch_oom import catch_oom, free_failed_graph
from engine.device.determinism import unfilled_memory
from engine.device.oom import OutOfMemory
from engine.train.proofs.record import DisprovedError, drawn
from engine.train.setup import TrainingSetup

ABOVE_BYTES = 64 * 2**20
"""How far a request goes beyond the cap."""
ORDINARY_BYTES = 2**20


def applies(setup: TrainingSetup) -> bool:
    """Whether the device has a cap on allocated bytes. The plain CPU has none."""
    return setup.context.measures


def prove_allocator(setup: TrainingSetup) -> str:
    """Request more bytes than the cap allows, then an ordinary amount. Returns what was shown, in a few words. Raises
    DisprovedError if the first request is granted, or allocated bytes are counted wrongly after it."""
    device = setup.context.device
    before = device.memory().allocated_bytes
    refusal = _refused(device)
    _require_returned(device, before)
    ordinary = torch.empty(ORDINARY_BYTES, dtype=torch.uint8, device=device.torch_device)
    if device.memory().allocated_bytes < before + ordinary.nbytes:
        raise DisprovedError("an allocation after a refused one is not counted")
    del ordinary
    _require_returned(device, before)
    return f"refuses what exceeds {device.capacity_bytes / 2**30:.2f} GiB ({refusal.kind} memory), and allocates after"


def prove_backward(setup: TrainingSetup) -> str:
    """Run out of memory inside backward, recover as a step does, and compute the same gradient again. Returns what was
    shown, in a few words. Raises DisprovedError if memory stays allocated or the gradient differs."""
    device = setup.context.device
    weight = drawn((64, 64), torch.float32, setup, 30).requires_grad_()
    expected = _gradient(weight, 0)
    before = device.memory().allocated_bytes
    with unfilled_memory():
        failure = catch_oom(lambda: _gradient(weight, too_much(device)), device, "proof")
    if failure is None:
        raise DisprovedError("backward goes on after an allocation that exceeds the cap")
    free_failed_graph(device)
    device.release_cached()
    _require_returned(device, before)
    if weight.grad is not None or not torch.equal(_gradient(weight, 0), expected):
        raise DisprovedError("the gradient after an OOM differs from the one before it")
    return "after an OOM in backward all memory is free, and the gradient is the same"


def fall_back(setup: TrainingSetup) -> str:
    """Never let micro-batches grow, so that no allocation comes near the cap; returns what the run does instead, in a
    few words."""
    setup.context.may_grow = False
    return "micro-batches do not grow, so that no allocation is risked"


def _gradient(weight: Tensor, failing_bytes: int) -> Tensor:
    """The gradient of a small computation whose backward allocates `failing_bytes` before it is done."""
    apply: Any = _Allocates.apply
    with torch.enable_grad():
        loss = apply((weight @ weight).tanh(), failing_bytes).square().sum()
        return torch.autograd.grad(loss, weight)[0]


class _Allocates(torch.autograd.Function):
    """Identity whose backward allocates the given number of bytes and frees them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size_bytes: int) -> Tensor:
        ctx.size_bytes = size_bytes
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        torch.empty(ctx.size_bytes, dtype=torch.uint8, device=upstream[0].device)
        return upstream[0], None


def _refused(device: Device) -> OutOfMemory:
    """Request more bytes than the cap allows; returns the failure. Raises DisprovedError if the request is granted."""
    size_bytes = too_much(device)
    with unfilled_memory():
        place = device.torch_device
        refusal = catch_oom(lambda: torch.empty(size_bytes, dtype=torch.uint8, device=place), device, "proof")
    if refusal is None:
        raise DisprovedError(f"{size_bytes:,} bytes above the cap of {device.capacity_bytes:,} are granted")
    device.release_cached()
    return refusal


def too_much(device: Device) -> int:
    """Bytes that the device's cap does not allow beside what is allocated now."""
    return max(0, device.capacity_bytes - device.memory().allocated_bytes) + ABOVE_BYTES


def _require_returned(device: Device, before: int) -> None:
    """Raise DisprovedError if more than `before` bytes are allocated on the device."""
    now = device.memory().allocated_bytes
    if now > before:
        raise DisprovedError(f"{now - before:,} bytes stay allocated after a failed allocation")
