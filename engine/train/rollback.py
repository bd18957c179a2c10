"""Everything a step may change beside gradients and weights, put back when the step is redone.

Randomness is a function of (seed, step): it is set at the start of every attempt, so a retry, and a resume, draw what
the undisturbed run drew. Buffers (BatchNorm statistics, router biases) are copied when a step has changed them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.device.base import Device


@dataclass
class StateBefore:
    """State at the start of a step."""

    seed: int
    buffers: list[tuple[torch.Tensor, torch.Tensor, int]]
    """(buffer, copy on the host, version counter when it was copied)."""

    @classmethod
    def take(cls, model: torch.nn.Module, device: Device, seed: int, step: int) -> StateBefore:
        """Copy the buffers to the host and set the random state of step `step`."""
        copies = [(buffer, device.download(buffer), buffer._version) for buffer in model.buffers()]
        before = cls(_mixed(seed, step), copies)
        torch.manual_seed(before.seed)
        return before

    def restore(self) -> None:
        """Put back the buffers that changed, and the random state."""
        with torch.no_grad():
            for buffer, copy, version in self.buffers:
                if buffer._version != version:
                    buffer.copy_(copy)
        torch.manual_seed(self.seed)


def _mixed(seed: int, step: int) -> int:
    """One 63-bit seed out of two numbers, far apart for neighbours (a multiplicative hash, Knuth vol. 3, 6.4)."""
    return ((seed + 1) * 0x9E3779B97F4A7C15 ^ step * 0xBF58476D1CE4E5B9) & (2**63 - 1)
