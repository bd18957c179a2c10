"""Restores random state and buffers, which a step changes beside weights, when the step is redone or not applied.

Random state is set from (seed, step) at the start of every attempt, so a retry or a resume draws the same numbers.
Buffers (BatchNorm statistics, router biases) are copied to the host before a step where they may have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
    from engine.device.base import Device


class _Buffer:
    """One buffer of the model, and the copy of it in host memory."""

    def __init__(self, name: str, module: torch.nn.Module, key: str) -> None:
        self.name, self.module, self.key = name, module, key
        # torch's batch_norm writes running statistics without advancing their version counter (tried, 2.13).
        self.changes_unseen = isinstance(module, _NormBase)
        self.tensor = self._now()
        self.first_version = self.version = self.tensor._version
        self.copy: torch.Tensor | None = None

    def _now(self) -> torch.Tensor:
        tensor = self.module._buffers[self.key]
        assert tensor is not None
        return tensor

    @property
    def was_replaced(self) -> bool:
        """Whether the module holds another tensor under this name than when the buffer was last copied."""
        return self.module._buffers[self.key] is not self.tensor

    @property
    def moves(self) -> bool:
        """Whether the buffer may have changed since the model was loaded."""
        return self.changes_unseen or self.was_replaced or self.tensor._version != self.first_version

    def refresh(self, device: Device) -> None:
        """Copy the buffer to host memory, if it may have changed since the last copy."""
        if self.was_replaced:
            self.tensor, self.copy, self.first_version = self._now(), None, -1
        if self.copy is None or self.changes_unseen or self.tensor._version != self.version:
            self.copy, self.version = device.download(self.tensor), self.tensor._version

    def restore(self) -> None:
        """Put the copied tensor back into the module, with the copied values, if there is a copy."""
        if self.copy is None:
            return
        self.module._buffers[self.key] = self.tensor
        self.tensor.copy_(self.copy)


class Rollback:
    """Buffers and random state as at the start of a step: `take` records them, `restore` may be called repeatedly."""

    def __init__(self, model: torch.nn.Module, device: Device, seed: int) -> None:
        self.device, self.seed = device, seed
        self._drawn_from = 0
        self._buffers = [
            _Buffer(f"{path}.{key}" if path else key, module, key)
            for path, module in model.named_modules()
            for key, tensor in module._buffers.items()
            if tensor is not None
        ]

    def take(self, step: int) -> None:
        """Copy the buffers and seed the random generators for `step`. If the copy fails, the call may be repeated."""
        for buffer in self._buffers:
            buffer.refresh(self.device)
        self._drawn_from = _mixed(self.seed, step)
        _seed_generators(self._drawn_from)

    def restore(self) -> None:
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.restore()
        _seed_generators(self._drawn_from)

    def moving(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, live tensor) of the buffers that training may have changed; checkpoints save them."""
        for buffer in self._buffers:
            tensor = buffer.module._buffers[buffer.key]
            if buffer.moves and tensor is not None:
                yield buffer.name, tensor

    def load(self, saved: dict[str, torch.Tensor]) -> None:
        """Restore what a checkpoint saved from `moving`. KeyError: a name that this model does not have."""
        known = {buffer.name: buffer for buffer in self._buffers}
        with torch.no_grad():
            for name, value in saved.items():
                buffer = known[name]
                tensor = buffer.module._buffers[buffer.key]
                if tensor is not None and tensor.shape == value.shape:
                    tensor.copy_(value)
                else:
                    buffer.module._buffers[buffer.key] = self.device.upload(value)
                buffer.first_version = -1


def _seed_generators(seed: int) -> None:
    """Seed torch's generators of the host, and of CUDA if in use. `torch.manual_seed` also queues a call and a stack
    trace for every device not in use: a third of a millisecond a step, and memory that is never freed."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _mixed(seed: int, step: int) -> int:
    """63 bits; neighbouring steps get distant seeds (a multiplicative hash, Knuth vol. 3, 6.4)."""
    return ((seed + 1) * 0x9E3779B97F4A7C15 ^ step * 0xBF58476D1CE4E5B9) & (2**63 - 1)
