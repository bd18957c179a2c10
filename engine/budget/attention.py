"""Attention as transformers 5.23 computes it: rotary embedding, repeated heads, and the kernels sdpa and eager use.

The local variables are those of `modeling_llama.py`, `integrations/sdpa_attention.py` and their variants, because what
a local variable holds is not freed.
"""

from __future__ import annotations

from engine.budget.architecture import Architecture
from engine.budget.ghost import SQUARE, TOKEN, Ghost, Storage, Walk
from engine.budget.operations import FLOAT, add, cast, narrow, saves_output, scale
from engine.budget.setting import Setting


def rotary(walk: Walk, x: Ghost) -> Ghost:
    """`x * cos + rotate_half(x) * sin`; cos and sin need no gradient, so x is not saved."""
    return add(walk, _times_table(walk, x), _times_table(walk, _rotate_half(walk, x)))


def _times_table(walk: Walk, x: Ghost) -> Ghost:
    """Product with cos or sin, which outlive the layer."""
    size = x.size
    saved = walk.save(None) if x.node is not None else None
    return walk.result(x.elements, x.itemsize, [x], lambda gradient: [walk.allocate(size)], saved)


def _rotate_half(walk: Walk, x: Ghost) -> Ghost:
    """cat(-x2, x1). Backward: each half's gradient is placed into zeros of the full size, then both are added."""
    x1, x2 = narrow(walk, x, 1, 2), narrow(walk, x, 1, 2)
    return _concatenate(walk, _negate(walk, x2), x1)


def _negate(walk: Walk, x: Ghost) -> Ghost:
    """`-x`."""
    size = x.size
    return walk.result(x.elements, x.itemsize, [x], lambda gradient: [walk.allocate(size)])


def _concatenate(walk: Walk, left: Ghost, right: Ghost) -> Ghost:
    """Backward hands on views of the gradient."""
    return walk.result(
        left.elements + right.elements, left.itemsize, [left, right], lambda gradient: [gradient, gradient]
    )


def repeat_heads(walk: Walk, arch: Architecture, x: Ghost) -> Ghost:
    """`repeat_kv`: a copy with every head several times, summed in backward. A single head is repeated by view."""
    times, size = arch.heads // arch.kv_heads, x.size
    if times == 1:
        return x
    copied = arch.kv_heads > 1
    elements = x.elements * times if copied else 0
    output = walk.result(elements, x.itemsize, [x], lambda gradient: [walk.allocate(size)])
    if not copied:
        output.storage, output.elements = x.storage, x.elements * times
    return output


def flash(
    walk: Walk, arch: Architecture, query: Ghost, key: Ghost, value: Ghost, mask: Ghost | None = None
) -> Ghost:
    """The flash kernels: save query, key, value, output and the log-sum-exp (fp32 per token and head)."""
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


def masked_sdpa(walk: Walk, arch: Architecture, query: Ghost, key: Ghost, value: Ghost) -> Ghost:
    """sdpa with a mask: heads are repeated, and the boolean mask becomes one in the query's dtype, which is saved."""
    key = repeat_heads(walk, arch, key)
    value = repeat_heads(walk, arch, value)
    additive_mask = walk.new(SQUARE, query.itemsize)
    return flash(walk, arch, query, key, value, additive_mask)


def eager(walk: Walk, arch: Architecture, query: Ghost, key: Ghost, value: Ghost) -> Ghost:
    """Scores of rows × heads × length² are made, scaled, masked, softmaxed in fp32 and cast back."""
    key_states = repeat_heads(walk, arch, key) if 1 < arch.kv_heads < arch.heads else _copy(walk, key)
    value_states = repeat_heads(walk, arch, value) if 1 < arch.kv_heads < arch.heads else _copy(walk, value)
    query = _copy(walk, query)  # heads stand inside tokens; the batched product wants them outside
    weights = scale(walk, _matmul(walk, query, key_states, arch.heads * SQUARE))
    if arch.attention_softcap is not None:
        weights = scale(walk, weights)
        weights = saves_output(walk, weights, weights.itemsize)
        weights = scale(walk, weights)
    weights = add_constant(walk, weights)
    if arch.layout == "gpt_oss":
        weights = _softmax_with_sinks(walk, weights)
    else:
        weights = cast(walk, saves_output(walk, weights, FLOAT), query.itemsize)
    output = _matmul(walk, weights, value_states, query.elements)
    return _copy(walk, output)


def _softmax_with_sinks(walk: Walk, weights: Ghost) -> Ghost:
    """A column of sinks is joined on, the maximum subtracted, and the column dropped after the softmax."""
    joined = _copy(walk, weights)
    joined = add_constant(walk, joined)
    return narrow(walk, saves_output(walk, joined, joined.itemsize), 1, 1)


def add_constant(walk: Walk, x: Ghost) -> Ghost:
    """`x + mask`: a new tensor, the gradient passes through."""
    return walk.result(x.elements, x.itemsize, [x], lambda gradient: [gradient])


def _copy(walk: Walk, x: Ghost) -> Ghost:
    """`transpose(1, 2).contiguous()`."""
    return walk.result(x.elements, x.itemsize, [x], lambda gradient: [gradient])


def _matmul(walk: Walk, left: Ghost, right: Ghost, elements: int) -> Ghost:
    """Batched product: saves both sides."""
    left_size = left.size if left.node is not None else None
    right_size = right.size if right.node is not None else None

    def back(gradient: Storage) -> list[Storage | None]:
        return [None if size is None else walk.allocate(size) for size in (left_size, right_size)]

    needed = left_size is not None or right_size is not None
    saved = walk.save(left, right) if needed else None
    return walk.result(elements, left.itemsize, [left, right], back, saved)


def attend(walk: Walk, arch: Architecture, setting: Setting, query: Ghost, key: Ghost, value: Ghost) -> Ghost:
    """The attention kernel the run uses."""
    if setting.attention == "eager":
        return eager(walk, arch, query, key, value)
    if setting.attention == "sdpa" and setting.masked:
        return masked_sdpa(walk, arch, query, key, value)
    return flash(walk, arch, query, key, value)
