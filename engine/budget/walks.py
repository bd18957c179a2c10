"""The walks a plan is made of: through one layer of each kind and through the model's end, forward and backward.

How they are put together to a step is `engine.budget.step`, to a pass without gradients `engine.budget.inference`.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.ghost import TOKEN, Ghost, Node, Walk, highest
from engine.budget.growth import Growth, growths
from engine.budget.head import Head
from engine.budget.kinds import Kind, body_learns
from engine.budget.layer import Layer
from engine.budget.setting import Setting


class Ahead(NamedTuple):
    """Packed sizes of a layer's forward pass: its maxima, what stays for backward, and for autocast until the loss."""

    forward: tuple[int, ...]
    saved: int
    casts: int


def walk_forward(arch: Architecture, setting: Setting, kind: Kind) -> Ahead:
    """Forward of one layer by itself. Where nothing learns, nothing is saved."""
    felt = felt_by_layers(setting)
    if setting.checkpointing or not kind.learns:
        through = pass_through(arch, _unchecked(felt), kind, learning=True)
        saved = arch.hidden * TOKEN * setting.base_bytes if kind.learns else 0  # a checkpoint saves its input
        return Ahead(through.forward, saved, through.casts)
    return _walk_layer(arch, felt, _felt_kind(felt, kind))[0]


def walk_backward(arch: Architecture, setting: Setting, kind: Kind, accumulating: bool) -> tuple[Growth, ...]:
    """Maxima of its backward pass, which a checkpointed layer begins by running forward again."""
    felt = felt_by_layers(setting)
    found = _walk_layer(arch, felt, _felt_kind(felt, kind))[1]
    return growths(found, accumulating)


@lru_cache(maxsize=256)
def _walk_layer(arch: Architecture, setting: Setting, kind: Kind) -> tuple[Ahead, tuple[int, ...]]:
    """Forward, then backward; of a checkpointed layer what is said of its forward pass has no meaning."""
    walk = Walk(metered=setting.metered, autocast=setting.autocast, offloads=setting.activation_offload)
    layer = Layer(walk, arch, setting, kind)
    arguments = [entry(walk, arch, setting, kind.follows)]
    if setting.checkpointing:  # the checkpoint holds its input until the layer's backward is over
        output, casts = walk.checkpoint(lambda: layer.forward(arguments[0])), 0
    else:
        output = layer.forward(arguments.pop())
        casts = _dropped_casts(walk)
    forward = tuple(highest(walk.take_peaks()))
    assert output.node is not None
    saved, size, node = walk.live - output.size, output.size, output.node
    del output
    walk.backward(node, walk.allocate(size))
    return Ahead(forward, saved, casts), tuple(highest(walk.take_peaks()))


def _felt_kind(setting: Setting, kind: Kind) -> Kind:
    """The same to a walk: of masks, only that one is there matters, and only where sdpa takes another kernel then."""
    return Kind(kind.chosen, kind.masked and setting.attention == "sdpa", False, kind.follows)


class Through(NamedTuple):
    """Packed sizes of a forward pass through a layer that keeps nothing."""

    forward: tuple[int, ...]
    casts: int


def pass_through(arch: Architecture, setting: Setting, kind: Kind, *, learning: bool) -> Through:
    """The forward pass of a layer in which nothing is saved; with `learning` that of a checkpointed one."""
    # Only experts, which norm their scores in place, make something of it that gradients are to come.
    learning = learning and arch.experts is not None
    kind = _felt_kind(setting, kind)
    return _pass_through(arch, setting, kind if learning else kind._replace(follows=False), learning)


@lru_cache(maxsize=256)
def _pass_through(arch: Architecture, setting: Setting, kind: Kind, learning: bool) -> Through:
    walk = Walk(metered=setting.metered, autocast=setting.autocast, learning=learning, keeping=False)
    arguments = [entry(walk, arch, setting, kind.follows)]
    output = Layer(walk, arch, setting, kind).forward(arguments.pop())
    del output
    return Through(tuple(highest(walk.take_peaks())), _dropped_casts(walk))


def _dropped_casts(walk: Walk) -> int:
    """Bytes of the weights that autocast has cast, which it now lets go of."""
    with_casts = walk.live
    walk.casts.clear()
    return with_casts - walk.live


def walk_head(arch: Architecture, setting: Setting, accumulating: bool) -> tuple[Growth, ...]:
    """Local maxima from the last layer's output to the loss and back to that output's gradient."""
    found = _head_peaks(arch, felt_by_head(setting))
    return growths(found, accumulating)


@lru_cache(maxsize=256)
def felt_by_layers(setting: Setting) -> Setting:
    """The same to a layer: a plan asks under several remedies, most of which it does not feel."""
    return setting._replace(
        optimizer="adamw", momentum=False, optimizer_offload=False, loss="plain", chunk_tokens=0,
        # Of a checkpointed layer only the input would go to the host, which is no part of its walk.
        activation_offload=setting.activation_offload and not setting.checkpointing,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _unchecked(setting: Setting) -> Setting:
    """The same without checkpoints."""
    return setting._replace(checkpointing=False)


@lru_cache(maxsize=256)
def felt_by_head(setting: Setting) -> Setting:
    """The same to the end of the model."""
    felt = felt_by_layers(setting)
    return felt._replace(loss=setting.loss, checkpointing=False, activation_offload=setting.activation_offload)


@lru_cache(maxsize=256)
def _head_peaks(arch: Architecture, setting: Setting) -> tuple[int, ...]:
    walk = Walk(metered=setting.metered, autocast=setting.autocast, offloads=setting.activation_offload)
    arguments = [entry(walk, arch, setting, body_learns(arch, setting))]
    loss = Head(walk, arch, setting).forward(arguments.pop())
    walk.casts.clear()
    if loss.node is not None:  # else nothing learns at all, which the engine refuses by name once it has the model
        walk.backward(loss.node, walk.allocate(0))
    return tuple(highest(walk.take_peaks()))


@lru_cache(maxsize=256)
def head_alone(arch: Architecture, setting: Setting) -> tuple[int, ...]:
    """Packed sizes from the last layer's output to the loss, without gradients."""
    walk = Walk(metered=setting.metered, autocast=setting.autocast, learning=False)
    arguments = [entry(walk, arch, setting, False)]
    Head(walk, arch, setting).forward(arguments.pop())
    return tuple(highest(walk.take_peaks()))


def entry(walk: Walk, arch: Architecture, setting: Setting, gradient: bool) -> Ghost:
    """Hidden states, as a rule with a gradient to come."""
    hidden = walk.new(arch.hidden * TOKEN, setting.base_bytes)
    if gradient:
        hidden.node = Node([], lambda gradient: [], hidden.size, None)
    return hidden
