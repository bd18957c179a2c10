"""The walks a plan is made of: through one layer of each kind and through the model's end, forward and backward.

How they are put together to a step is `engine.budget.step`, to a pass without gradients `engine.budget.inference`.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.ghost import Ghost, Walk
from engine.budget.growth import maxima
from engine.budget.head import Head
from engine.budget.kinds import Kind, body_learns, kind_of
from engine.budget.layer import Layer
from engine.budget.packed import TOKEN, highest, leading
from engine.budget.setting import Setting
from engine.budget.tape import Operation


class Ahead(NamedTuple):
    """Packed sizes of a layer's forward pass: its maxima, what stays for backward, and for autocast until the loss."""

    forward: tuple[int, ...]
    saved: int
    casts: int


@lru_cache(maxsize=256)
def walk_forward(arch: Architecture, setting: Setting, kind: Kind) -> Ahead:
    """Forward of one layer by itself. Where nothing learns, nothing is saved; a checkpoint saves the layer's input."""
    felt = felt_by_layers(setting)
    if not kind.learns:
        through = pass_through(arch, setting, kind)
        return Ahead(through.forward, 0, through.casts)
    found = _walk_layer(arch, felt, _felt_kind(felt, kind))
    if setting.checkpointing:
        return Ahead(found.through.forward, arch.hidden * TOKEN * setting.base_bytes, found.through.casts)
    return found.ahead


@lru_cache(maxsize=256)
def walk_backward(arch: Architecture, setting: Setting, kind: Kind, accumulating: bool) -> tuple[int, ...]:
    """Maxima of its backward pass, which a checkpointed layer begins by running forward again."""
    felt = felt_by_layers(setting)
    return _maxima_behind(arch, felt, _felt_kind(felt, kind), accumulating)


@lru_cache(maxsize=256)
def _maxima_behind(arch: Architecture, setting: Setting, kind: Kind, accumulating: bool) -> tuple[int, ...]:
    return maxima(_walk_layer(arch, setting, kind).backward, accumulating)


@lru_cache(maxsize=256)
def leading_behind(arch: Architecture, setting: Setting, kind: Kind) -> int:
    """The leading one of these maxima, whether gradients are there already or not."""
    felt = felt_by_layers(setting)
    return leading(_walk_layer(arch, felt, _felt_kind(felt, kind)).backward)


class Through(NamedTuple):
    """Packed sizes of a forward pass through a layer that keeps nothing."""

    forward: tuple[int, ...]
    casts: int


class Walked(NamedTuple):
    """A layer, forward and backward."""

    ahead: Ahead
    backward: list[int]
    """All local maxima of its backward pass: which of them decide differs with what earlier micro-batches have left."""
    through: Through
    """Its forward pass were nothing saved."""


@lru_cache(maxsize=256)
def _walk_layer(arch: Architecture, setting: Setting, kind: Kind) -> Walked:
    """Forward, then backward; of a checkpointed layer what is said of its forward pass has no meaning."""
    walk = Walk(
        metered=setting.metered, autocast=setting.autocast, offloads=setting.activation_offload, passes=True
    )
    layer = Layer(walk, arch, setting, kind)
    arguments = [entry(walk, arch, setting, kind.follows)]
    if setting.checkpointing:
        held = walk.held(arguments[0])  # until the layer's backward is over
        output = walk.checkpoint(lambda: layer.forward(arguments.pop()))
    else:
        held, output = [], layer.forward(arguments.pop())
    through = Through(tuple(highest(walk.take_passing())), sum([weight.freed for weight in walk.casts]))
    with_casts = walk.live
    if not setting.checkpointing:
        walk.casts.clear()
    casts, forward = with_casts - walk.live, tuple(highest(walk.take_peaks()))
    assert output.node is not None
    saved, size, node = walk.live - output.size, output.size, output.node
    del output
    walk.backward(node, walk.allocate(size))
    backward = walk.take_peaks()
    held.clear()
    return Walked(Ahead(forward, saved, casts), backward, through)


def _felt_kind(setting: Setting, kind: Kind) -> Kind:
    """The same to a walk: of masks, only that one is there matters, and only where sdpa takes another kernel then."""
    return kind_of(kind.chosen, kind.masked and setting.attention == "sdpa", False, kind.follows)


def walked_alike(setting: Setting, kind: Kind, other: Kind) -> bool:
    """Whether two kinds of layers hold the same."""
    return _felt_kind(setting, kind) is _felt_kind(setting, other)


def pass_through(arch: Architecture, setting: Setting, kind: Kind) -> Through:
    """A layer's forward pass without gradients, dropout, or sequences that ranks share."""
    felt = felt_by_layers(setting)
    # Experts norm their scores in place where no gradients are to come.
    if kind.learns and not felt.dropout and felt.sequence == 1 and arch.experts is None:
        return _walk_layer(arch, felt, _felt_kind(felt, kind)).through
    return _pass_through(arch, at_rest(felt), _felt_kind(felt, kind_of(kind.chosen, kind.masked, False, False)))


@lru_cache(maxsize=256)
def _pass_through(arch: Architecture, setting: Setting, kind: Kind) -> Through:
    walk = Walk(metered=setting.metered, autocast=setting.autocast, learning=False)
    arguments = [entry(walk, arch, setting, False)]
    output = Layer(walk, arch, setting, kind).forward(arguments.pop())
    del output
    return Through(tuple(highest(walk.take_peaks())), sum([weight.freed for weight in walk.casts]))


@lru_cache(maxsize=256)
def walk_head(arch: Architecture, setting: Setting, accumulating: bool) -> tuple[int, ...]:
    """Local maxima from the last layer's output to the loss and back to that output's gradient."""
    return maxima(_head_peaks(arch, felt_by_head(setting)), accumulating)


@lru_cache(maxsize=256)
def felt_by_step(setting: Setting) -> Setting:
    """The same to all but the optimizer: a plan asks under several remedies."""
    return setting.but(optimizer="adamw", momentum=False, optimizer_offload=False)


@lru_cache(maxsize=256)
def felt_by_layers(setting: Setting) -> Setting:
    """The same to a layer."""
    return felt_by_step(setting).but(
        loss="plain", chunk_tokens=0,
        # Of a checkpointed layer only the input would go to the host, which is no part of its walk.
        activation_offload=setting.activation_offload and not setting.checkpointing,
    )  # fmt: skip


@lru_cache(maxsize=256)
def at_rest(setting: Setting) -> Setting:
    """The same where nothing learns, and nobody shares sequences."""
    return setting.but(checkpointing=False, dropout=False, sequence=1)


@lru_cache(maxsize=256)
def felt_by_head(setting: Setting) -> Setting:
    """The same to the end of the model."""
    felt = felt_by_layers(setting)
    return felt.but(loss=setting.loss, checkpointing=False, activation_offload=setting.activation_offload)


@lru_cache(maxsize=256)
def _head_peaks(arch: Architecture, setting: Setting) -> list[int]:
    walk = Walk(metered=setting.metered, autocast=setting.autocast, offloads=setting.activation_offload)
    arguments = [entry(walk, arch, setting, body_learns(arch, setting))]
    loss = Head(walk, arch, setting).forward(arguments.pop())
    walk.casts.clear()
    if loss.node is not None:  # else nothing learns at all, which the engine refuses by name once it has the model
        walk.backward(loss.node, walk.allocate(0))
    return walk.take_peaks()


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
        hidden.node = Operation(hidden.size)
    return hidden
