"""The operations of a decoder, as far as memory goes: what each makes, saves, and makes again in backward.

Each is written after its torch counterpart (named in the docstring); derivative formulas are those of
`tools/autograd/derivatives.yaml`, torch 2.13. Backward closures hold sizes, never tensors: what is kept is only what
`Walk.save` was given.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.budget.ghost import PASSED, Back, Ghost, Storage, Walk
from engine.budget.packed import TOKEN

FLOAT = 4
INDEX = 8
"""Bytes of an int64."""


def linear(
    walk: Walk, x: Ghost, outputs: int, weight: int, trained: bool, bias: int = 0, unpacked: int = 0
) -> Ghost:
    """`F.linear`: `outputs` per token; `weight` and `bias` are the bytes of their gradients where they are trained.

    A quantised weight is unpacked to `unpacked` bytes for as long as it is multiplied with, forward and backward.
    """
    size, wanted = x.size, x.node is not None
    back: Back = size
    if trained or unpacked:
        back = _linear_backward(walk, size if wanted else None, weight if trained else None, bias, unpacked)
    saved = walk.save(x if trained else None, None) if wanted or trained else None
    whole = walk.allocate(unpacked) if unpacked else None
    output = walk.result(outputs * TOKEN, x.itemsize, [x], back, saved, trains=trained)
    del whole
    return output


def _linear_backward(walk: Walk, size: int | None, weight: int | None, bias: int, unpacked: int) -> Back:
    """The gradients of the input, of the weight and of the bias; None or 0 for those that nobody wants."""

    def back(gradient: Storage) -> list[Storage | None]:
        whole = walk.allocate(unpacked) if unpacked else None
        grad_x = walk.allocate(size) if size is not None else None
        if weight is not None:
            walk.leaf_gradient(weight)
            if bias:
                walk.leaf_gradient(bias)
        del whole
        return [grad_x]

    return back


HALF = 2


def half_linear(walk: Walk, x: Ghost, outputs: int, elements: int, trained: bool, bias: int = 0) -> Ghost:
    """`F.linear` under autocast: input and weight (of so many elements, fp32) are cast, the weight once per pass."""
    x = cast(walk, x, HALF)
    size, wanted, weight = x.size, x.node is not None, _half_weight(walk, elements, trained)

    def back(gradient: Storage) -> list[Storage | None]:
        if bias:
            walk.leaf_gradient(bias)
        return [walk.allocate(size) if wanted else None, walk.allocate(HALF * elements) if trained else None]

    saved = walk.save(x if trained else None, weight if wanted else None) if wanted or trained else None
    return walk.result(outputs * TOKEN, HALF, [x, weight], back, saved, trains=trained)


def _half_weight(walk: Walk, elements: int, trained: bool) -> Ghost:
    """A weight as autocast casts it, and keeps it for the rest of the pass where it is trained.

    Its gradient comes in half precision and is cast once what the product has saved is gone.
    """

    def back(gradient: Storage) -> list[Storage | None]:
        walk.leaf_gradient(FLOAT * elements)
        return []

    weight = walk.result(elements, HALF, [], back, trains=trained)
    if trained:
        walk.casts.append(weight.storage)
    return weight


def cast(walk: Walk, x: Ghost, itemsize: int) -> Ghost:
    """`Tensor.to(dtype)`; nothing happens where the dtype is right already."""
    if x.itemsize == itemsize:
        return x
    size = x.size
    return walk.result(x.elements, itemsize, [x], size)


def add(walk: Walk, left: Ghost, right: Ghost) -> Ghost:
    """`left + right`, promoted to the wider dtype. Both get the incoming gradient itself, or a cast of it."""
    itemsize = max(left.itemsize, right.itemsize)
    sizes = [None if ghost.itemsize == itemsize else ghost.size for ghost in (left, right)]

    def back(gradient: Storage) -> list[Storage | None]:
        return [gradient if size is None else walk.allocate(size) for size in sizes]

    return walk.result(left.elements, itemsize, [left, right], back)


def multiply(walk: Walk, left: Ghost, right: Ghost) -> Ghost:
    """`left * right`, where right may be broadcast: its gradient is made in full, then summed."""
    left_size, right_size, full = left.size, right.size, left.elements * max(left.itemsize, right.itemsize)
    left_wanted, right_wanted = left.node is not None, right.node is not None

    def back(gradient: Storage) -> list[Storage | None]:
        grad_left = walk.allocate(full) if left_wanted else None
        grad_right = walk.allocate(full) if right_wanted else None
        if right_wanted and right_size != full:
            grad_right = walk.allocate(right_size)
        if left_wanted and left_size != full:
            grad_left = walk.allocate(left_size)
        return [grad_left, grad_right]

    needed = left_wanted or right_wanted
    saved = walk.save(left if right_wanted else None, right if left_wanted else None) if needed else None
    return walk.result(left.elements, max(left.itemsize, right.itemsize), [left, right], back, saved)


def subtract(walk: Walk, left: Ghost, right: Ghost) -> Ghost:
    """`left - right`, where right may be broadcast: it gets the negated gradient, made in full and then summed."""
    full, right_size = left.size, right.size

    def back(gradient: Storage) -> list[Storage | None]:
        negated = walk.allocate(full)
        return [gradient, negated if right_size == full else walk.allocate(right_size)]

    return walk.result(left.elements, left.itemsize, [left, right], back)


def concatenate(walk: Walk, parts: Sequence[Ghost]) -> Ghost:
    """`torch.cat`: backward hands on views of the gradient."""
    elements, count = sum(part.elements for part in parts), len(parts)
    return walk.result(elements, parts[0].itemsize, parts, lambda gradient: [gradient] * count)


def copy(walk: Walk, x: Ghost) -> Ghost:
    """`contiguous()` where it has to copy."""
    return walk.result(x.elements, x.itemsize, [x], PASSED)


def gather(walk: Walk, x: Ghost, index: Ghost, elements: int) -> Ghost:
    """`x[index]`: the index is saved, backward adds into zeros."""
    size = x.size
    saved = walk.save(index) if x.node is not None else None
    return walk.result(elements, x.itemsize, [x], size, saved)


def scale(walk: Walk, x: Ghost) -> Ghost:
    """`x * number` or `x / number`: nothing is saved."""
    size = x.size
    return walk.result(x.elements, x.itemsize, [x], size)


def scale_by_weight(walk: Walk, x: Ghost, weight: int, trained: bool, width: int = 0) -> Ghost:
    """`weight * x` with a vector `weight`: its gradient is a full product, summed to the vector's bytes.

    `width` is the vector's itemsize where it is wider than x: the product then is, too.
    """
    size, wanted, itemsize = x.size, x.node is not None, max(x.itemsize, width)
    full = x.elements * itemsize

    def back(gradient: Storage) -> list[Storage | None]:
        product = walk.allocate(full) if trained else None
        grad_x = walk.allocate(full) if wanted else None
        if wanted and size != full:
            grad_x = walk.allocate(size)
        if trained:
            walk.leaf_gradient(weight)
        del product
        return [grad_x]

    saved = walk.save(x if trained else None, None) if wanted or trained else None
    return walk.result(x.elements, itemsize, [x], back, saved, trains=trained)


def activation(walk: Walk, x: Ghost) -> Ghost:
    """`silu` or `gelu`: saves its input."""
    size = x.size
    saved = walk.save(x) if x.node is not None else None
    return walk.result(x.elements, x.itemsize, [x], size, saved)


def add_number(walk: Walk, x: Ghost, width: int = 0) -> Ghost:
    """`x + number`, or a mask of `width` bytes each: the gradient passes through, cast where the sum is wider."""
    itemsize = max(x.itemsize, width)
    return walk.result(x.elements, itemsize, [x], PASSED if itemsize == x.itemsize else x.size)


def saves_output(walk: Walk, x: Ghost, itemsize: int | None = None) -> Ghost:
    """softmax and tanh. A kernel that casts its input to `itemsize` casts the gradient back in the same pass."""
    size = x.size
    saved = walk.save() if x.node is not None else None
    output = walk.result(x.elements, itemsize or x.itemsize, [x], size, saved)
    if saved is not None:
        walk.save_into(saved, output)
    return output


def softmax(walk: Walk, x: Ghost, itemsize: int) -> Ghost:
    """`softmax(x, dtype=...)`. On a card one kernel reads the input as it is; on the host it is cast first, apart."""
    return saves_output(walk, cast(walk, x, itemsize) if walk.metered else x, itemsize)


def narrow(walk: Walk, x: Ghost, elements: int) -> Ghost:
    """A slice: shares the tensor's storage; backward puts the gradient into zeros of full size."""
    size = x.size
    return walk.view(x, elements, size)


def split(walk: Walk, x: Ghost, parts: Sequence[int]) -> list[Ghost]:
    """`Tensor.split` and `chunk`: views of one tensor, whose gradients are joined once all are there."""
    size = x.size
    return pieces(walk, walk.view(x, x.elements, size), parts)


def pieces(walk: Walk, whole: Ghost, parts: Sequence[int]) -> list[Ghost]:
    """The outputs of an operation that makes several tensors in one storage, and goes back once all gradients are
    there."""
    if whole.node is not None:
        whole.node.joins = True
    return [walk.view(whole, elements, PASSED) for elements in parts]


def halves(walk: Walk, x: Ghost) -> list[Ghost]:
    """`chunk(2)`."""
    return split(walk, x, [x.elements // 2] * 2)


def layer_norm(walk: Walk, x: Ghost, vector: int, trained: bool) -> Ghost:
    """`F.layer_norm`: saves its input and, per row, a mean and a root in fp32; two weights of `vector` bytes each."""
    size = x.size

    def back(gradient: Storage) -> list[Storage | None]:
        grad_x = walk.allocate(size)
        if trained:
            walk.leaf_gradient(vector)
            walk.leaf_gradient(vector)
        return [grad_x]

    saved = walk.save(x, None) if x.node is not None or trained else None
    output = walk.result(x.elements, x.itemsize, [x], back, saved, trains=trained)
    statistics = walk.new(2 * TOKEN, FLOAT)
    if saved is not None:
        walk.save_into(saved, statistics)
    return output


def cube(walk: Walk, x: Ghost) -> Ghost:
    """`torch.pow(x, 3)`: saves x; backward makes the square, thrice that, and the product with the gradient."""
    size = x.size

    def back(gradient: Storage) -> list[Storage | None]:
        temporaries = [walk.allocate(size), walk.allocate(size)]
        product = walk.allocate(size)
        del temporaries  # one C++ expression: its temporaries live to its end
        return [product]

    saved = walk.save(x) if x.node is not None else None
    return walk.result(x.elements, x.itemsize, [x], back, saved)
