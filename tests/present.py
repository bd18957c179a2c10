"""Functions that narrow a type for the type checker and assert at run time that the narrower type is right."""

from __future__ import annotations

from typing import TypeVar

import torch

from engine.device.base import Device
from engine.device.metered import MeteredDevice

Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """Assert that `value` is not None, and return it."""
    assert value is not None
    return value


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of `tensor`, of the same shape. Asserts that a backward pass has set it."""
    return present(tensor.grad)


def metered(device: Device) -> MeteredDevice:
    """`device`, asserted to be a metered device, whose allocations can be made to fail."""
    assert isinstance(device, MeteredDevice)
    return device
