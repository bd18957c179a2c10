"""LoRA beside a linear layer as peft 0.19 computes it: plain, with keyed dropout, on a 4-bit base, and DoRA.

The local variables are those of `peft/tuners/lora/layer.py`, `bnb.py` and `dora.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.budget.ghost import Ghost, Node, Storage, Walk, travels
from engine.budget.operations import add, cast, copy, scale, scale_by_weight
from engine.budget.packed import LEFT, POSITION, TOKEN
from engine.budget.setting import Setting
from engine.budget.static import rounded

INTEGER = 4
"""Bytes of an int32."""


class Adapted(NamedTuple):
    """The linear layer an adapter stands beside."""

    outputs: int
    inputs: int
    biased: bool
    merged: int = 1
    """Tokens that it takes at once."""


def adapted_linear(walk: Walk, setting: Setting, layer: Adapted, x: Ghost, unpacked: int) -> Ghost:
    """`operations.linear` of a frozen weight and `adapted` without dropout, gone through at once: what plans meet most,
    up to seven times a layer. Nothing from outside comes between the two, so all but what goes in and comes out is
    arithmetic, with the maxima written down as in `engine.budget.norm`.
    """
    return _AdaptedLinear(walk, setting, layer, x, unpacked).forward(x)


class _AdaptedLinear:
    """One of them: how many bytes each tensor has."""

    def __init__(self, walk: Walk, setting: Setting, layer: Adapted, x: Ghost, unpacked: int) -> None:
        width, rank, merged = setting.adapter_bytes, setting.rank, layer.merged
        self.width = width
        self.walk, self.before, self.size, self.itemsize = walk, x.node, x.size, x.itemsize
        self.unpacked, self.copied = unpacked, setting.quantized
        self.first, self.second = rounded(rank * layer.inputs * width), rounded(rank * layer.outputs * width)
        """Bytes of the gradients of A and B."""
        self.elements = -(-layer.outputs // merged) * TOKEN
        self.given, self.high = self.elements * x.itemsize, self.elements * width
        """What the base gives, and what B gives; `low`: what A gives; `lower`: what goes into it."""
        self.low, self.lower = -(-rank // merged) * TOKEN * width, x.elements * width
        self.cast = self.lower if width != x.itemsize else 0
        self.total = self.given if self.copied else max(self.given, self.high)
        """The sum of both."""
        self.kept_low, self.lent_low = walk.keeps(self.low)

    def forward(self, x: Ghost) -> Ghost:
        """The output, and one node for all of it."""
        walk, given, cast, low, high = self.walk, self.given, self.cast, self.low, self.high
        most = max(2 * high, (given if self.copied else high) + self.total)
        self.saved = walk.held(x) if walk.learning and not cast else []
        self.kept, self.lent = 0, self.size if self.size in self.saved else 0  # a number waits on the host
        if cast and walk.learning:
            goes = walk.offloads and travels(x.elements, self.width)
            self.kept, self.lent = (0, cast) if goes else (cast, 0)
        walk.live += given
        if self.copied:
            walk.reach(self.unpacked)
            walk.reach(given)
        walk.live += cast + low
        walk.rising = True
        walk.mark()
        if low + high > most:  # of a rank that exceeds the outputs
            walk.reach(high)
        walk.live -= low
        walk.keep(self.kept_low)
        walk.reach(most)
        walk.live += self.kept - cast - given
        walk.lingering += self.kept
        output = _made(walk, given)
        return walk.chain(
            Ghost(output, self.elements, self.itemsize), self.before, self.backward, self.saved, trains=True
        )

    def backward(self, node: Node) -> None:
        """From the gradient of the output to those of A, B and the input, which has one from each side."""
        walk, size, before = self.walk, self.size, self.before
        base = self._to_both(node.take())
        walk.bring_back()
        live, peaks = walk.live + self.lent_low + self.low, walk.peaks
        peaks.append(live + self.second)
        live += self.second * LEFT + self.lent - self.lent_low - self.kept_low - self.high
        peaks.append(live + self.first + (self.lower if before is not None else 0))
        live += self.first * LEFT - self.lent - self.low - self.kept
        if before is not None and 0 < self.cast < size:  # else what is there beside A's gradient is more
            peaks.append(live + self.lower + size)
        walk.live, walk.rising = live, False
        self.saved.clear()
        if base is None:
            return
        walk.hand_on(before, _made(walk, size))
        if self.unpacked:
            made = Storage(walk, size)
            walk.reach(self.unpacked)
        else:
            made = walk.exchange(base, size)
        del base
        walk.hand_on(before, made)

    def _to_both(self, incoming: Storage) -> Storage | None:
        """The base's gradient, where its input wants one, beside the live bytes of the update's."""
        walk, wanted, base = self.walk, self.before is not None, None
        if self.total != self.given:  # the sum was cast: its gradient is cast back, and for the base once more
            del incoming
            walk.live += self.total
            base = Storage(walk, self.given)
            if not wanted:
                base = None
            walk.reach(self.high)
        else:  # both get the same one; the update's is scaled, and cast first where its dtype is another
            walk.live += self.high
            walk.rising = True
            if wanted:
                base = incoming
            del incoming
            if self.high != self.total:
                walk.reach(self.high)
        return base


def _made(walk: Walk, size: int) -> Storage:
    """What is there after larger bytes have gone."""
    made = Storage(walk, size)
    walk.rising = False
    return made


def adapted(walk: Walk, setting: Setting, layer: Adapted, x: Ghost, result: Ghost) -> Ghost:
    """base(x) + B(A(dropout(x))) * scaling, in the wider of the two dtypes, and back in the base's.

    A layer has up to seven of them. So all but the cast of `x` is gone through at once, as in `engine.budget.norm`.
    """
    itemsize, width = result.itemsize, setting.adapter_bytes
    if setting.quantized:
        result = copy(walk, result)
    x = cast(walk, x, width)
    if setting.dora:
        return cast(walk, _dora(walk, setting, layer, x, result), itemsize)
    low_rank = _LowRank(walk, setting, layer, x.itemsize)
    elements, high, base, given = low_rank.elements, low_rank.high, result.node, result.size
    update = elements * itemsize if setting.quantized else high
    total = elements * (itemsize if setting.quantized else max(itemsize, width))
    # At most there are the update and what it was scaled from, or the update and its sum with the base's output.
    low_rank.forward(dropped(walk, x) if setting.dropout else x, max(2 * high, update + total))

    def back(node: Node) -> None:
        incoming = node.take()
        if total != given:  # the sum was cast: its gradient is cast back, and for the base once more
            del incoming
            walk.live += total
            walk.hand_on(base, walk.allocate(given))
            walk.reach(high)
        else:  # both get the same one; the update's is scaled, and cast first where its dtype is another
            walk.hand_on(base, incoming)
            walk.live += high
            walk.rising = True
            del incoming
            if high != total:
                walk.reach(high)
        low_rank.backward(node)

    output = walk.new(elements, itemsize)
    return walk.chain(output, base, back, low_rank.saved, trains=True)


class _LowRank:
    """B(A(x)), two linear layers that learn."""

    def __init__(self, walk: Walk, setting: Setting, layer: Adapted, itemsize: int) -> None:
        self.walk, width, rank = walk, setting.adapter_bytes, setting.rank
        self.first, self.second = rounded(rank * layer.inputs * width), rounded(rank * layer.outputs * width)
        """Bytes of the gradients of A and B."""
        self.elements = -(-layer.outputs // layer.merged) * TOKEN
        self.high = self.elements * itemsize
        """Bytes of what it gives; `low`: of what is between."""
        self.low = -(-rank // layer.merged) * TOKEN * itemsize
        self.kept_low, self.lent_low = walk.keeps(self.low)

    def forward(self, x: Ghost, most: int) -> None:
        """What it gives is for the caller to count; `most`: of the bytes that are there at once from then on."""
        walk = self.walk
        self.before, self.size, self.saved = x.node, x.size, walk.save(x)
        walk.live += self.low
        walk.rising = True
        del x
        walk.mark()
        if self.low + self.high > most:  # of a rank that exceeds the outputs
            walk.reach(self.high)
        walk.live -= self.low
        walk.keep(self.kept_low)
        walk.reach(most)

    def backward(self, node: Node) -> None:
        """From the gradient of what it gave, whose bytes are live and go."""
        walk, lent = self.walk, sum([each for each in self.saved if isinstance(each, int)])
        walk.bring_back()
        walk.live += self.lent_low + self.low
        walk.leaf_gradient(self.second)
        walk.live += lent - self.lent_low - self.kept_low - self.high
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
    low_rank = _low_rank(walk, setting, layer, dropped(walk, x) if setting.dropout else x)
    if layer.biased:
        base_result = copy(walk, base_result)
    left = scale_by_weight(walk, base_result, vector, True, width)
    right = scale(walk, scale_by_weight(walk, low_rank, vector, True, width))
    update = add(walk, left, right)
    del left, right, low_rank, base_result, held
    return add(walk, result, update)


def _low_rank(walk: Walk, setting: Setting, layer: Adapted, x: Ghost) -> Ghost:
    """B(A(x)) by itself."""
    product, itemsize = _LowRank(walk, setting, layer, x.itemsize), x.itemsize
    arguments = [x]
    del x
    product.forward(arguments.pop(), product.high)

    def back(node: Node) -> None:
        incoming = node.take()
        del incoming
        walk.live += product.high
        product.backward(node)

    return walk.chain(walk.new(product.elements, itemsize), product.before, back, product.saved, trains=True)
