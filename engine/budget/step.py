"""One micro-batch, phase by phase: a walk through one layer and one through the head, put together for all layers.

Every phase is a set of candidate live sizes above the static bytes; its peak at a shape is the largest of them there.
Between phases only arithmetic is needed: while a layer is differentiated, those before it hold what they saved and
those after it hold their gradients.

Try: `python -m pytest tests/budget/test_step.py`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.ghost import TOKEN, Ghost, Node, Walk, unpack
from engine.budget.head import Head
from engine.budget.layer import Layer
from engine.budget.setting import Setting
from engine.budget.static import Selection, select_layer, static_bytes

INPUT_BYTES = 16
"""Per token: input ids and labels, int64."""


class Growth(NamedTuple):
    """Bytes as a function of the micro-batch: rows × length = tokens."""

    fixed: int = 0
    token: int = 0
    """Per token of the padded micro-batch."""
    square: int = 0
    """Per row and length squared: attention scores and masks that are materialised."""

    def at(self, tokens: int, squares: int) -> int:
        """Bytes at `tokens` = rows × length and `squares` = rows × length²."""
        return self.fixed + self.token * tokens + self.square * squares

    def plus(self, other: Growth, times: int = 1) -> Growth:
        """This and `times` another."""
        return Growth(*(mine + times * its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True)
class PhaseCost:
    """What is live in one phase above the static bytes: known parts, and the alternatives for the rest."""

    gradients: int
    saved: Growth
    """Activations kept for backward by the layers."""
    working: tuple[Growth, ...]
    """What else is live, at each local maximum that some shape may be decided by."""
    label: str
    """The component the working bytes are shown as."""


@dataclass(frozen=True)
class StepCost:
    """All phases of forward and backward."""

    phases: dict[str, PhaseCost]
    token_inputs: int
    """Bytes per token of the batch itself."""
    length_tables: int
    """Bytes per position of the rotary tables, shared by all rows."""


@dataclass(frozen=True)
class Walked:
    """One layer's bytes: at its forward's maxima, kept after it, at its backward's maxima, and its gradients."""

    forward: tuple[Growth, ...]
    saved: Growth
    backward: tuple[Growth, ...]


@lru_cache(maxsize=256)
def step_cost(arch: Architecture, setting: Setting, accumulating: bool) -> StepCost:
    """Phases of one micro-batch; `accumulating` when an earlier one of the same step has left gradients."""
    static = static_bytes(arch, setting)
    layer = walk_layer(arch, setting, select_layer(arch, setting, arch.layers - 1), accumulating)
    head_forward, head_backward = walk_head(arch, setting, accumulating)
    everything = static.total.gradients
    held = everything if accumulating else 0
    head_gradients = held or static.head_gradient
    others = held or head_gradients + static.layers.gradients - static.first_layer.gradients
    embedding = held or everything - static.embedding_gradient
    kept = [Growth(*(count * value for value in layer.saved)) for count in (arch.layers - 1, arch.layers)]
    label = "recompute" if setting.checkpointing else "activations"
    hidden = arch.hidden * setting.base_bytes
    phases = {
        "forward": PhaseCost(held, kept[0], layer.forward, label),
        "loss_backward": PhaseCost(held, kept[1], prune([*head_forward, *head_backward]), "loss"),
        "layer_first": PhaseCost(head_gradients, kept[0], layer.backward, label),
        "layer_last": PhaseCost(others, Growth(), layer.backward, label),
    }
    if static.embedding_gradient:
        extra = static.embedding_gradient * (1 if accumulating or arch.tied else 0)
        working = (Growth(static.embedding_gradient + extra, 0), Growth(static.embedding_gradient, hidden))
        phases["embedding_backward"] = PhaseCost(embedding, Growth(), working, "gradients")
    return StepCost(phases, INPUT_BYTES, 2 * arch.head_dim * setting.base_bytes)


@lru_cache(maxsize=256)
def walk_layer(arch: Architecture, setting: Setting, chosen: Selection, accumulating: bool) -> Walked:
    """Forward and backward of one layer by itself, with gradients wanted for its input."""
    walk = Walk(in_place_sums=not setting.metered, accumulating=accumulating)
    layer = Layer(walk, arch, setting, chosen)
    arguments = [_entry(walk, arch, setting)]
    if setting.checkpointing:  # the checkpoint holds its input until the layer's backward is over
        output = walk.checkpoint(lambda: layer.forward(arguments[0]))
    else:
        output = layer.forward(arguments.pop())
    forward = prune(growth(size) for size in walk.take_peaks())
    saved, size, node = walk.live - output.size, output.size, output.node
    del output
    assert node is not None
    walk.backward(node, walk.allocate(size))
    return Walked(forward, growth(saved), prune(growth(size) for size in walk.take_peaks()))


def walk_head(arch: Architecture, setting: Setting, accumulating: bool) -> tuple[list[Growth], list[Growth]]:
    """Local maxima from the last layer's output to its gradient: on the way up, and on the way back."""
    walk = Walk(in_place_sums=not setting.metered, accumulating=accumulating)
    arguments = [_entry(walk, arch, setting)]
    loss = Head(walk, arch, setting).forward(arguments.pop())
    forward = [growth(size) for size in walk.take_peaks()]
    assert loss.node is not None
    walk.backward(loss.node, walk.allocate(0))
    return forward, [growth(size) for size in walk.take_peaks()]


def _entry(walk: Walk, arch: Architecture, setting: Setting) -> Ghost:
    """Hidden states that need a gradient."""
    hidden = walk.new(arch.hidden * TOKEN, setting.base_bytes)
    hidden.node = Node([], lambda gradient: [], hidden.size, None)
    return hidden


def growth(size: int) -> Growth:
    """A packed size of a walk."""
    return Growth(*unpack(size))


def prune(candidates: Iterable[Growth]) -> tuple[Growth, ...]:
    """Only those that are the largest for some shape: none that another exceeds in every coefficient."""
    kept: list[Growth] = []
    for candidate in sorted(set(candidates), key=lambda item: (item.token, item.square, item.fixed), reverse=True):
        if not any(all(a >= b for a, b in zip(other, candidate, strict=True)) for other in kept):
            kept.append(candidate)
    return tuple(kept)
