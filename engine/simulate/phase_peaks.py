"""Measures the peak of each phase of a simulated step. The phases are named as in a plan, for comparison.

Hooks on the decoder's layers switch phases. The forward phase ends when the last layer returns its output, and the
phase `loss_backward` ends when the gradient of this output is computed. In the same way, the gradient of each layer's
output begins the layer's own phase. The plan predicts the backward pass of some layers only; a higher peak in another
layer is assigned to the larger of `layer_first` and `layer_last`.

Try: `tunedeck plan -p 80gb -r lora --exact`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from engine.budget.architecture.vision_parameters import in_vision_encoder
from engine.device.metered import MeteredDevice

BETWEEN = "between"
PHASES = (
    "forward", "loss_backward", "layer_first", "layer_last", "embedding_backward", "optimizer_step", "evaluate",
    "generate",
)  # fmt: skip


class PhaseRecorder(Protocol):
    """Protocol of the objects that record the bytes of each phase of a simulation."""

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""

    def leave(self) -> None:
        """End the current phase; what follows is not recorded until the next `enter`."""


class PhasePeaks:
    """Measures for each phase of a step the peak bytes, and the bytes of gradients when the phase began. `ends` maps
    the layers whose backward passes the plan predicts, by number (negative: from the end), to the names of these
    phases."""

    def __init__(
        self, device: MeteredDevice, base: nn.Module, gradient_bytes: Callable[[], int], ends: Mapping[int, str]
    ) -> None:
        self._peaks: dict[str, tuple[int, int]] = {}
        """(peak bytes, bytes of gradients) by phase; of several micro-batches, the one with the highest peak."""
        self._device, self._gradient_bytes = device, gradient_bytes
        self._now: tuple[str, int] | None = None
        self._forward = False
        self._ends = ends or {0: "layer_last", -1: "layer_first"}
        layers = decoder_layers(base)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda _, given, n=number: self._before(n, given))
            layer.register_forward_hook(lambda _, given, made, n=number: self._after(n, made, len(layers)))

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self.leave()
        self._forward = phase == "forward"
        self._now = (phase, self._gradient_bytes())
        self._device.reset_peak()

    def leave(self) -> None:
        """End the current phase and record its peak."""
        if self._now is not None:
            phase, gradient_bytes = self._now
            found = (self._device.memory().peak_bytes, gradient_bytes)
            self._peaks[phase] = max(found, self._peaks.get(phase, found))
        self._now = None

    @property
    def by_phase(self) -> dict[str, tuple[int, int]]:
        """(peak bytes, bytes of gradients at the beginning) of each phase, in the order in which a step runs them."""
        found = dict(self._peaks)
        between = found.pop(BETWEEN, None)
        if between is not None:
            largest = max(("layer_first", "layer_last"), key=lambda phase: found.get(phase, (0, 0)))
            found[largest] = max(found.get(largest, between), between)
        return {phase: found[phase] for phase in PHASES if phase in found}

    def _before(self, number: int, given: tuple[Any, ...]) -> None:
        """Forward pre-hook of layer `number`, whose inputs are `given`: for layer 0, begin `embedding_backward` when
        the first input gets a gradient."""
        if self._forward and number == 0 and given and given[0].requires_grad:
            given[0].register_hook(lambda gradient: self.enter("embedding_backward"))

    def _after(self, number: int, made: Any, count: int) -> None:
        """Forward hook of layer `number` of `count`, whose output is `made`: begin the layer's backward phase when this
        output gets its gradient.

        For the last layer, also begin `loss_backward` now. Does nothing while checkpointing recomputes the layer.
        """
        if not self._forward:
            return
        hidden = made if isinstance(made, torch.Tensor) else made[0]
        if hidden.requires_grad:
            phase = self._ends.get(number, self._ends.get(number - count, BETWEEN))
            hidden.register_hook(lambda gradient: self.enter(phase))
        if number == count - 1:
            self.enter("loss_backward")


def decoder_layers(base: nn.Module) -> nn.ModuleList:
    """Return the decoder's layers: the outermost ModuleList outside of the vision encoder."""
    return next(m for name, m in base.named_modules() if isinstance(m, nn.ModuleList) and not in_vision_encoder(name))
