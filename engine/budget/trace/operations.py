"""The operations of a decoder, as far as memory goes: what each makes, saves, and makes again in backward.

Each is written after its torch counterpart (named in the docstring); derivative formulas are those of
`tools/autograd/derivatives.yaml`, torch 2.13. Backward closures hold sizes, never tensors: only what
`MemoryTrace.save` was given is kept.

Try: `python -m pytest tests/budget/test_accuracy.py`
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.budget.trace.memory_trace import MemoryTrace, SavedTensor, Storage, TracedTensor
from engine.budget.trace.polynomial import BYTE, NO_BYTES, TOKEN, BytesPolynomial

HALF = 2
FLOAT = 4
INDEX = 8
"""Bytes of an int64."""


def pass_on(gradient: Storage) -> list[Storage | None]:
    """A backward that makes nothing: the gradient of the output is that of the input."""
    return [gradient]


def linear(
    trace: MemoryTrace, x: TracedTensor, outputs: int, weight: int, trained: bool, bias: int = 0, unpacked: int = 0
) -> TracedTensor:
    """`F.linear`: `outputs` per token; `weight` and `bias` are the bytes of their gradients where they are trained.

    A quantised weight is unpacked to `unpacked` bytes for as long as it is multiplied with, forward and backward.
    """
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
    output = trace.result(outputs * TOKEN, x.itemsize, [x], backward, saved, trains=trained)
    del whole
    return output


def half_linear(
    trace: MemoryTrace, x: TracedTensor, outputs: int, elements: int, trained: bool, bias: int = 0
) -> TracedTensor:
    """`F.linear` under autocast: input and weight (of so many elements, fp32) are cast, the weight once per pass."""
    x = cast(trace, x, HALF)
    size, wanted, weight = x.size, x.node is not None, _half_weight(trace, elements, trained)

    def backward(gradient: Storage) -> list[Storage | None]:
        if bias:
            trace.leaf_gradient(bias)
        grad_x = trace.allocate(size) if wanted else None
        return [grad_x, trace.allocate(HALF * elements * BYTE) if trained else None]

    saved = trace.save(x if trained else None, weight if wanted else None) if wanted or trained else None
    return trace.result(outputs * TOKEN, HALF, [x, weight], backward, saved, trains=trained)


def _half_weight(trace: MemoryTrace, elements: int, trained: bool) -> TracedTensor:
    """A weight as autocast casts it, and keeps it for the rest of the pass where it is trained.

    Its gradient comes in half precision and is cast once what the product has saved is gone.
    """

    def backward(gradient: Storage) -> list[Storage | None]:
        trace.leaf_gradient(FLOAT * elements)
        return []

    weight = trace.result(elements * BYTE, HALF, [], backward, trains=trained)
    if trained:
        trace.casts.append(weight.storage)
    return weight


def cast(trace: MemoryTrace, x: TracedTensor, itemsize: int) -> TracedTensor:
    """`Tensor.to(dtype)`; nothing happens where the dtype is right already."""
    return x if x.itemsize == itemsize else trace.unary(x, x.elements, itemsize)


def add(trace: MemoryTrace, left: TracedTensor, right: TracedTensor) -> TracedTensor:
    """`left + right`, promoted to the wider dtype. Both get the incoming gradient itself, or a cast of it."""
    itemsize = max(left.itemsize, right.itemsize)
    casts = [None if tensor.itemsize == itemsize else tensor.size for tensor in (left, right)]

    def backward(gradient: Storage) -> list[Storage | None]:
        return [gradient if size is None else trace.allocate(size) for size in casts]

    return trace.result(left.elements, itemsize, [left, right], backward)


def multiply(trace: MemoryTrace, left: TracedTensor, right: TracedTensor) -> TracedTensor:
    """`left * right`, where right may be broadcast: its gradient is made in full, then summed."""
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
    """`left - right`, where right may be broadcast: it gets the negated gradient, made in full and then summed."""
    full, right_size = left.size, right.size

    def backward(gradient: Storage) -> list[Storage | None]:
        negated = trace.allocate(full)
        return [gradient, negated if right_size == full else trace.allocate(right_size)]

    return trace.result(left.elements, left.itemsize, [left, right], backward)


def concatenate(trace: MemoryTrace, parts: Sequence[TracedTensor]) -> TracedTensor:
    """`torch.cat`: backward passes views of the gradient on."""
    elements, count = sum([part.elements for part in parts], NO_BYTES), len(parts)
    return trace.result(elements, parts[0].itemsize, parts, lambda gradient: [gradient] * count)


def copy(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """`contiguous()` where it has to copy."""
    return trace.result(x.elements, x.itemsize, [x], pass_on)


def gather(trace: MemoryTrace, x: TracedTensor, index: TracedTensor | None, elements: BytesPolynomial) -> TracedTensor:
    """`x[index]`: the index is saved (None: it is kept anyway), backward adds into zeros."""
    saved = trace.save(index) if x.node is not None else None
    return trace.unary(x, elements, x.itemsize, saved)


def scale(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """`x * number` or `x / number`: nothing is saved."""
    return trace.unary(x, x.elements, x.itemsize)


def scale_by_weight(trace: MemoryTrace, x: TracedTensor, weight: int, trained: bool, itemsize: int = 0) -> TracedTensor:
    """`weight * x` with a vector `weight`: its gradient is a full product, summed to the vector's bytes.

    `itemsize` is the vector's, where it is wider than x: the product then is, too.
    """
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
    """`silu` or `gelu`: saves its input."""
    saved = trace.save(x) if x.node is not None else None
    return trace.unary(x, x.elements, x.itemsize, saved)


def add_number(trace: MemoryTrace, x: TracedTensor, itemsize: int = 0) -> TracedTensor:
    """`x + number`, or a mask of this itemsize: the gradient is passed on, cast where the sum is wider."""
    itemsize = max(x.itemsize, itemsize)
    return copy(trace, x) if itemsize == x.itemsize else trace.unary(x, x.elements, itemsize)


def saves_output(trace: MemoryTrace, x: TracedTensor, itemsize: int | None = None) -> TracedTensor:
    """softmax, tanh, rsqrt. A kernel that casts its input to `itemsize` casts the gradient back in the same pass."""
    saved: list[SavedTensor] | None = [] if x.node is not None else None
    output = trace.unary(x, x.elements, itemsize or x.itemsize, saved)
    if saved is not None:
        saved += trace.save(output)
    return output


def softmax(trace: MemoryTrace, x: TracedTensor, itemsize: int) -> TracedTensor:
    """`softmax(x, dtype=...)`. On a card one kernel reads the input as it is; on the host it is cast first, apart."""
    return saves_output(trace, cast(trace, x, itemsize) if trace.metered else x, itemsize)


def narrow(trace: MemoryTrace, x: TracedTensor, elements: BytesPolynomial) -> TracedTensor:
    """A slice: shares the tensor's storage; backward puts the gradient into zeros of full size."""
    return trace.view(x, elements, trace.new_gradient(x))


def split(trace: MemoryTrace, x: TracedTensor, parts: Sequence[BytesPolynomial]) -> list[TracedTensor]:
    """`Tensor.split` and `chunk`: views of one tensor, whose gradients are joined once all are there."""
    return pieces(trace, narrow(trace, x, x.elements), parts)


def pieces(trace: MemoryTrace, whole: TracedTensor, parts: Sequence[BytesPolynomial]) -> list[TracedTensor]:
    """The outputs of an operation that makes several tensors in one storage: its backward begins once the gradients
    of all of them are there."""
    if whole.node is not None:
        whole.node.joined = []
    return [trace.view(whole, elements, pass_on) for elements in parts]


def halves(trace: MemoryTrace, x: TracedTensor) -> list[TracedTensor]:
    """`chunk(2)`."""
    return split(trace, x, [x.elements // 2] * 2)


def rms_norm(
    trace: MemoryTrace, x: TracedTensor, rows: BytesPolynomial, weight: int, trained: bool, itemsize: int, *, wide: bool
) -> TracedTensor:
    """`Qwen2RMSNorm.forward`, or with `wide` that of Gemma and gpt-oss, which multiplies by the weight before the cast
    back. Each of `rows` has a root of its own; `weight`: bytes of the weight's gradient; `itemsize`: the weight's."""
    input_itemsize = x.itemsize
    x = cast(trace, x, FLOAT)
    x = multiply(trace, x, _reciprocal_root_mean_square(trace, x, rows))
    if wide:
        return cast(trace, scale_by_weight(trace, x, weight, trained), input_itemsize)
    return scale_by_weight(trace, cast(trace, x, input_itemsize), weight, trained, itemsize)


def _reciprocal_root_mean_square(trace: MemoryTrace, x: TracedTensor, rows: BytesPolynomial) -> TracedTensor:
    """`torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`: one value per row."""
    mean = trace.unary(power(trace, x), rows, x.itemsize)
    return saves_output(trace, add_number(trace, mean))


def power(trace: MemoryTrace, x: TracedTensor) -> TracedTensor:
    """`torch.pow(x, n)`: saves x; backward makes the next lower power, n times that, and the product with the
    gradient."""
    size = x.size

    def backward(gradient: Storage) -> list[Storage | None]:
        temporaries = [trace.allocate(size), trace.allocate(size)]
        product = trace.allocate(size)
        del temporaries  # one C++ expression: its temporaries live to its end
        return [product]

    saved = trace.save(x) if x.node is not None else None
    return trace.result(x.elements, x.itemsize, [x], backward, saved)


def layer_norm(trace: MemoryTrace, x: TracedTensor, vector: int, trained: bool) -> TracedTensor:
    """`F.layer_norm`: saves its input and, per row, a mean and a root in fp32; two weights of `vector` bytes each."""
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
