"""The operations of a decoder, as far as memory goes: what each makes, saves, and makes again in backward.

Each is written after its torch counterpart (named in the docstring); derivative formulas are those of
`tools/autograd/derivatives.yaml`, torch 2.13. Backward closures hold sizes, never tensors: what is kept is only what
`Walk.save` was given.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.budget.ghost import Ghost, Walk
from engine.budget.packed import TOKEN
from engine.budget.tape import PASSED, Node, Operation, Saved, Storage

FLOAT = 4
INDEX = 8
"""Bytes of an int64."""


def linear(
    walk: Walk, x: Ghost, outputs: int, weight: int, trained: bool, bias: int = 0, unpacked: int = 0
) -> Ghost:
    """`F.linear`: `outputs` per token; `weight` and `bias` are the bytes of their gradients where they are trained.

    A quantised weight is unpacked to `unpacked` bytes for as long as it is multiplied with, forward and backward.
    """
    before, elements = x.node, outputs * TOKEN
    saved = None
    if trained:
        saved = walk.save(x)
    elif before is not None:
        saved = walk.save()  # the weight, which costs nothing
    if not (trained or unpacked):
        return walk.single(x, elements, x.itemsize, x.size, saved)
    whole = walk.allocate(unpacked) if unpacked else None
    output = walk.new(elements, x.itemsize)
    del whole
    if walk.learning and (before is not None or trained):
        learns = (weight, bias) if trained and bias else (weight,) if trained else ()
        walk.taped(output, _Linear(before, x.size, output.size, saved, learns, unpacked))
    return output


class _Linear(Operation):
    """A linear layer that learns, or that is unpacked for the occasion."""

    __slots__ = ("before", "gives", "learns", "unpacked")

    def __init__(
        self, before: Node | None, gives: int, size: int, saved: Saved | None, learns: tuple[int, ...], unpacked: int
    ) -> None:
        self.size, self.saved, self.gradient, self.joins = size, saved, None, False
        self.before, self.gives, self.learns, self.unpacked = before, gives, learns, unpacked

    def go_back(self, walk: Walk) -> None:
        """The gradients of the input, of the weight and of the bias, as far as anybody wants them."""
        incoming = self.take()
        fetched = walk.come_to(self.saved) if self.saved is not None else None
        whole = walk.allocate(self.unpacked) if self.unpacked else None
        made = walk.allocate(self.gives) if self.before is not None else None
        for size in self.learns:
            walk.leaf_gradient(size)
        del whole, incoming, fetched
        if self.saved:
            self.saved.clear()
        walk.hand_on(self.before, made)


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
    return walk.single(x, x.elements, itemsize, x.size)


def add(walk: Walk, left: Ghost, right: Ghost) -> Ghost:
    """`left + right`, promoted to the wider dtype. Both get the incoming gradient itself, or a cast of it."""
    itemsize = max(left.itemsize, right.itemsize)
    output = walk.new(left.elements, itemsize)
    if left.node is None and right.node is None:
        return output
    return walk.taped(output, _Sum(left, right, output))


class _Sum(Operation):
    """Of two tensors of one shape."""

    __slots__ = ("left", "left_gives", "right", "right_gives")

    def __init__(self, left: Ghost, right: Ghost, output: Ghost) -> None:
        self.size = size = output.size
        self.gradient = self.saved = None
        self.joins = False
        self.left, self.right = left.node, right.node
        self.left_gives = PASSED if left.size == size else left.size
        self.right_gives = PASSED if right.size == size else right.size

    def go_back(self, walk: Walk) -> None:
        """Hand the gradient on, to the right side first."""
        incoming = self.take()
        left = incoming if self.left_gives == PASSED else walk.allocate(self.left_gives)
        right = incoming if self.right_gives == PASSED else walk.allocate(self.right_gives)
        del incoming
        walk.hand_on(self.right, right)
        del right
        walk.hand_on(self.left, left)


def multiply(walk: Walk, left: Ghost, right: Ghost) -> Ghost:
    """`left * right`, where right may be broadcast: its gradient is made in full, then summed."""
    itemsize, wanted_left, wanted_right = max(left.itemsize, right.itemsize), left.node, right.node
    if wanted_left is None and wanted_right is None:
        return walk.new(left.elements, itemsize)
    saved = walk.save(left if wanted_right is not None else None, right if wanted_left is not None else None)
    output = walk.new(left.elements, itemsize)
    return walk.taped(output, _Product(left, right, output, saved))


class _Product(Operation):
    """Of two tensors, each of which is saved for the other's gradient."""

    __slots__ = ("left", "left_size", "right", "right_size")

    def __init__(self, left: Ghost, right: Ghost, output: Ghost, saved: Saved) -> None:
        super().__init__(output.size, saved)
        self.left, self.left_size, self.right, self.right_size = left.node, left.size, right.node, right.size

    def go_back(self, walk: Walk) -> None:
        """Both gradients are made in full, before either is summed or cast."""
        assert self.saved is not None
        full, incoming = self.size, self.take()
        fetched = walk.come_to(self.saved)
        left = walk.allocate(full) if self.left is not None else None
        right = walk.allocate(full) if self.right is not None else None
        if right is not None and self.right_size != full:
            right = walk.allocate(self.right_size)
        if left is not None and self.left_size != full:
            left = walk.allocate(self.left_size)
        del incoming, fetched
        self.saved.clear()
        walk.hand_on(self.right, right)
        del right
        walk.hand_on(self.left, left)


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
    return walk.single(x, x.elements, x.itemsize, PASSED)


def gather(walk: Walk, x: Ghost, index: Ghost, elements: int) -> Ghost:
    """`x[index]`: the index is saved, backward adds into zeros."""
    saved = walk.save(index) if x.node is not None else None
    return walk.single(x, elements, x.itemsize, x.size, saved)


def scale(walk: Walk, x: Ghost) -> Ghost:
    """`x * number` or `x / number`: nothing is saved."""
    return walk.single(x, x.elements, x.itemsize, x.size)


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
    saved = walk.save(x) if x.node is not None else None
    return walk.single(x, x.elements, x.itemsize, x.size, saved)


def add_number(walk: Walk, x: Ghost, width: int = 0) -> Ghost:
    """`x + number`, or a mask of `width` bytes each: the gradient passes through, cast where the sum is wider."""
    itemsize = max(x.itemsize, width)
    return walk.single(x, x.elements, itemsize, PASSED if itemsize == x.itemsize else x.size)


def saves_output(walk: Walk, x: Ghost, itemsize: int | None = None) -> Ghost:
    """softmax and tanh. A kernel that casts its input to `itemsize` casts the gradient back in the same pass."""
    saved: Saved | None = [] if x.node is not None else None
    output = walk.single(x, x.elements, itemsize or x.itemsize, x.size, saved)
    if saved is not None:
        walk.save_into(saved, output)
    return output


def softmax(walk: Walk, x: Ghost, itemsize: int) -> Ghost:
    """`softmax(x, dtype=...)`. On a card one kernel reads the input as it is; on the host it is cast first, apart."""
    return saves_output(walk, cast(walk, x, itemsize) if walk.metered else x, itemsize)


def narrow(walk: Walk, x: Ghost, elements: int) -> Ghost:
    """A slice: shares the tensor's storage; backward puts the gradient into zeros of full size."""
    return walk.view(x, elements, x.size)


def split(walk: Walk, x: Ghost, parts: Sequence[int]) -> list[Ghost]:
    """`Tensor.split` and `chunk`: views of one tensor, whose gradients are joined once all are there."""
    return pieces(walk, walk.view(x, x.elements, x.size), parts)


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
