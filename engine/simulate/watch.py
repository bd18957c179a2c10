"""Which phase a simulated step is in, told by hooks on the decoder's layers: so peaks stand beside the plan's.

A phase of the plan ends where a hook fires: the last layer has given its output, its gradient has come, and so on to
the gradient of the first layer's input. Which layers the plan looks at is given; should one between them decide after
all, the larger of the two rows shows it.

Try: `tunedeck plan -p 80gb -r lora --exact`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from engine.budget.architecture.vision_parameters import in_vision_encoder
from engine.device.metered import MeteredDevice

BETWEEN = "between"
PHASES = (
    "forward", "loss_backward", "layer_first", "layer_last", "embedding_backward", "optimizer_step", "evaluate",
    "generate",
)  # fmt: skip


class Watch:
    """Peaks of a step, phase by phase, with the gradients that were there when the phase began."""

    def __init__(
        self, device: MeteredDevice, base: nn.Module, gradient_bytes: Callable[[], int], ends: Mapping[int, str]
    ) -> None:
        self._peaks: dict[str, tuple[int, int]] = {}
        """(bytes at the peak, bytes of gradients) by phase, the largest of all micro-batches."""
        self._device, self._gradient_bytes = device, gradient_bytes
        self._now: tuple[str, int] | None = None
        self._forward = False
        self._ends = ends or {0: "layer_last", -1: "layer_first"}
        layers = _layers(base)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda _, given, n=number: self._before(n, given))
            layer.register_forward_hook(lambda _, given, made, n=number: self._after(n, made, len(layers)))

    def enter(self, phase: str) -> None:
        """From here on it is this phase."""
        self.leave()
        self._forward = phase == "forward"
        self._now = (phase, self._gradient_bytes())
        self._device.reset_peak()

    def leave(self) -> None:
        """The phase is over."""
        if self._now is not None:
            phase, gradient_bytes = self._now
            found = (self._device.memory().peak_bytes, gradient_bytes)
            self._peaks[phase] = max(found, self._peaks.get(phase, found))
        self._now = None

    @property
    def peaks(self) -> dict[str, tuple[int, int]]:
        """By phase, in the order of a step."""
        found = dict(self._peaks)
        between = found.pop(BETWEEN, None)
        if between is not None:
            largest = max(("layer_first", "layer_last"), key=lambda phase: found.get(phase, (0, 0)))
            found[largest] = max(found.get(largest, between), between)
        return {phase: found[phase] for phase in PHASES if phase in found}

    def _before(self, number: int, given: tuple[Any, ...]) -> None:
        """The gradient of the first layer's input is that of the embeddings."""
        if self._forward and number == 0 and given and given[0].requires_grad:
            given[0].register_hook(lambda gradient: self.enter("embedding_backward"))

    def _after(self, number: int, made: Any, count: int) -> None:
        """Not while a checkpoint runs the layer again."""
        if not self._forward:
            return
        hidden = made if isinstance(made, torch.Tensor) else made[0]
        if hidden.requires_grad:
            phase = self._ends.get(number, self._ends.get(number - count, BETWEEN))
            hidden.register_hook(lambda gradient: self.enter(phase))
        if number == count - 1:
            self.enter("loss_backward")


def _layers(base: nn.Module) -> nn.ModuleList:
    """The decoder's layers: the outermost list of modules that is in no vision tower."""
    return next(m for name, m in base.named_modules() if isinstance(m, nn.ModuleList) and not in_vision_encoder(name))
