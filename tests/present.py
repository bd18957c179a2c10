"""What a test knows to be there, said to the type checker."""

from __future__ import annotations

from typing import TypeVar

import torch

from engine.device.base import Device
from engine.device.metered import MeteredDevice

Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """`value`, which must not be None."""
    assert value is not None
    return value


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient that backward left at `tensor`, of its shape."""
    return present(tensor.grad)


def metered(device: Device) -> MeteredDevice:
    """`device`, which must be a metered one: its allocations can be made to fail."""
    assert isinstance(device, MeteredDevice)
    return device
