"""Attention as transformers 5.23 computes it: rotary embedding, repeated heads, and the kernels sdpa and eager use.

The local variables are those of `modeling_llama.py`, `integrations/sdpa_attention.py` and their variants, because what
a local variable holds is not freed.
"""

from __future__ import annotations

from engine.budget.architecture import Architecture
from engine.budget.exchange import to_heads, to_positions
from engine.budget.ghost import Ghost, Walk
from engine.budget.operations import (
    FLOAT,
    HALF,
    INDEX,
    add_number,
    cast,
    concatenate,
    copy,
    narrow,
    saves_output,
    scale,
    softmax,
    subtract,
)
from engine.budget.packed import SQUARE, TOKEN
from engine.budget.setting import Setting
from engine.budget.tape import Node, Operation, Storage

HEADS_OUTSIDE = ("phi3", "gpt_oss")
"""Layouts whose rotary embedding ends in a concatenation, which lays queries and keys out head by head."""


def rotary(walk: Walk, arch: Architecture, x: Ghost, width: int) -> Ghost:
    """`apply_rotary_pos_emb` of one of query and key."""
    if arch.layout == "gpt_oss":
        return _rotary_in_halves(walk, x, width)
    if arch.layout == "phi3":
        return _rotary_in_part(walk, x, arch.rotary_share, width)
    return _rotary(walk, x, width)


def _rotary(walk: Walk, x: Ghost, width: int) -> Ghost:
    """`x * cos + rotate_half(x) * sin`, gone through at once: seven operations that come for every query and key.

    cos and sin need no gradient, so x is not saved.
    """
    before, size, itemsize = x.node, x.size, max(x.itemsize, width)
    full = x.elements * itemsize
    walk.reach(full + size + size // 2)  # the first product, a half turned round, and the two joined
    if before is not None:
        walk.mark(full + size)
    walk.reach(3 * full)
    output = walk.new(x.elements, itemsize)
    return output if before is None else walk.taped(output, _Rotary(before, size, full))


class _Rotary(Operation):
    """The gradient of the sum is that of both products."""

    __slots__ = ("before", "gives")

    def __init__(self, before: Node, gives: int, size: int) -> None:
        super().__init__(size)
        self.before, self.gives = before, gives

    def go_back(self, walk: Walk) -> None:
        """The turned side first, half by half, then the other one."""
        incoming, before, size, full = self.take(), self.before, self.gives, self.size
        walk.bring_back()
        walk.reach(size + full)  # of the second product, made in the wider dtype
        walk.live += size
        walk.reach(size + size // 2)  # a half turned round, put into zeros
        walk.hand_on(before, walk.allocate(size))
        walk.reach(size)  # the other half
        walk.live -= size
        walk.hand_on(before, walk.allocate(size))
        if size != full:
            walk.reach(size + full)
        incoming = walk.exchange(incoming, size)
        walk.hand_on(before, incoming)


def _rotary_in_part(walk: Walk, x: Ghost, share: float, width: int) -> Ghost:
    """Phi-3: a share of each head is turned, the rest (which may be nothing) is joined on again."""
    turned = x if share == 1.0 else narrow(walk, x, int(x.elements * share))
    passed = narrow(walk, x, x.elements - turned.elements)
    return concatenate(walk, [_rotary(walk, turned, width), passed])


def _rotary_in_halves(walk: Walk, x: Ghost, width: int) -> Ghost:
    """gpt-oss: first * cos - second * sin and second * cos + first * sin, joined; ten operations, gone through at once.

    Of each half there are both products and what comes of them, at the end beside the other half's.
    """
    before, itemsize = x.node, max(x.itemsize, width)
    half = x.elements // 2 * itemsize
    walk.reach(3 * half)
    if before is not None:
        walk.mark(2 * half)
    walk.reach(4 * half)
    output = walk.new(x.elements, itemsize)
    walk.rising = False  # most has been noted
    return output if before is None else walk.taped(output, _RotaryInHalves(before, x.size, 2 * half))


class _RotaryInHalves(_Rotary):
    """The same of halves: each gets a gradient through both products."""

    __slots__ = ()

    def go_back(self, walk: Walk) -> None:
        """Most is there when the second half's other product is differentiated: its gradient, negated before, beside
        the three there are then; all narrowed from the tables' dtype where that is the wider."""
        incoming = self.take()
        walk.bring_back()
        half, wide = self.gives // 2, self.size // 2
        walk.reach(3 * half + (wide if half == wide else 2 * wide))
        del incoming
        walk.hand_on(self.before, walk.leave(self.gives))


def repeat_heads(walk: Walk, arch: Architecture, x: Ghost) -> Ghost:
    """`repeat_kv`: a copy with every head several times, summed in backward. A single head is repeated by view."""
    times = arch.heads // arch.kv_heads
    if times == 1:
        return x
    if arch.kv_heads == 1:
        return walk.view(x, x.elements * times, x.size)
    return walk.single(x, x.elements * times, x.itemsize, x.size)


def flash(
    walk: Walk, arch: Architecture, query: Ghost, key: Ghost, value: Ghost, mask: Ghost | None = None
) -> Ghost:
    """The flash kernels: save query, key, value, output and the log-sum-exp (fp32 per token and head).

    The output is laid out like the query: where heads stand outside, the layer copies it to put tokens outside.
    """
    output = _kernel(walk, arch, _factor(walk, query), _factor(walk, key), _factor(walk, value), mask)
    return copy(walk, output) if arch.layout in HEADS_OUTSIDE else output


def _kernel(walk: Walk, arch: Architecture, query: Ghost, key: Ghost, value: Ghost, mask: Ghost | None) -> Ghost:
    """One of them, all in one dtype."""
    sizes = [query.size, key.size, value.size]

    def back(gradient: Storage) -> list[Storage | None]:
        return [walk.allocate(size) for size in sizes]

    needed = any(ghost.node is not None for ghost in (query, key, value))
    saved = walk.save(query, key, value, *([mask] if mask else [])) if needed else None
    output = walk.result(query.elements, query.itemsize, [query, key, value], back, saved)
    log_sum_exp = walk.new(arch.heads * TOKEN, FLOAT)
    if saved is not None:
        walk.save_into(saved, output, log_sum_exp)
    return output


def _factor(walk: Walk, x: Ghost) -> Ghost:
    """What goes into a product: in half precision under autocast."""
    return cast(walk, x, HALF) if walk.autocast else x


def masked_sdpa(walk: Walk, arch: Architecture, query: Ghost, key: Ghost, value: Ghost) -> Ghost:
    """sdpa with a mask: heads are repeated, and the boolean mask becomes one in the query's dtype, which is saved."""
    key = repeat_heads(walk, arch, key)
    value = repeat_heads(walk, arch, value)
    additive_mask = walk.new(SQUARE, HALF if walk.autocast else query.itemsize)
    return flash(walk, arch, query, key, value, additive_mask)


def eager(
    walk: Walk, arch: Architecture, setting: Setting, query: Ghost, key: Ghost, value: Ghost
) -> tuple[Ghost, Ghost]:
    """Scores of rows × heads × length² are made, scaled, masked, softmaxed in fp32 and cast back; and given back, too.

    The mask has the itemsize of what goes from layer to layer.
    """
    key_states, value_states = repeat_heads(walk, arch, key), repeat_heads(walk, arch, value)
    outside = arch.layout in HEADS_OUTSIDE
    weights = _scores(walk, arch, query, key_states, outside)
    weights = add_number(walk, weights, setting.base_bytes)
    if arch.layout == "gpt_oss":
        _joined, weights = _softmax_with_sinks(walk, arch, weights)
        weights = cast(walk, weights, value.itemsize)
    elif arch.layout == "gpt2":
        weights = cast(walk, saves_output(walk, weights), value.itemsize)
    else:
        weights = cast(walk, softmax(walk, weights, FLOAT), query.itemsize)
    values = _factor(walk, value_states)
    values = values if setting.one_row else _heads_first(walk, arch, values, False)
    output = _matmul(walk, _factor(walk, weights), values, query.elements)
    del values
    return copy(walk, output), weights


def _scores(walk: Walk, arch: Architecture, query: Ghost, key: Ghost, outside: bool) -> Ghost:
    """The product of queries and keys, scaled and, in Gemma 2, capped."""
    weights = scale(walk, _query_by_key(walk, arch, query, key, outside))
    if arch.attention_softcap is not None:
        weights = scale(walk, weights)
        weights = saves_output(walk, weights)
        weights = scale(walk, weights)
    return weights


def _query_by_key(walk: Walk, arch: Architecture, query: Ghost, key: Ghost, outside: bool) -> Ghost:
    """What is copied for the product is gone after it, unless it is saved."""
    query = _factor(walk, query)
    query = query if outside else copy(walk, query)
    key = _heads_first(walk, arch, _factor(walk, key), outside)
    return _matmul(walk, query, key, arch.heads * SQUARE)


def _heads_first(walk: Walk, arch: Architecture, x: Ghost, outside: bool) -> Ghost:
    """Keys or values for all heads as batched products want them, with heads outside tokens: what was not made so by
    repeating is copied."""
    repeated = 1 < arch.kv_heads < arch.heads
    return x if repeated or (outside and arch.kv_heads == arch.heads) else copy(walk, x)


def _softmax_with_sinks(walk: Walk, arch: Architecture, weights: Ghost) -> tuple[Ghost, Ghost]:
    """A column of sinks is joined on, the maximum subtracted, and the column dropped after the softmax.

    What goes into the softmax stays until the attention function returns.
    """
    columns = arch.heads * TOKEN
    sinks = walk.tensor(weights.storage, columns, weights.itemsize, columns * weights.itemsize)
    joined = concatenate(walk, [weights, sinks])
    joined = subtract(walk, joined, _maximum(walk, joined, arch.heads * TOKEN))
    probabilities = saves_output(walk, joined)
    return joined, narrow(walk, probabilities, weights.elements)


def _maximum(walk: Walk, x: Ghost, rows: int) -> Ghost:
    """`x.max(-1, keepdim=True)`: saves where it was; backward scatters into zeros of the full size."""
    index = walk.new(rows, INDEX)
    saved = walk.save(index) if x.node is not None else None
    return walk.single(x, rows, x.itemsize, x.size, saved)


def _matmul(walk: Walk, left: Ghost, right: Ghost, elements: int) -> Ghost:
    """Batched product: saves both sides."""
    left_size = left.size if left.node is not None else None
    right_size = right.size if right.node is not None else None

    def back(gradient: Storage) -> list[Storage | None]:
        return [None if size is None else walk.allocate(size) for size in (left_size, right_size)]

    needed = left_size is not None or right_size is not None
    saved = walk.save(left, right) if needed else None
    return walk.result(elements, left.itemsize, [left, right], back, saved)


def _attend_shared(
    walk: Walk, arch: Architecture, setting: Setting, query: Ghost, key: Ghost, value: Ghost
) -> Ghost:
    """Every rank attends with its own heads, at all positions; the caller holds what it sent until it is back."""
    own_query, own_key, own_value = to_heads(walk, arch, setting.sequence, query, key, value)
    output = flash(walk, arch, own_query, own_key, own_value)
    del own_query, own_key, own_value
    return to_positions(walk, output)


def attend(
    walk: Walk, arch: Architecture, setting: Setting, masked: bool, query: Ghost, key: Ghost, value: Ghost
) -> tuple[Ghost, Ghost | None]:
    """The attention kernel the run uses: its output, and the weights where the kernel makes them."""
    if setting.sequence > 1:
        return _attend_shared(walk, arch, setting, query, key, value), None
    if setting.attention == "eager":
        return eager(walk, arch, setting, query, key, value)
    if setting.attention == "sdpa" and masked:
        return masked_sdpa(walk, arch, query, key, value), None
    return flash(walk, arch, query, key, value), None
