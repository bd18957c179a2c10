"""Traced operations: what each allocates, what it saves for backward, and what its backward allocates.

Derivatives are those of `tools/autograd/derivatives.yaml`, torch 2.13. Backward closures refer to sizes, never to
tensors, so that only tensors given to `MemoryTrace.save` stay allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, SavedTensor, Storage, TracedTensor
from engine.budget.trace.polynomial import BYTE, NO_BYTES, PAIR, POSITION, TOKEN, BytesPolynomial

HALF = 2
FLOAT = 4
INDEX = 8
"""Bytes of an int64."""


def pass_on(gradient: Storage) -> list[Storage | None]:
    """A backward function that allocates nothing: the input's gradient is the output's."""
    return [gradient]


def linear(
    trace: MemoryTrace,
    x: TracedTensor,
    outputs: int,
    weight: int,
    trained: bool,
    bias: int = 0,
    unpacked: int = 0,
    row: BytesPolynomial = TOKEN,
) -> TracedTensor:
    """`F.linear` with `outputs` values per `row`; `weight` and `bias`: bytes of their gradients if trained. `unpacked`:
    bytes of a quantised weight's dequantised copy, live during the product in forward and in backward."""
    size, wanted, whole_size = x.size, x.node is not None, unpacked * BYTE

    def backward(gradient: Storage) -> list[Storage | None]:
        whole = trace.allocate(whole_size) if unpacked else None
        grad_x = trace.allocate(size) if wanted else None
        if trained:
            trace.leaf_gradient(weight)
            if bias:
                trace.leaf_gradient(bias)
        del whole
        return [grad_x]

    saved = trace.save(x if trained else None, None) if wanted or trained else None
    whole = trace.allocate(whole_size) if unpacked else None
    output = trace.result(outputs * row, x.itemsize, [x], backward, saved, trains=trained)
    del whole
    return output


def half_linear(
    trace: MemoryTrace,
    x: TracedTensor,
    outputs: int,
    elements: int,
    trained: bool,
    bias: int = 0,
    row: BytesPolynomial = TOKEN,
) -> TracedTensor:
    """`F.linear` under autocast, with `outputs` values per `row`: input and fp32 weight (of `elements` values) are cast
    to half precision. `bias`: bytes of the bias's gradient, 0 if it gets none."""
    x = cast(trace, x, HALF)
    size, wanted, weight = x.size, x.node is not None, _half_weight(trace, elements, trained)

    def backward(gradient: Storage) -> list[Storage | None]:
        if bias:
            trace.leaf_gradient(bias)
        grad_x = trace.allocate(size) if wanted else None
        return [grad_x, trace.allocate(HALF * elements * BYTE) if trained else None]

    saved = trace.save(x if trained else None, weight if wanted else None) if wanted or trained else None
    return trace.result(outputs * row, HALF, [x, weight], backward, saved, trains=trained)


def _half_weight(trace: MemoryTrace, elements: int, trained: bool) -> TracedTensor:
    """Autocast's half-precision copy of a weight; copies of trained weights are cached until the loss. Its gradient is
    in half precision, and backward casts it to the weight's fp32 gradient."""

    def backward(gradient: Storage) -> list[Storage | None]:
        trace.leaf_gradient(FLOAT * elements)
        return []

    weight = trace.result(elements * BYTE, HALF, [], backward, trains=trained)
    if trained:
        trace.casts.append(weight.storage)
    return weight


def cast(trace: MemoryTrace, x: TracedTensor, itemsize: int) -> TracedTensor:
    """`Tensor.to(dtype)`, which returns `x` itself if the dtype is already right."""
    return x if x.itemsize == itemsize else trace.unary(x, x.elements, itemsize)


def add(trace: MemoryTrace, left: TracedTensor, right: TracedTensor) -> TracedTensor:
    """Promoted to the wider dtype; both inputs get the output's gradient, cast if necessary."""
    itemsize = max(left.itemsize, right.itemsize)
    casts = [None if tensor.itemsize == itemsize else tensor.size for tensor in (left, right)]

    def backward(gradient: Storage) -> list[Storage | None]:
        return [gradient if size is None else trace.allocate(size) for size in casts]

    return trace.result(left.elements, itemsize, [left, right], backward)


def multiply(trace: MemoryTrace, left: TracedTensor, right: TracedTensor) -> TracedTensor:
    """The gradient of a broadcast `right` is computed at full size, then summed."""
    itemsize, left_size, right_size = max(left.itemsize, right.itemsize), left.size, right.size
    full, left_wanted, right_wanted = left.elements * itemsize, left.node is not None, right.node is not None

    def backward(gradient: Storage) -> list[Storage | None]:
        grad_left = trace.allocate(full) if left_wanted else None
        grad_right = trace.allocate(full) if right_wanted else None
        if right_wanted and right_size != full:
            grad_right = trace.allocate(right_size)
        if left_wanted and left_size != full:
            grad_left = trace.allocate(left_size)
        return [grad_left, grad_right]

    needed = left_wanted or right_wanted
    saved = trace.save(left if right_wanted else None, right if left_wanted else None) if needed else None
    return trace.result(left.elements, itemsize, [left, right], backward, saved)


def subtract(trace: MemoryTrace, left: TracedTensor, right: TracedTensor) -> TracedTensor:
    """The gradient of `right` is the negated gradient, summed if `right` was broadcast."""
    full, right_size = left.size, right.size

    def backward(gradient: Storage) -> list[Storage | None]:
        negated = trace.allocate(full)
        return [gradient, negated if right_size == full else trace.allocate(right_size)]

    return trace.result(left.elements, left.itemsize, [left, right], backward)


def concatenate(trace: MemoryTrace, parts: Sequence[TracedTensor]) -> TracedTensor:
    """`torch.cat`; the inputs' gradients are views of the output's gradient."""
    elements, count = sum([part.elements for part in parts], NO_BYTES), len(parts)
    return trace.result(elements, parts[0].itemsize, parts, lambda gradient: [gradient] * count)


def copy(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """`contiguous()` on a tensor that is not contiguous."""
    return trace.result(x.elements, x.itemsize, [x], pass_on)


def gather(trace: MemoryTrace, x: TracedTensor, index: TracedTensor | None, elements: BytesPolynomial) -> TracedTensor:
    """`x[index]`: the index is saved for backward (None: it is allocated elsewhere and adds no bytes); backward adds
    the gradient into zeros of x's size."""
    saved = trace.save(index) if x.node is not None else None
    return trace.unary(x, elements, x.itemsize, saved)


def scale(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """`x * number` or `x / number`: nothing is saved for backward."""
    return trace.unary(x, x.elements, x.itemsize)


def scale_by_weight(trace: MemoryTrace, x: TracedTensor, weight: int, trained: bool, itemsize: int = 0) -> TracedTensor:
    """`weight * x`, where the vector's gradient, of `weight` bytes, is a product of full size that is summed.
    `itemsize`: bytes per value of the vector; the output has the wider dtype of the two."""
    size, wanted, itemsize = x.size, x.node is not None, max(x.itemsize, itemsize)
    full = x.elements * itemsize

    def backward(gradient: Storage) -> list[Storage | None]:
        product = trace.allocate(full) if trained else None
        grad_x = trace.allocate(full) if wanted else None
        if wanted and size != full:
            grad_x = trace.allocate(size)
        if trained:
            trace.leaf_gradient(weight)
        del product
        return [grad_x]

    saved = trace.save(x if trained else None, None) if wanted or trained else None
    return trace.result(x.elements, itemsize, [x], backward, saved, trains=trained)


def activation(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """`silu` or `gelu`: the input is saved for backward."""
    saved = trace.save(x) if x.node is not None else None
    return trace.unary(x, x.elements, x.itemsize, saved)


def add_number(trace: MemoryTrace, x: TracedTensor, itemsize: int = 0) -> TracedTensor:
    """`x + number`, or `x + mask` with a mask of this itemsize; if the sum is wider than x, backward casts."""
    itemsize = max(x.itemsize, itemsize)
    return copy(trace, x) if itemsize == x.itemsize else trace.unary(x, x.elements, itemsize)


def saves_output(trace: MemoryTrace, x: TracedTensor, itemsize: int | None = None) -> TracedTensor:
    """Softmax, tanh or rsqrt: the output is saved for backward. `itemsize`: bytes per value of the output, if the
    kernel also casts; its backward kernel then casts back."""
    saved: list[SavedTensor] | None = [] if x.node is not None else None
    output = trace.unary(x, x.elements, itemsize or x.itemsize, saved)
    if saved is not None:
        saved += trace.save(output)
    return output


def softmax(trace: MemoryTrace, x: TracedTensor, itemsize: int) -> TracedTensor:
    """`softmax(x, dtype=...)`: on CUDA the kernel also casts; in host memory a cast copy of `x` is made first."""
    return saves_output(trace, cast(trace, x, itemsize) if trace.metered else x, itemsize)


def narrow(trace: MemoryTrace, x: TracedTensor, elements: BytesPolynomial) -> TracedTensor:
    """A slice: a view of `x`, whose backward writes the gradient into zeros of x's size."""
    return trace.view(x, elements, trace.new_gradient(x))


def split(trace: MemoryTrace, x: TracedTensor, parts: Sequence[BytesPolynomial]) -> list[TracedTensor]:
    """`Tensor.split` or `chunk`: views of `x`; backward joins their gradients in one tensor once it has all."""
    return pieces(trace, narrow(trace, x, x.elements), parts)


def pieces(trace: MemoryTrace, whole: TracedTensor, parts: Sequence[BytesPolynomial]) -> list[TracedTensor]:
    """Views of `whole`, outputs of one operation, whose backward runs once the gradients of all are computed."""
    if whole.node is not None:
        whole.node.joined = []
    return [trace.view(whole, elements, pass_on) for elements in parts]


def halves(trace: MemoryTrace, x: TracedTensor) -> list[TracedTensor]:
    return split(trace, x, [x.elements // 2] * 2)


def rms_norm(
    trace: MemoryTrace, x: TracedTensor, rows: BytesPolynomial, weight: int, trained: bool, itemsize: int, *, wide: bool
) -> TracedTensor:
    """`Qwen2RMSNorm.forward` of `rows` vectors; `wide`: Gemma's and gpt-oss' variant, which multiplies by the weight in
    fp32.

    `weight`: bytes of the weight's gradient, which exists if `trained`; `itemsize`: bytes per value of the weight.
    """
    input_itemsize = x.itemsize
    x = cast(trace, x, FLOAT)
    x = multiply(trace, x, _reciprocal_root_mean_square(trace, x, rows))
    if wide:
        return cast(trace, scale_by_weight(trace, x, weight, trained), input_itemsize)
    return scale_by_weight(trace, cast(trace, x, input_itemsize), weight, trained, itemsize)


def _reciprocal_root_mean_square(trace: MemoryTrace, x: TracedTensor, rows: BytesPolynomial) -> TracedTensor:
    """`torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`: one value for each of `rows`."""
    mean = trace.unary(power(trace, x), rows, x.itemsize)
    return saves_output(trace, add_number(trace, mean))


def power(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """`torch.pow(x, n)`: `x` is saved; backward computes x^(n-1), n · x^(n-1), and that times the gradient."""
    size = x.size

    def backward(gradient: Storage) -> list[Storage | None]:
        temporaries = [trace.allocate(size), trace.allocate(size)]
        product = trace.allocate(size)
        del temporaries  # not earlier: C++ destroys temporaries at the end of the whole expression
        return [product]

    saved = trace.save(x) if x.node is not None else None
    return trace.result(x.elements, x.itemsize, [x], backward, saved)


MULTIPROCESSORS = 132
"""Of an H100: a fused norm's backward adds up its weight's gradient in so many parts, in fp32."""


def fused_rms_norm(
    trace: MemoryTrace, x: TracedTensor, rows: BytesPolynomial, weight: int, trained: bool
) -> TracedTensor:
    """Liger's kernel, the arguments as in `rms_norm`: the input and an fp32 number for each of `rows` are saved."""
    size, wanted, summed_bytes = x.size, x.node is not None, MULTIPROCESSORS * weight * FLOAT // x.itemsize

    def backward(gradient: Storage) -> list[Storage | None]:
        grad_x = trace.allocate(size) if wanted or trained else None
        parts = trace.allocate(summed_bytes * BYTE) if trained else None
        if trained:
            trace.leaf_gradient(weight)
        del parts
        return [grad_x]

    saved = trace.save(x) if wanted or trained else None
    output = trace.result(x.elements, x.itemsize, [x], backward, saved, trains=trained)
    reciprocal = trace.new(rows, FLOAT)
    if saved is not None:
        saved += trace.save(reciprocal)
    return output


def fused_gate(trace: MemoryTrace, gate: TracedTensor, up: TracedTensor) -> TracedTensor:
    """Liger's kernel of act(gate) * up: both are saved, and backward writes their gradients over them."""
    learns = gate.node is not None or up.node is not None
    return trace.result(gate.elements, gate.itemsize, [gate, up], None, trace.save(gate, up) if learns else None)


def layer_norm(trace: MemoryTrace, x: TracedTensor, vector: int, trained: bool) -> TracedTensor:
    """`F.layer_norm`: the input and, per token, two fp32 statistics are saved for backward. `vector`: bytes of the
    gradient of the weight, and of the bias, if `trained`."""
    size = x.size

    def backward(gradient: Storage) -> list[Storage | None]:
        grad_x = trace.allocate(size)
        if trained:
            trace.leaf_gradient(vector)
            trace.leaf_gradient(vector)
        return [grad_x]

    saved = trace.save(x, None) if x.node is not None or trained else None
    output = trace.result(x.elements, x.itemsize, [x], backward, saved, trains=trained)
    statistics = trace.new(2 * TOKEN, FLOAT)
    if saved is not None:
        saved += trace.save(statistics)
    return output


MASK_BYTES = 3 * 4 + 1
"""Bytes per value: three int32 of the mask being drawn, and the bool of the one before, still live."""


def mask_bytes(config: MemoryConfig) -> int:
    """Bytes per value of a mask while it is drawn; 0 if a kernel draws it in registers."""
    return 0 if config.fused_dropout else MASK_BYTES


def dropped(trace: MemoryTrace, config: MemoryConfig, x: TracedTensor) -> TracedTensor:
    """Dropout of hidden states, whose masks are drawn sample by sample."""
    return _dropped(trace, x, mask_bytes(config) * x.elements.per_token * POSITION)


def dropped_weights(trace: MemoryTrace, config: MemoryConfig, weights: TracedTensor) -> TracedTensor:
    """Dropout of attention weights, whose masks are drawn head by head."""
    return _dropped(trace, weights, mask_bytes(config) * PAIR)


def _dropped(trace: MemoryTrace, x: TracedTensor, mixing: BytesPolynomial) -> TracedTensor:
    """The output is a new tensor; `mixing` bytes are allocated temporarily in forward and in backward."""
    size = x.size

    def backward(gradient: Storage) -> list[Storage | None]:
        result = trace.allocate(size)
        bits = trace.allocate(mixing)
        del bits
        return [result]

    output = trace.result(x.elements, x.itemsize, [x], backward)
    bits = trace.allocate(mixing)
    del bits
    return output
