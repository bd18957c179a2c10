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

INPUT_BYTES = 24
"""Per token: input ids, labels and the targets among them, int64."""


TWO_MASKS = ("gemma2", "gemma3_text", "gpt_oss")
"""Families that alternate full and sliding attention, and so hold a mask of each kind."""


class Shape(NamedTuple):
    """What sizes are functions of; the first is always 1."""

    one: int
    tokens: int
    """rows × positions, padding included; a sequence has one position less than tokens."""
    squares: int
    """rows × positions²."""
    chunk: int
    """Tokens of the first chunk of the loss."""
    following: int
    """Tokens of its second chunk."""


def shape_of(rows: int, length: int, chunk_tokens: int) -> Shape:
    """The shape of `rows` sequences padded to `length` tokens, the last of which predicts nothing and is left out."""
    positions = max(1, length - 1)
    tokens = rows * positions
    chunk = min(tokens, chunk_tokens)
    return Shape(1, tokens, tokens * positions, chunk, min(tokens - chunk, chunk_tokens))


class Growth(NamedTuple):
    """Bytes per unit of each part of a `Shape`."""

    fixed: int = 0
    token: int = 0
    square: int = 0
    chunk: int = 0
    following: int = 0

    def at(self, shape: Shape) -> int:
        """Bytes at a shape."""
        return sum(mine * unit for mine, unit in zip(self, shape, strict=True))

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
class Walked:
    """One layer's bytes: at its forward's maxima, kept after it, at its backward's maxima, and its gradients."""

    forward: tuple[Growth, ...]
    saved: Growth
    backward: tuple[Growth, ...]


@lru_cache(maxsize=256)
def step_cost(arch: Architecture, setting: Setting, accumulating: bool) -> dict[str, PhaseCost]:
    """Phases of one micro-batch; `accumulating` when an earlier one of the same step has left gradients."""
    static = static_bytes(arch, setting)
    layer = walk_layer(arch, setting, select_layer(arch, setting, arch.layers - 1), accumulating)
    below, through = _kept(arch, setting, layer, accumulating)
    head = walk_head(arch, setting, accumulating)
    everything, table = static.total.gradients, static.embedding_gradient
    held = everything if accumulating else 0
    # A tied table gets its gradient from both ends; autograd keeps the head's until the embedding's has come.
    waiting = table if arch.tied else 0
    early = held + waiting if accumulating else static.head_gradient + waiting
    late = early if accumulating else early + static.layers.gradients - static.first_layer.gradients
    label = "recompute" if setting.checkpointing else "activations"
    phases = {
        "forward": PhaseCost(held, below, layer.forward, label),
        "loss_backward": PhaseCost(held, through, head, "loss"),
        "layer_first": PhaseCost(early, below, layer.backward, label),
        "layer_last": PhaseCost(late, Growth(), layer.backward, label),
    }
    if table:
        # Tied: the head's gradient, the embedding's, and their sum are live at once.
        before = held + waiting if accumulating else everything - (0 if arch.tied else table)
        working = Growth((2 if arch.tied else 1) * table, arch.hidden * setting.base_bytes)
        phases["embedding_backward"] = PhaseCost(before, Growth(), (working,), "gradients")
    return phases


def _kept(arch: Architecture, setting: Setting, layer: Walked, accumulating: bool) -> tuple[Growth, Growth]:
    """What all layers but the last keep for backward, and what all of them keep.

    Nothing before the first layer learns in LoRA, so that its frozen parts save less.
    """
    first = layer.saved
    if not setting.checkpointing and arch.layers > 1 and not static_bytes(arch, setting).embedding_gradient:
        first = walk_layer(arch, setting, select_layer(arch, setting, 0), accumulating, False).saved
    below = first.plus(layer.saved, arch.layers - 2) if arch.layers > 1 else Growth()
    return below, below.plus(layer.saved)


@lru_cache(maxsize=256)
def walk_layer(
    arch: Architecture, setting: Setting, chosen: Selection, accumulating: bool, input_gradient: bool = True
) -> Walked:
    """Forward and backward of one layer by itself; `input_gradient` where something before it learns."""
    walk = Walk(in_place_sums=not setting.metered, accumulating=accumulating)
    layer = Layer(walk, arch, setting, chosen)
    arguments = [_entry(walk, arch, setting, input_gradient)]
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


def walk_head(arch: Architecture, setting: Setting, accumulating: bool) -> tuple[Growth, ...]:
    """Local maxima from the last layer's output to the loss and back to that output's gradient."""
    walk = Walk(in_place_sums=not setting.metered, accumulating=accumulating)
    arguments = [_entry(walk, arch, setting)]
    loss = Head(walk, arch, setting).forward(arguments.pop())
    assert loss.node is not None
    walk.backward(loss.node, walk.allocate(0))
    return prune(growth(size) for size in walk.take_peaks())


def _entry(walk: Walk, arch: Architecture, setting: Setting, gradient: bool = True) -> Ghost:
    """Hidden states, as a rule with a gradient to come."""
    hidden = walk.new(arch.hidden * TOKEN, setting.base_bytes)
    if gradient:
        hidden.node = Node([], lambda gradient: [], hidden.size, None)
    return hidden


def growth(size: int) -> Growth:
    """A packed size of a walk."""
    return Growth(*unpack(size))


def prune(candidates: Iterable[Growth]) -> tuple[Growth, ...]:
    """Only those that are the largest for some shape: none that another exceeds in every coefficient."""
    kept: list[Growth] = []
    for candidate in sorted(set(candidates), key=lambda item: item[1:] + item[:1], reverse=True):
        if not any(all(a >= b for a, b in zip(other, candidate, strict=True)) for other in kept):
            kept.append(candidate)
    return tuple(kept)


def input_growth(arch: Architecture, setting: Setting, phase: str) -> Growth:
    """What the batch itself and its masks hold; only checkpoints keep masks for after the forward pass."""
    eager = setting.attention == "eager"
    gone = phase != "forward" and not setting.checkpointing
    if gone or not (setting.masked or eager) or setting.attention == "flash":
        return Growth(token=INPUT_BYTES)
    kinds = 2 if arch.sliding_window is not None and arch.model_type in TWO_MASKS else 1
    return Growth(token=INPUT_BYTES + 8, square=kinds * (setting.base_bytes if eager else 1))


def position_bytes(arch: Architecture, setting: Setting) -> int:
    """Per position, shared by all rows: its id (int64) and its row of the rotary tables (cos and sin)."""
    return 8 + 2 * arch.head_dim * setting.base_bytes
