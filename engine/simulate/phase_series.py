"""Records the allocated bytes after each allocation (the levels) in each phase of a simulated step.

A step runs the same operations for every shape of a micro-batch, so the levels of two shapes can be compared one by
one (`engine.simulate.curves`). Each layer has phases of its own, "forward N" and "backward N".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.simulate.device import SimulatedDevice
from engine.simulate.phase_peaks import decoder_layers

EMBEDDING = "forward -1"
"""The phase from the input ids to the first layer."""


class PhaseSeries:
    """Records the levels of each phase in bytes, and the bytes of gradients when the phase began."""

    def __init__(self, device: SimulatedDevice, base: nn.Module, gradient_bytes: Callable[[], int]) -> None:
        self._device, self._gradient_bytes = device, gradient_bytes
        self._found: dict[str, list[int]] = {}
        self._gradients: dict[str, int] = {}
        self._phase = ""
        self.layers = list(decoder_layers(base))
        for number, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda _, a, k, n=number: self._before(n, a, k), with_kwargs=True)
            layer.register_forward_hook(lambda _, a, made, n=number: self._after(n, made))

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self.leave()
        self._phase = phase
        self._gradients.setdefault(phase, self._gradient_bytes())

    def leave(self) -> None:
        """End the current phase and record its levels: the allocated bytes after each allocation. If the same
        phase was entered before, they are appended to the earlier ones."""
        log = self._device.take_log()
        if self._phase:
            self._found.setdefault(self._phase, []).extend(log)
        self._phase = ""

    def take(self) -> tuple[dict[str, list[int]], dict[str, int]]:
        """End the current phase; returns (levels, bytes of gradients when the phase began), both by phase, as recorded
        since the last call."""
        self.leave()
        found = self._found, self._gradients
        self._found, self._gradients = {}, {}
        return found

    def _before(self, number: int, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Forward pre-hook of layer `number`, whose inputs are `given` and `named`: begin the phase "forward N"; for
        layer 0, begin `embedding_backward` when its input gets a gradient. Does nothing while checkpointing recomputes
        the layer."""
        if not self._phase.startswith("forward"):
            return
        self.enter(f"forward {number}")
        hidden = given[0] if given else named.get("hidden_states")
        if number == 0 and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.enter("embedding_backward"))

    def _after(self, number: int, made: Any) -> None:
        """Forward hook of layer `number`, whose output is `made`: begin the phase "backward N" when this output gets
        its gradient. For the last layer, also begin `loss_backward` now. Does nothing while checkpointing recomputes
        the layer."""
        if not self._phase.startswith("forward"):
            return
        hidden = made if isinstance(made, torch.Tensor) else made[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.enter(f"backward {number}"))
        if number == len(self.layers) - 1:
            self.enter("loss_backward")
