"""LoRA beside a linear layer as peft 0.19 computes it: plain, with keyed dropout, on a 4-bit base, and DoRA.

The local variables are those of `peft/tuners/lora/layer.py`, `bnb.py` and `dora.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.budget.ghost import Ghost, Walk, travels
from engine.budget.operations import add, cast, copy, scale, scale_by_weight
from engine.budget.packed import LEFT, POSITION, TOKEN
from engine.budget.setting import Setting
from engine.budget.static import rounded
from engine.budget.tape import Node, Operation, Saved, Storage

INTEGER = 4
"""Bytes of an int32."""


class Adapted(NamedTuple):
    """The linear layer an adapter stands beside."""

    outputs: int
    inputs: int
    biased: bool
    merged: int = 1
    """Tokens that it takes at once."""


def adapted_linear(
    walk: Walk, setting: Setting, x: Ghost, outputs: int, inputs: int, merged: int, unpacked: int
) -> Ghost:
    """`operations.linear` of a frozen weight and `adapted` without dropout, gone through at once: what plans meet most,
    up to seven times a layer. Nothing from outside comes between the two, so all but what goes in and comes out is
    arithmetic, with the maxima written down as in `engine.budget.norm`.
    """
    width, rank, copied = setting.adapter_bytes, setting.rank, setting.quantized
    elements = -(-outputs // merged) * TOKEN
    given, high = elements * x.itemsize, elements * width  # what the base gives, and what B gives
    total = given if copied or given > high else high  # the sum of both
    most = max(2 * high, given + total if copied else high + total)
    low, lower = -(-rank // merged) * width * TOKEN, x.elements * width  # what A gives, and what goes into it
    cast = lower if width != x.itemsize else 0
    kept_low, kept, saved = walk.stays(low), 0, []
    if walk.learning:
        if not cast:
            saved = walk.held(x)
        elif not (walk.offloads and travels(x.elements, width)):
            kept = cast
    walk.live += given
    if copied:
        walk.reach(unpacked)
        walk.reach(given)
    walk.live += cast + low
    walk.rising = True
    walk.mark()
    if low + high > most:  # of a rank that exceeds the outputs
        walk.reach(high)
    walk.live -= low
    walk.keep(kept_low)
    walk.reach(most)
    walk.live += kept - cast - given
    walk.lingering += kept
    output = walk.new(elements, x.itemsize)
    walk.rising = False  # most has been noted
    if not walk.learning:
        return output
    first, second = rounded(rank * inputs * width), rounded(rank * outputs * width)
    lent = cast - kept + (x.size if x.size in saved else 0)  # a number waits on the host
    # The way back, over what is live when the gradient of what B gave is there: first B's gradient is made, then A's.
    # What waits on the host comes back for as long as one takes.
    between = low + second * LEFT + lent - kept_low - high
    tops = [low - kept_low + low + second, between + first]
    change = between + first * LEFT - lent - low - kept
    if x.node is not None:
        tops[1] += lower
        if 0 < cast < x.size:  # else what is there beside A's gradient is more
            tops.append(change + lower + x.size)
    casts = cast >= 2 * x.size
    return walk.taped(output, _AdaptedLinear(x, given, saved, total, high, unpacked, tops, change, casts=casts))


class _AdaptedLinear(Operation):
    """One of them: how many bytes each tensor has."""

    __slots__ = ("before", "casts", "change", "gives", "high", "tops", "total", "unpacked")

    def __init__(
        self, x: Ghost, size: int, saved: Saved, total: int, high: int, unpacked: int, tops: list[int], change: int,
        *, casts: bool,
    ) -> None:  # fmt: skip
        self.size, self.saved, self.gradient, self.joins = size, saved, None, False
        self.before, self.gives, self.total, self.high, self.unpacked = x.node, x.size, total, high, unpacked
        self.casts = casts
        """What A took was a copy of x at least twice as wide, beside which A's gradient was made: more than there is
        when the base makes its own."""
        self.tops, self.change = tops, change
        """Over what is live when the gradient of what B gave is there: the maxima, and what comes of it."""

    def go_back(self, walk: Walk) -> None:
        """From the gradient of the output to those of A, B and the input, which has one from each side."""
        base = self._to_both(walk)
        walk.bring_back()
        live = walk.live
        for top in self.tops:
            walk.peaks.append(live + top)
        walk.live, walk.rising = live + self.change, False
        assert self.saved is not None
        self.saved.clear()
        if base is None:
            return
        walk.hand_on(self.before, walk.leave(self.gives))
        if self.unpacked:
            made = walk.allocate(self.gives)
            walk.reach(self.unpacked)
        else:
            made = walk.exchange(base, self.gives, noted=not self.casts)
        del base
        walk.hand_on(self.before, made)

    def _to_both(self, walk: Walk) -> Storage | None:
        """The base's gradient, where its input wants one, beside the live bytes of the update's."""
        incoming, wanted, base = self.take(), self.before is not None, None
        if self.total != self.size:  # the sum was cast: its gradient is cast back, and for the base once more
            del incoming
            walk.live += self.total
            base = walk.allocate(self.size)
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
    update = _LowRank(walk, setting, layer, x.itemsize)
    base, given, scaled = result.node, result.size, update.elements * itemsize if setting.quantized else update.size
    total = update.elements * (itemsize if setting.quantized else max(itemsize, width))
    # At most there are the update and what it was scaled from, or the update and its sum with the base's output.
    update.forward(walk, dropped(walk, x) if setting.dropout else x, max(2 * update.size, scaled + total))
    output = walk.new(update.elements, itemsize)
    return walk.taped(output, _Adapted(base, given, total, update)) if walk.learning else output


class _Adapted(Operation):
    """The sum of what the base gave and of an update."""

    __slots__ = ("base", "total", "update")

    def __init__(self, base: Node | None, size: int, total: int, update: _LowRank) -> None:
        super().__init__(size)
        self.base, self.total, self.update = base, total, update

    def go_back(self, walk: Walk) -> None:
        """The base's gradient first."""
        incoming, high = self.take(), self.update.size
        if self.total != self.size:  # the sum was cast: its gradient is cast back, and for the base once more
            del incoming
            walk.live += self.total
            walk.hand_on(self.base, walk.allocate(self.size))
            walk.reach(high)
        else:  # both get the same one; the update's is scaled, and cast first where its dtype is another
            walk.hand_on(self.base, incoming)
            walk.live += high
            walk.rising = True
            del incoming
            if high != self.total:
                walk.reach(high)
        self.update.behind(walk)


class _LowRank(Operation):
    """B(A(x)), two linear layers that learn."""

    __slots__ = ("before", "elements", "first", "gives", "kept_low", "low", "second")

    def __init__(self, walk: Walk, setting: Setting, layer: Adapted, itemsize: int) -> None:
        width, rank = setting.adapter_bytes, setting.rank
        self.elements = -(-layer.outputs // layer.merged) * TOKEN
        super().__init__(self.elements * itemsize)
        self.first, self.second = rounded(rank * layer.inputs * width), rounded(rank * layer.outputs * width)
        """Bytes of the gradients of A and B."""
        self.low = -(-rank // layer.merged) * TOKEN * itemsize
        """Bytes of what is between the two."""
        self.kept_low = walk.stays(self.low)

    def forward(self, walk: Walk, x: Ghost, most: int) -> None:
        """What it gives is for the caller to count; `most`: of the bytes that are there at once from then on."""
        self.before, self.gives, self.saved = x.node, x.size, walk.save(x)
        walk.live += self.low
        walk.rising = True
        del x
        walk.mark()
        if self.low + self.size > most:  # of a rank that exceeds the outputs
            walk.reach(self.size)
        walk.live -= self.low
        walk.keep(self.kept_low)
        walk.reach(most)

    def go_back(self, walk: Walk) -> None:
        """Where nothing else was made of it at once."""
        incoming = self.take()
        del incoming
        walk.live += self.size
        self.behind(walk)

    def behind(self, walk: Walk) -> None:
        """From the gradient of what it gave, whose bytes are live and go."""
        saved, lent_low = self.saved or [], self.low - self.kept_low
        lent = sum([each for each in saved if isinstance(each, int)])
        walk.bring_back()
        walk.live += lent_low + self.low
        walk.leaf_gradient(self.second)
        walk.live += lent - lent_low - self.kept_low - self.size
        made = walk.allocate(self.gives) if self.before is not None else None
        walk.leaf_gradient(self.first)
        walk.live -= lent + self.low
        saved.clear()
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
    product.forward(walk, arguments.pop(), product.size)
    output = walk.new(product.elements, itemsize)
    return walk.taped(output, product) if walk.learning else output
