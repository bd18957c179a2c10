"""LoRA beside a linear layer as peft 0.19 computes it: plain, with keyed dropout, on a 4-bit base, and DoRA.

The local variables are those of `peft/tuners/lora/layer.py`, `bnb.py` and `dora.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.budget.ghost import POSITION, TOKEN, Ghost, Node, Storage, Walk
from engine.budget.operations import add, cast, copy, scale, scale_by_weight
from engine.budget.setting import Setting
from engine.budget.static import rounded

INTEGER = 4
"""Bytes of an int32."""


@dataclass(frozen=True)
class Adapted:
    """The linear layer an adapter stands beside."""

    outputs: int
    inputs: int
    biased: bool
    merged: int = 1
    """Tokens that it takes at once."""


def adapted(walk: Walk, setting: Setting, layer: Adapted, x: Ghost, result: Ghost) -> Ghost:
    """base(x) + B(A(x)) * scaling, in the wider of the two dtypes, and back in the base's."""
    itemsize = result.itemsize
    if setting.quantized:
        result = copy(walk, result)
    x = cast(walk, x, setting.adapter_bytes)
    if setting.dora:
        result = _dora(walk, setting, layer, x, result)
    elif setting.quantized:
        update = cast(walk, _update(walk, setting, layer, x), itemsize)
        result = add(walk, result, update)
    else:
        result = add(walk, result, _update(walk, setting, layer, x))
    return cast(walk, result, itemsize)


def _update(walk: Walk, setting: Setting, layer: Adapted, x: Ghost) -> Ghost:
    """B(A(dropout(x))) * scaling."""
    return _low_rank(walk, setting, layer, dropped(walk, x) if setting.dropout else x, scaled=True)


def _low_rank(walk: Walk, setting: Setting, layer: Adapted, x: Ghost, *, scaled: bool) -> Ghost:
    """B(A(x)), and times a number: two linear layers and a product, gone through at once."""
    itemsize, size, before = x.itemsize, x.size, x.node
    elements = -(-layer.outputs // layer.merged) * TOKEN
    low, high = -(-setting.rank // layer.merged) * TOKEN * itemsize, elements * itemsize
    width = setting.adapter_bytes
    first, second = rounded(setting.rank * layer.inputs * width), rounded(setting.rank * layer.outputs * width)
    saved = walk.save(x)
    lent = sum(each for each in saved if isinstance(each, int))
    kept_low, lent_low = walk.keeps(low)

    def back(node: Node) -> None:
        incoming = node.take()
        if scaled:
            incoming = walk.exchange(incoming, high)
        walk.bring_back()
        walk.live += lent_low + low
        walk.leaf_gradient(second)
        del incoming
        walk.live += lent - lent_low - kept_low
        made = walk.allocate(size) if before is not None else None
        walk.leaf_gradient(first)
        walk.live -= lent + low
        node.saved = None
        walk.hand_on(before, made)

    walk.live += low
    walk.rising = True
    del x
    walk.mark()
    walk.reach(high)
    walk.live += kept_low - low
    if scaled:
        walk.reach(2 * high)
    return walk.chain(walk.new(elements, itemsize), before, back, saved, trains=True)


def dropped(walk: Walk, x: Ghost) -> Ghost:
    """`engine.model.dropout`: a copy with some values at 0. Nothing is saved; backward draws the same mask again.

    The mask is made row by row: three int32 per value while bits are mixed, beside the bool mask of the row before.
    """
    size, mixing = x.size, (3 * INTEGER + 1) * (x.elements // TOKEN) * POSITION

    def back(gradient: Storage) -> list[Storage | None]:
        result = walk.allocate(size)
        bits = walk.allocate(mixing)
        del bits
        return [result]

    output = walk.result(x.elements, x.itemsize, [x], back)
    bits = walk.allocate(mixing)
    del bits
    return output


def _dora(walk: Walk, setting: Setting, layer: Adapted, x: Ghost, result: Ghost) -> Ghost:
    """`DoraLinearLayer.forward`: result + (m - 1) · result + m · B(A(x)) · scaling, m the magnitude over the norm.

    The norm is that of W + B·A, made in full beside a copy of W in the adapter's dtype; what it is made from stays
    until the function returns. No gradient goes through it.
    """
    width, base_result = setting.adapter_bytes, result
    elements = layer.outputs * layer.inputs
    held = [walk.allocate(layer.inputs * layer.inputs * width), walk.allocate(setting.rank * layer.inputs * width)]
    held.append(walk.allocate(elements * width))
    if setting.base_bytes != width or setting.quantized:
        held.append(walk.allocate(elements * width))
    summed = [walk.allocate(elements * width), walk.allocate(elements * width)]
    del summed
    vector = rounded(layer.outputs * width)
    low_rank = _low_rank(walk, setting, layer, dropped(walk, x) if setting.dropout else x, scaled=False)
    if layer.biased:
        base_result = copy(walk, base_result)
    left = scale_by_weight(walk, base_result, vector, True, width)
    right = scale(walk, scale_by_weight(walk, low_rank, vector, True, width))
    update = add(walk, left, right)
    del left, right, low_rank, base_result, held
    return add(walk, result, update)
