"""Traces attention as transformers computes it: rotary embedding, repeated heads, flash, sdpa and eager kernels, and
the all-to-alls of sequence parallelism.

The local variables are those of `modeling_llama.py`, `integrations/sdpa_attention.py` and their variants: a tensor
stays allocated while one refers to it.
"""

from __future__ import annotations

from engine.architecture.facts import Architecture
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
    dropped_weights,
    halves,
    multiply,
    narrow,
    pieces,
    saves_output,
    scale,
    softmax,
    subtract,
)
from engine.budget.trace.polynomial import BLOCK_TOKEN, NO_BYTES, SQUARE, TOKEN, BytesPolynomial


def to_heads(
    trace: MemoryTrace, arch: Architecture, sequence: int, query: TracedTensor, key: TracedTensor, value: TracedTensor
) -> tuple[TracedTensor, TracedTensor, TracedTensor]:
    """Query, key and value are sent in one buffer among `sequence` ranks and received in another; returns views of
    that. With fewer key heads than ranks, keys and values are sent several times."""
    times = max(1, sequence // arch.kv_heads)
    parents, elements = [query, key, value], [query.elements, key.elements * times, value.elements * times]
    total = sum(elements, NO_BYTES) * query.itemsize
    sizes = [tensor.size for tensor in parents]

    def back(gradient: Storage) -> list[Storage | None]:
        received = _received(trace, total)
        del gradient
        summed = [trace.allocate(size) for size in sizes[1:] if times > 1]
        made: list[Storage | None] = [trace.allocate(size) for size in sizes]
        del received, summed
        return made

    arrived = TracedTensor(_received(trace, total), sum(elements, NO_BYTES), query.itemsize, total)
    query, key, value = pieces(trace, trace.on_tape(arrived, parents, back), elements)
    return query, key, value


def to_positions(trace: MemoryTrace, output: TracedTensor) -> TracedTensor:
    """The output is sent back, then copied so that heads are adjacent."""
    size = output.size

    def back(gradient: Storage) -> list[Storage | None]:
        return [_received(trace, size)]

    received = _received(trace, size)
    joined = trace.result(output.elements, output.itemsize, [output], back)
    del received
    return joined


def _received(trace: MemoryTrace, size: BytesPolynomial) -> Storage:
    """Send and receive buffer are live at once."""
    sent = trace.allocate(size)
    received = trace.allocate(size)
    del sent
    return received


HEADS_OUTSIDE = ("phi3", "gpt_oss")
"""Layouts whose rotary embedding ends in a concatenation: queries and keys then lie in memory head by head."""


def rotary(trace: MemoryTrace, arch: Architecture, x: TracedTensor, width: int) -> TracedTensor:
    """Trace `apply_rotary_pos_emb` on query or key; `width`: bytes per value of the cos and sin tables."""
    if arch.layout == "gpt_oss":
        return _rotary_in_halves(trace, x, width)
    if arch.layout == "phi3":
        return _rotary_in_part(trace, x, arch.rotary_share, width)
    return _rotary(trace, x, width)


def _rotary(trace: MemoryTrace, x: TracedTensor, itemsize: int) -> TracedTensor:
    """`x * cos + rotate_half(x) * sin`; cos and sin need no gradient, so x is not saved for backward."""
    return add(trace, _times_table(trace, x, itemsize), _times_table(trace, _rotate_half(trace, x), itemsize))


def _rotate_half(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """`cat(-x2, x1)`, where x1 and x2 are the halves of `x`."""
    x1, x2 = narrow(trace, x, x.elements // 2), narrow(trace, x, x.elements // 2)
    return concatenate(trace, [scale(trace, x2), x1])


def _times_table(trace: MemoryTrace, x: TracedTensor, itemsize: int) -> TracedTensor:
    """`x * cos`, promoted to the wider dtype. The table costs nothing here, because all layers share it."""
    return multiply(trace, x, trace.new(NO_BYTES, itemsize))


def _rotary_in_part(trace: MemoryTrace, x: TracedTensor, share: float, width: int) -> TracedTensor:
    """Phi-3: the part `share` of each head is rotated, then concatenated with the rest of the head."""
    turned = x if share == 1.0 else narrow(trace, x, int(x.elements.per_token * share) * TOKEN)
    passed = narrow(trace, x, x.elements - turned.elements)
    return concatenate(trace, [_rotary(trace, turned, width), passed])


def _rotary_in_halves(trace: MemoryTrace, x: TracedTensor, itemsize: int) -> TracedTensor:
    """gpt-oss: `cat(first * cos - second * sin, second * cos + first * sin)` of the halves of `x`."""
    first, second = halves(trace, x)
    left = subtract(trace, _times_table(trace, first, itemsize), _times_table(trace, second, itemsize))
    right = add(trace, _times_table(trace, second, itemsize), _times_table(trace, first, itemsize))
    return concatenate(trace, [left, right])


def repeat_heads(trace: MemoryTrace, arch: Architecture, x: TracedTensor) -> TracedTensor:
    """Trace `repeat_kv` on keys or values: a copy. A single head is expanded as a view; with as many key heads as query
    heads `x` itself is returned."""
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
    """Trace a flash kernel: query, key, value, output, the log-sum-exp (fp32 per token and head) and any `mask` are
    saved for backward. The output has the query's layout; one that is head by head is copied to token by token."""
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
    """Query, key and value have one dtype."""
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
    """Cast to the dtype of attention's matrix products: half precision under autocast."""
    return cast(trace, x, HALF) if trace.autocast else x


def backward_scratch(
    arch: Architecture, config: MemoryConfig, query: TracedTensor, key: TracedTensor
) -> BytesPolynomial:
    """Bytes beside the gradients that attention's backward returns; 0 except on CUDA in half precision."""
    if not config.attention_scratch or query.itemsize != HALF:
        return NO_BYTES
    heads, kv_heads = (tensor.elements.per_token // arch.head_dim for tensor in (query, key))
    return scratch_per_token(heads, kv_heads, arch.head_dim) * BLOCK_TOKEN


def scratch_per_token(heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes per token of flash attention's scratch in backward, in half precision.

    Query gradients are summed in fp32, heads rounded up to the kernel's width, with two fp32 numbers per query. Where
    query heads share a key head, gradients of keys and values first exist for every query head. (`mha_bwd` of
    flash-attn 2, which sdpa and varlen run; versions 3 and 4 take as much or less. The memory-efficient kernel, which
    sdpa runs with a mask, adds up the same gradient.)
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
    """Heads are repeated; an additive mask in the query's dtype is made of the boolean one and saved for backward."""
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
    """Trace eager attention; returns its output and the attention weights (rows × heads × length²): scaled, masked,
    softmaxed in fp32, cast back. The mask has the dtype of hidden states."""
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
    """The product of queries and keys, scaled and, in Gemma 2, capped by tanh."""
    weights = scale(trace, _query_by_key(trace, arch, query, key, outside))
    if arch.attention_softcap is not None:
        weights = scale(trace, weights)
        weights = saves_output(trace, weights)
        weights = scale(trace, weights)
    return weights


def _query_by_key(
    trace: MemoryTrace, arch: Architecture, query: TracedTensor, key: TracedTensor, outside: bool
) -> TracedTensor:
    """Copies made for the product are freed afterwards, unless backward needs them."""
    query = _factor(trace, query)
    query = query if outside else copy(trace, query)
    key = _heads_first(trace, arch, _factor(trace, key), outside)
    return _matmul(trace, query, key, arch.heads * SQUARE)


def _heads_first(trace: MemoryTrace, arch: Architecture, x: TracedTensor, outside: bool) -> TracedTensor:
    """Keys or values head by head, as batched products need them: a copy, unless `x` already is. `outside`: the rotary
    embedding returns keys so (HEADS_OUTSIDE), and keys that are not repeated need no copy."""
    repeated = 1 < arch.kv_heads < arch.heads
    return x if repeated or (outside and arch.kv_heads == arch.heads) else copy(trace, x)


def _softmax_with_sinks(
    trace: MemoryTrace, arch: Architecture, weights: TracedTensor
) -> tuple[TracedTensor, TracedTensor]:
    """gpt-oss' softmax: a column of sinks is appended, the maximum subtracted, the softmax taken, the column removed.
    Returns the softmax's input, to which the attention function refers until it returns, and the attention weights."""
    columns = arch.heads * TOKEN
    sinks = TracedTensor(weights.storage, columns, weights.itemsize)
    joined = concatenate(trace, [weights, sinks])
    joined = subtract(trace, joined, _maximum(trace, joined, arch.heads * TOKEN))
    probabilities = saves_output(trace, joined)
    return joined, narrow(trace, probabilities, weights.elements)


def _maximum(trace: MemoryTrace, x: TracedTensor, rows: BytesPolynomial) -> TracedTensor:
    """`x.max(-1, keepdim=True)`: the indices are saved; backward scatters into zeros of x's size."""
    index = trace.new(rows, INDEX)
    saved = trace.save(index) if x.node is not None else None
    return trace.unary(x, rows, x.itemsize, saved)


def _matmul(trace: MemoryTrace, left: TracedTensor, right: TracedTensor, elements: BytesPolynomial) -> TracedTensor:
    """`torch.matmul`, which saves both factors for backward. Output elements are as wide as those of `left`."""
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
    """Ulysses attention: some of the heads at all positions of the sequence. The caller refers to query, key and value
    meanwhile, so they stay allocated."""
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
    """Trace the run's attention kernel; returns its output and, in eager attention, the attention weights."""
    if config.sequence > 1:
        return _attend_shared(trace, arch, config, query, key, value), None
    if config.attention == "eager":
        return eager(trace, arch, config, query, key, value)
    if config.attention == "sdpa" and masked:
        return masked_sdpa(trace, arch, config, query, key, value), None
    return flash(trace, arch, config, query, key, value), None
