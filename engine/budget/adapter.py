"""LoRA beside a linear layer as peft 0.19 computes it: plain, with keyed dropout, on a 4-bit base, and DoRA.

The local variables are those of `peft/tuners/lora/layer.py`, `bnb.py` and `dora.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.budget.ghost import Ghost, Node, Storage, Walk
from engine.budget.operations import add, cast, copy, scale, scale_by_weight
from engine.budget.packed import POSITION, TOKEN
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
    """base(x) + B(A(dropout(x))) * scaling, in the wider of the two dtypes, and back in the base's.

    A layer has up to seven of them. So all but the cast of `x` is gone through at once: nothing comes in between.
    """
    itemsize, width = result.itemsize, setting.adapter_bytes
    if setting.quantized:
        result = copy(walk, result)
    x = cast(walk, x, width)
    if setting.dora:
        return cast(walk, _dora(walk, setting, layer, x, result), itemsize)
    low_rank = _LowRank(walk, setting, layer, x.itemsize)
    low_rank.forward(dropped(walk, x) if setting.dropout else x)
    update = low_rank.high
    walk.reach(2 * update)  # times a number
    walk.live += update
    if setting.quantized and itemsize != width:
        update = low_rank.elements * itemsize
        walk.reach(update)
        walk.live += update - low_rank.high
    base, given = result.node, result.size
    total = low_rank.elements * (itemsize if setting.quantized else max(itemsize, width))
    walk.reach(total)
    walk.live -= update
    del result
    if total != given:
        walk.reach(total + given)

    def back(node: Node) -> None:
        incoming = node.take()
        if total != given:
            incoming = walk.exchange(incoming, total)
        left = incoming if given == total else walk.allocate(given)
        right = incoming if update == total else walk.allocate(update)
        del incoming
        walk.hand_on(base, left)
        del left
        if update != low_rank.high:
            right = walk.exchange(right, low_rank.high)
        node.gradient = walk.exchange(right, low_rank.high)
        del right
        low_rank.backward(node)

    output = walk.new(low_rank.elements, itemsize)
    return walk.chain(output, base, back, low_rank.saved, trains=True)


class _LowRank:
    """B(A(x)), two linear layers that learn."""

    def __init__(self, walk: Walk, setting: Setting, layer: Adapted, itemsize: int) -> None:
        self.walk, width = walk, setting.adapter_bytes
        self.first, self.second = (rounded(setting.rank * side * width) for side in (layer.inputs, layer.outputs))
        self.elements = -(-layer.outputs // layer.merged) * TOKEN
        self.high = self.elements * itemsize
        """Bytes of what it gives; `low`: of what is between."""
        self.low = -(-setting.rank // layer.merged) * TOKEN * itemsize
        self.kept_low, self.lent_low = walk.keeps(self.low)

    def forward(self, x: Ghost) -> None:
        """Up to what it gives, which the caller counts."""
        walk = self.walk
        self.before, self.size, self.saved = x.node, x.size, walk.save(x)
        walk.live += self.low
        walk.rising = True
        del x
        walk.mark()
        walk.reach(self.high)
        walk.live -= self.low
        walk.keep(self.kept_low)

    def backward(self, node: Node) -> None:
        """From the gradient that `node` has now, of what it gave."""
        walk, lent = self.walk, sum(each for each in self.saved if isinstance(each, int))
        incoming = node.take()
        walk.bring_back()
        walk.live += self.lent_low + self.low
        walk.leaf_gradient(self.second)
        del incoming
        walk.live += lent - self.lent_low - self.kept_low
        made = walk.allocate(self.size) if self.before is not None else None
        walk.leaf_gradient(self.first)
        walk.live -= lent + self.low
        self.saved.clear()
        walk.hand_on(self.before, made)


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
    product = _LowRank(walk, setting, layer, x.itemsize)
    product.forward(dropped(walk, x) if setting.dropout else x)
    low_rank = walk.new(product.elements, x.itemsize)
    low_rank = walk.chain(low_rank, product.before, product.backward, product.saved, trains=True)
    if layer.biased:
        base_result = copy(walk, base_result)
    left = scale_by_weight(walk, base_result, vector, True, width)
    right = scale(walk, scale_by_weight(walk, low_rank, vector, True, width))
    update = add(walk, left, right)
    del left, right, low_rank, base_result, held
    return add(walk, result, update)
