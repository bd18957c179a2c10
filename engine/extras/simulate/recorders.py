"""Record the memory of a simulated step by phase: the peak of each (`PhasePeaks`), or each allocation (`PhaseLog`).

Hooks on the layers switch phases: "forward -1" from the input ids to the first layer of the vision encoder, "vision N"
in its layer N, "images" from there to the decoder, "forward N" in the decoder's layer N, "loss_backward" until the
gradient of the last layer's output is computed, "backward N" in layer N, "embedding_backward" from there to the
embeddings or to the vision encoder, and "vision_backward N" in its layer N. Without images, those of the vision encoder
are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.extras.simulate.device import SimulatedDevice
from engine.model.trained import decoder_of

EMBEDDING = "forward -1"
LOSS = "loss_backward"
GENERATE = "generate"
BETWEEN = "between"
VISION, IMAGES, VISION_BACKWARD = "vision", "images", "vision_backward"
FORWARD = ("forward ", f"{VISION} ", IMAGES)
"""How the names of phases before the loss begin."""
PHASES = (
    "forward", LOSS, "layer_first", "layer_last", "embedding_backward", "optimizer_step", "evaluate", GENERATE,
)  # fmt: skip
"""The phases of a step as a plan names them, in the order in which they run."""


def decoder_layers(base: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's layers: its outermost ModuleList."""
    return next(module for module in decoder_of(base).modules() if isinstance(module, nn.ModuleList))


def vision_layers(base: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of the vision encoder: the longest ModuleList outside the decoder; empty without one."""
    inside = {id(module) for module in decoder_of(base).modules()}
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList) and id(module) not in inside]
    return max(lists, key=len, default=nn.ModuleList())


class PhaseRecorder:
    """Knows which phase of a step runs. Subclasses record its memory in `begin` and `end`."""

    def __init__(self, device: SimulatedDevice, base: PreTrainedModel, gradient_bytes: Callable[[], int]) -> None:
        self.device, self.base, self.gradient_bytes = device, base, gradient_bytes
        self._phase = ""
        self.layers = list(decoder_layers(base))
        for number, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda _, a, k, n=number: self._before(n, a, k), with_kwargs=True)
            layer.register_forward_hook(lambda _, given, made, n=number: self._after(n, made))
        encoder = vision_layers(base)
        for number, layer in enumerate(encoder):
            last = number == len(encoder) - 1
            layer.register_forward_pre_hook(lambda *_, n=number: self._before_vision(n))
            layer.register_forward_hook(lambda _, given, made, n=number, end=last: self._after_vision(n, made, end))

    def begin(self, phase: str) -> None:
        raise NotImplementedError

    def end(self, phase: str) -> None:
        raise NotImplementedError

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`."""
        self.leave()
        self._phase = phase
        self.begin(phase)

    def leave(self) -> None:
        """End the current phase; what follows is not recorded until the next `enter`."""
        if self._phase:
            self.end(self._phase)
        self._phase = ""

    def _before(self, number: int, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._phase.startswith(FORWARD):
            return  # checkpointing recomputes the layer, or it generates
        self.enter(f"forward {number}")
        hidden = given[0] if given else named.get("hidden_states")
        if number == 0 and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.enter("embedding_backward"))

    def _after(self, number: int, made: Any) -> None:
        if not self._phase.startswith(FORWARD):
            return
        hidden = made if isinstance(made, torch.Tensor) else made[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.enter(f"backward {number}"))
        if number == len(self.layers) - 1:
            self.enter(LOSS)

    def _before_vision(self, number: int) -> None:
        if self._is_ahead():
            self.enter(f"{VISION} {number}")

    def _after_vision(self, number: int, made: Any, last: bool) -> None:
        if not self._is_ahead():
            return
        hidden = made if isinstance(made, torch.Tensor) else made[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.enter(f"{VISION_BACKWARD} {number}"))
        if last:
            self.enter(IMAGES)

    def _is_ahead(self) -> bool:
        """Whether a forward pass has not reached the decoder."""
        return self._phase == EMBEDDING or self._phase.startswith(f"{VISION} ")


class PhasePeaks(PhaseRecorder):
    """Records the peak of each phase of a plan, and the bytes of gradients when it began.

    `ends` maps the layers whose backward passes a plan predicts, by number (negative: from the end), to the names of
    these phases. A higher peak in another layer is assigned to the larger of `layer_first` and `layer_last`.
    """

    def __init__(
        self, device: SimulatedDevice, base: PreTrainedModel, gradient_bytes: Callable[[], int], ends: Mapping[int, str]
    ) -> None:
        super().__init__(device, base, gradient_bytes)
        self._peaks: dict[str, tuple[int, int]] = {}
        """(peak bytes, bytes of gradients) by phase; of several micro-batches, the one with the highest peak."""
        self._ends = ends or {0: "layer_last", -1: "layer_first"}
        self._held_bytes = 0

    def begin(self, phase: str) -> None:
        self._held_bytes = self.gradient_bytes()
        self.device.reset_peak()

    def end(self, phase: str) -> None:
        name, found = self._name(phase), (self.device.memory().peak_bytes, self._held_bytes)
        self._peaks[name] = max(found, self._peaks.get(name, found))

    def _name(self, phase: str) -> str:
        """Return what a plan calls `phase`."""
        if not self.base.training and phase != GENERATE:
            return "evaluate"
        kind, _, number = phase.partition(" ")
        if phase.startswith(FORWARD):
            return "forward"
        if kind == VISION_BACKWARD:
            return "embedding_backward"
        if kind == "backward":
            return self._ends.get(int(number), self._ends.get(int(number) - len(self.layers), BETWEEN))
        return kind

    @property
    def by_phase(self) -> dict[str, tuple[int, int]]:
        """(peak bytes, bytes of gradients at the beginning) of each phase, in the order in which a step runs them."""
        found = dict(self._peaks)
        between = found.pop(BETWEEN, None)
        if between is not None:
            largest = max(("layer_first", "layer_last"), key=lambda phase: found.get(phase, (0, 0)))
            found[largest] = max(found.get(largest, between), between)
        return {phase: found[phase] for phase in PHASES if phase in found}


class Segment(NamedTuple):
    """What was allocated while a phase ran."""

    phase: str
    gradient_bytes: int
    """Bytes of gradients when it began."""
    log: list[int]
    """The allocated bytes when it began, then those of each allocation and (negative) of each release."""

    @property
    def levels(self) -> list[int]:
        """The allocated bytes when the phase began and after each allocation."""
        return [level for level, change in zip(accumulate(self.log), self.log, strict=True) if change >= 0]


class PhaseLog(PhaseRecorder):
    """Records what is allocated and released in each phase.

    A step runs the same operations for every shape of a micro-batch, so the logs of two shapes can be compared entry by
    entry (`engine.extras.simulate.fit`).
    """

    def __init__(self, device: SimulatedDevice, base: PreTrainedModel, gradient_bytes: Callable[[], int]) -> None:
        super().__init__(device, base, gradient_bytes)
        self._segments: list[Segment] = []
        self._held_bytes = 0

    def begin(self, phase: str) -> None:
        self._held_bytes = self.gradient_bytes()
        self.device.take_log()

    def end(self, phase: str) -> None:
        self._segments.append(Segment(phase, self._held_bytes, self.device.take_log()))

    def take(self) -> list[Segment]:
        """Return what was recorded since the last call, in the order in which it ran."""
        found, self._segments = self._segments, []
        return found

    def take_peak(self) -> int:
        """Return the highest level in bytes of what was recorded since the last call."""
        return max(level for segment in self.take() for level in segment.levels)
