"""Tensors of a given size, and the bytes that a metered device counts."""

from __future__ import annotations

import torch

from engine.device.metered import MeteredDevice

KIB = 1024


def allocated(device: MeteredDevice) -> int:
    """Bytes allocated on the device."""
    return device.memory().allocated_bytes


def block(kib: int = 1) -> torch.Tensor:
    """A tensor of `kib` KiB."""
    return torch.ones(kib * KIB // 4)
