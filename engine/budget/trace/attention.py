"""Traces attention as transformers 5.23 computes it: rotary embedding, repeated heads, flash, sdpa and eager kernels.

The local variables are those of `modeling_llama.py`, `integrations/sdpa_attention.py` and their variants, because a
tensor stays allocated while a local variable refers to it.

Try: `python -m pytest tests/budget/test_accuracy.py`
"""

from __future__ import annotations

from engine.budget.architecture.facts import Architecture
from engine.budget.trace.dropout import dropped_weights
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, Storage, TracedTensor
from engine.budget.trace.operations import (
    FLOAT,
    HALF,
    INDEX,
    add,
    add_number,
    cast,
    concatenate,
    copy,
    halves,
    multiply,
    narrow,
    saves_output,
    scale,
    softmax,
    subtract,
)
from engine.budget.trace.polynomial import BLOCK_TOKEN, NO_BYTES, SQUARE, TOKEN, BytesPolynomial
from engine.budget.trace.ulysses_buffers import to_heads, to_positions

HEADS_OUTSIDE = ("phi3", "gpt_oss")
"""Layouts whose rotary embedding ends in a concatenation: queries and keys then lie in memory head by head."""


def rotary(trace: MemoryTrace, arch: Architecture, x: TracedTensor, width: int) -> TracedTensor:
    """Trace `apply_rotary_pos_emb` on the query or on the key; `width`: bytes per value of the cos and sin tables."""
    if arch.layout == "gpt_oss":
        return _rotary_in_halves(trace, x, width)
    if arch.layout == "phi3":
        return _rotary_in_part(trace, x, arch.rotary_share, width)
    return _rotary(trace, x, width)


def _rotary(trace: MemoryTrace, x: TracedTensor, itemsize: int) -> TracedTensor:
    """Trace `x * cos + rotate_half(x) * sin`; cos and sin need no gradient, so x is not saved for backward. `itemsize`:
    bytes per value of cos and sin."""
    return add(trace, _times_table(trace, x, itemsize), _times_table(trace, _rotate_half(trace, x), itemsize))


def _rotate_half(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """Trace `cat(-x2, x1)`, where x1 and x2 are the halves of `x`."""
    x1, x2 = narrow(trace, x, x.elements // 2), narrow(trace, x, x.elements // 2)
    return concatenate(trace, [scale(trace, x2), x1])


def _times_table(trace: MemoryTrace, x: TracedTensor, itemsize: int) -> TracedTensor:
    """Trace `x * cos` of a rotary embedding, promoted to the wider dtype. The table of cosines, of `itemsize` bytes per
    value, costs nothing here, because all layers share it."""
    return multiply(trace, x, trace.new(NO_BYTES, itemsize))


def _rotary_in_part(trace: MemoryTrace, x: TracedTensor, share: float, width: int) -> TracedTensor:
    """Trace Phi-3's rotary embedding: the part `share` of each head is rotated, then concatenated with the rest of the
    head. `width`: bytes per value of the cos and sin tables."""
    turned = x if share == 1.0 else narrow(trace, x, int(x.elements.per_token * share) * TOKEN)
    passed = narrow(trace, x, x.elements - turned.elements)
    return concatenate(trace, [_rotary(trace, turned, width), passed])


def _rotary_in_halves(trace: MemoryTrace, x: TracedTensor, itemsize: int) -> TracedTensor:
    """Trace gpt-oss' rotary embedding: `cat(first * cos - second * sin, second * cos + first * sin)`, where first and
    second are the halves of `x`. `itemsize`: bytes per value of cos and sin."""
    first, second = halves(trace, x)
    left = subtract(trace, _times_table(trace, first, itemsize), _times_table(trace, second, itemsize))
    right = add(trace, _times_table(trace, second, itemsize), _times_table(trace, first, itemsize))
    return concatenate(trace, [left, right])


def repeat_heads(trace: MemoryTrace, arch: Architecture, x: TracedTensor) -> TracedTensor:
    """Trace `repeat_kv` on keys or values: a copy that has every head once for each query head that shares it. A single
    head is expanded as a view; `x` itself is returned if there are as many key heads as query heads."""
    times = arch.heads // arch.kv_heads
    if times == 1:
        return x
    if arch.kv_heads == 1:
        return trace.view(x, x.elements * times, trace.new_gradient(x))
    return trace.unary(x, x.elements * times, x.itemsize)


def flash(
    trace: MemoryTrace,
    arch: Architecture,
    config: MemoryConfig,
    query: TracedTensor,
    key: TracedTensor,
    value: TracedTensor,
    mask: TracedTensor | None = None,
) -> TracedTensor:
    """Trace a flash kernel: query, key, value, output and the log-sum-exp (fp32 per token and head) are saved for
    backward, and `mask` if there is one. Returns the output, of the query's size.

    The output has the query's memory layout. If that is head by head, the layer copies it to token by token.
    """
    query, key, value = _factor(trace, query), _factor(trace, key), _factor(trace, value)
    output = _kernel(trace, arch, config, query, key, value, mask)
    return copy(trace, output) if arch.layout in HEADS_OUTSIDE else output


def _kernel(
    trace: MemoryTrace,
    arch: Architecture,
    config: MemoryConfig,
    query: TracedTensor,
    key: TracedTensor,
    value: TracedTensor,
    mask: TracedTensor | None,
) -> TracedTensor:
    """Trace the flash kernel on query, key and value of one dtype, with what `flash` saves for backward; returns the
    output."""
    sizes, scratch = [query.size, key.size, value.size], backward_scratch(arch, config, query, key)

    def back(gradient: Storage) -> list[Storage | None]:
        found: list[Storage | None] = [trace.allocate(size) for size in sizes]
        trace.allocate(scratch)  # freed at once, when all three gradients exist
        return found

    needed = any(tensor.node is not None for tensor in (query, key, value))
    saved = trace.save(query, key, value, *([mask] if mask else [])) if needed else None
    output = trace.result(query.elements, query.itemsize, [query, key, value], back, saved)
    log_sum_exp = trace.new(arch.heads * TOKEN, FLOAT)
    if saved is not None:
        saved += trace.save(output, log_sum_exp)
    return output


def _factor(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """Return `x` in the dtype of attention's matrix products: cast to half precision under autocast, else unchanged."""
    return cast(trace, x, HALF) if trace.autocast else x


def backward_scratch(
    arch: Architecture, config: MemoryConfig, query: TracedTensor, key: TracedTensor
) -> BytesPolynomial:
    """Bytes that attention's backward pass allocates in addition to the gradients that it returns; 0 except on CUDA in
    half precision."""
    if not config.attention_scratch or query.itemsize != HALF:
        return NO_BYTES
    heads, kv_heads = (tensor.elements.per_token // arch.head_dim for tensor in (query, key))
    return scratch_per_token(heads, kv_heads, arch.head_dim) * BLOCK_TOKEN


def scratch_per_token(heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes per token of the scratch with which flash attention computes gradients in half precision.

    The gradient of the queries is added up in fp32, with heads rounded up to the kernel's width, and two fp32 numbers
    are kept for each query. Where several query heads share a key head, gradients of keys and values are computed for
    every query head first. (`mha_bwd` of flash-attn 2, which sdpa and varlen run; versions 3 and 4 take as much or
    less. The memory-efficient kernel, which sdpa runs with a mask, adds up the same gradient.)
    """
    step = 32 if head_dim <= 128 else 64
    width = -(-head_dim // step) * step
    expanded = 2 * heads * head_dim * HALF if kv_heads != heads else 0
    return FLOAT * heads * (width + 2) + expanded


def masked_sdpa(
    trace: MemoryTrace,
    arch: Architecture,
    config: MemoryConfig,
    query: TracedTensor,
    key: TracedTensor,
    value: TracedTensor,
) -> TracedTensor:
    """Trace sdpa with a mask: heads are repeated, and a mask in the query's dtype is made from the boolean one and
    saved for backward."""
    key = repeat_heads(trace, arch, key)
    value = repeat_heads(trace, arch, value)
    additive_mask = trace.new(SQUARE, HALF if trace.autocast else query.itemsize)
    return flash(trace, arch, config, query, key, value, additive_mask)


def eager(
    trace: MemoryTrace,
    arch: Architecture,
    config: MemoryConfig,
    query: TracedTensor,
    key: TracedTensor,
    value: TracedTensor,
) -> tuple[TracedTensor, TracedTensor]:
    """Trace eager attention; return its output and the attention weights (rows × heads × length²).

    Scores are computed, scaled, masked, softmaxed in fp32 and cast back. The mask has the dtype of hidden states.
    """
    key_states, value_states = repeat_heads(trace, arch, key), repeat_heads(trace, arch, value)
    outside = arch.layout in HEADS_OUTSIDE
    weights = _scores(trace, arch, query, key_states, outside)
    weights = add_number(trace, weights, config.base_bytes)
    if arch.layout == "gpt_oss":
        _joined, weights = _softmax_with_sinks(trace, arch, weights)
        weights = cast(trace, weights, value.itemsize)
    elif arch.layout == "gpt2":
        weights = cast(trace, saves_output(trace, weights), value.itemsize)
    else:
        weights = cast(trace, softmax(trace, weights, FLOAT), query.itemsize)
    if config.attention_dropout:
        weights = dropped_weights(trace, config, weights)
    values = _factor(trace, value_states)
    values = values if config.one_row else _heads_first(trace, arch, values, False)
    output = _matmul(trace, _factor(trace, weights), values, query.elements)
    del values
    return copy(trace, output), weights


def _scores(
    trace: MemoryTrace, arch: Architecture, query: TracedTensor, key: TracedTensor, outside: bool
) -> TracedTensor:
    """Trace the scores: the product of queries and keys, scaled and, in Gemma 2, capped by tanh. `outside`: see
    `_heads_first`."""
    weights = scale(trace, _query_by_key(trace, arch, query, key, outside))
    if arch.attention_softcap is not None:
        weights = scale(trace, weights)
        weights = saves_output(trace, weights)
        weights = scale(trace, weights)
    return weights


def _query_by_key(
    trace: MemoryTrace, arch: Architecture, query: TracedTensor, key: TracedTensor, outside: bool
) -> TracedTensor:
    """Trace the product of queries and keys; copies made for it are freed afterwards, unless backward needs them.
    `outside`: see `_heads_first`."""
    query = _factor(trace, query)
    query = query if outside else copy(trace, query)
    key = _heads_first(trace, arch, _factor(trace, key), outside)
    return _matmul(trace, query, key, arch.heads * SQUARE)


def _heads_first(trace: MemoryTrace, arch: Architecture, x: TracedTensor, outside: bool) -> TracedTensor:
    """Return keys or values laid out head by head, as batched products need them: a copy, unless `x` already is.

    `outside`: the model's rotary embedding already returns keys head by head (HEADS_OUTSIDE), so keys that are not
    repeated need no copy.
    """
    repeated = 1 < arch.kv_heads < arch.heads
    return x if repeated or (outside and arch.kv_heads == arch.heads) else copy(trace, x)


def _softmax_with_sinks(
    trace: MemoryTrace, arch: Architecture, weights: TracedTensor
) -> tuple[TracedTensor, TracedTensor]:
    """Trace gpt-oss' softmax: a column of sinks is appended, the maximum subtracted, the softmax taken, and the column
    removed.

    Returns the softmax's input, to which the attention function refers until it returns, and the attention weights.
    """
    columns = arch.heads * TOKEN
    sinks = TracedTensor(weights.storage, columns, weights.itemsize)
    joined = concatenate(trace, [weights, sinks])
    joined = subtract(trace, joined, _maximum(trace, joined, arch.heads * TOKEN))
    probabilities = saves_output(trace, joined)
    return joined, narrow(trace, probabilities, weights.elements)


def _maximum(trace: MemoryTrace, x: TracedTensor, rows: BytesPolynomial) -> TracedTensor:
    """Trace `x.max(-1, keepdim=True)`: the index of each maximum is saved; backward scatters into zeros of x's size.
    `rows`: the number of maxima as a polynomial in the rows and tokens of the micro-batch."""
    index = trace.new(rows, INDEX)
    saved = trace.save(index) if x.node is not None else None
    return trace.unary(x, rows, x.itemsize, saved)


def _matmul(trace: MemoryTrace, left: TracedTensor, right: TracedTensor, elements: BytesPolynomial) -> TracedTensor:
    """Trace `torch.matmul`, which saves both factors for backward. `elements`: elements of the output as a polynomial
    in the rows and tokens of the micro-batch; each takes as many bytes as one of `left`."""
    left_size = left.size if left.node is not None else None
    right_size = right.size if right.node is not None else None

    def back(gradient: Storage) -> list[Storage | None]:
        return [None if size is None else trace.allocate(size) for size in (left_size, right_size)]

    needed = left_size is not None or right_size is not None
    saved = trace.save(left, right) if needed else None
    return trace.result(elements, left.itemsize, [left, right], back, saved)


def _attend_shared(
    trace: MemoryTrace,
    arch: Architecture,
    config: MemoryConfig,
    query: TracedTensor,
    key: TracedTensor,
    value: TracedTensor,
) -> TracedTensor:
    """Trace Ulysses attention: the rank attends with some of the heads at all positions of the sequence.

    The caller refers to query, key and value meanwhile, so they stay allocated.
    """
    own_query, own_key, own_value = to_heads(trace, arch, config.sequence, query, key, value)
    output = flash(trace, arch, config, own_query, own_key, own_value)
    del own_query, own_key, own_value
    return to_positions(trace, output)


def attend(
    trace: MemoryTrace,
    arch: Architecture,
    config: MemoryConfig,
    masked: bool,
    query: TracedTensor,
    key: TracedTensor,
    value: TracedTensor,
) -> tuple[TracedTensor, TracedTensor | None]:
    """Trace the run's attention kernel; return its output and, in eager attention, the attention weights (else None).
    `masked`: the kernel gets an attention mask."""
    if config.sequence > 1:
        return _attend_shared(trace, arch, config, query, key, value), None
    if config.attention == "eager":
        return eager(trace, arch, config, query, key, value)
    if config.attention == "sdpa" and masked:
        return masked_sdpa(trace, arch, config, query, key, value), None
    return flash(trace, arch, config, query, key, value), None
