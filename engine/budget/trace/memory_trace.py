"""A trace of a model's operations that allocates nothing: tensors are sizes, and their lives are real.

`TracedTensor` stands for a tensor and owns a `Storage`; CPython frees it when the last name for it goes, which is
exactly how eager torch frees the real one. So a layer written here with the same local variables as in transformers
has the same live set at every moment. A small autograd tape does the same for backward: what each operation saves, in
which order nodes run, when gradients are passed on, accumulated and dropped.

Sizes are polynomials of the micro-batch's shape (`engine.budget.trace.polynomial`). The result of a trace is the set
of live sizes at its local maxima. Operations on traced tensors are in `engine.budget.trace.operations`.

What torch does is taken from torch 2.13 (`torch/csrc/autograd/engine.cpp`, `input_buffer.cpp`, `accumulate_grad.h`,
`torch/utils/checkpoint.py`) and checked against counted real steps in `tests/budget`.

Try: `python -m pytest tests/budget/test_accuracy.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount

from engine.budget.trace.polynomial import BYTE, NO_BYTES, SQUARE, TRAINED_GRADS, BytesPolynomial

STAYING_BYTES = 32
"""Per token: a tensor that is no larger is counted as staying on the device when saved tensors wait on the host. The
bound of `engine.model.offload` is on the whole tensor, which this meets at 512 tokens; with more tokens it is on the
safe side."""


class Storage:
    """Bytes that are live from creation until nobody refers to them any more."""

    __slots__ = ("size", "trace")

    def __init__(self, trace: MemoryTrace, size: BytesPolynomial) -> None:
        self.trace = trace
        self.size = size
        trace.live += size
        trace.rising = True

    def __del__(self) -> None:
        self.trace.record_peak()
        self.trace.live -= self.size


class TracedTensor:
    """A tensor: its storage, its number of elements, bytes per element, and its node when it needs a gradient."""

    __slots__ = ("elements", "itemsize", "node", "size", "storage")

    def __init__(
        self, storage: Storage, elements: BytesPolynomial, itemsize: int, size: BytesPolynomial | None = None
    ) -> None:
        self.storage = storage
        self.elements = elements
        self.itemsize = itemsize
        self.size = elements * itemsize if size is None else size
        """Bytes."""
        self.node: Node | None = None


SavedTensor = Storage | BytesPolynomial
"""What an operation keeps of a tensor for backward: its storage, or the bytes of one that waits on the host."""

Backward = Callable[[Storage], list[Storage | None]]
"""From the gradient of an operation's output to the gradients of its inputs."""


class Node:
    """An operation on the autograd tape."""

    __slots__ = ("backward", "gradient", "inputs", "joined", "saved", "size")

    def __init__(
        self,
        size: BytesPolynomial,
        inputs: Sequence[Node | None] = (),
        backward: Backward | None = None,
        saved: list[SavedTensor] | None = None,
    ) -> None:
        self.size = size
        """Bytes of its output's gradient."""
        self.inputs = inputs
        self.backward = backward
        self.saved = saved
        """None for an operation that needs nothing of forward; an empty list for one that needs a weight alone."""
        self.gradient: Storage | None = None
        """The output's gradient as accumulated so far."""
        self.joined: list[Storage] | None = None
        """Of an operation with several outputs in one storage: their gradients wait side by side."""

    def take_gradient(self) -> Storage:
        """Hand the accumulated gradient to the caller, who then holds its only name."""
        assert self.gradient is not None
        gradient, self.gradient = self.gradient, None
        return gradient


class MemoryTrace:
    """Live bytes, their local maxima, and the autograd tape.

    Without `learning` operations run as under `torch.no_grad`. Without `keeps_saved` gradients are to come, but nothing
    is saved: the first forward pass of a checkpointed layer.
    """

    def __init__(
        self,
        *,
        metered: bool,
        autocast: bool = False,
        offloads: bool = False,
        learning: bool = True,
        keeps_saved: bool = True,
    ) -> None:
        self.live = NO_BYTES
        self.rising = False
        """Whether bytes were allocated since the last local maximum."""
        self.peaks: list[BytesPolynomial] = []
        self.tape: list[Node] = []
        self.metered = metered
        """On the metered device: under a dispatch mode torch adds gradients out of place, and softmax on the host
        converts its input to another dtype before it begins."""
        self.autocast = autocast
        """fp32 weights and values are multiplied in half precision; those of experts, which autocast does not know,
        are not."""
        self.offloads = offloads
        """Saved tensors wait on the host, and come back when backward unpacks them."""
        self.learning = learning
        self.keeps_saved = keeps_saved
        self.casts: list[Storage] = []
        """Weights that autocast has cast: kept until the forward pass, loss included, is over."""
        self._last_save = 0, NO_BYTES, False
        """When a tensor was saved last: how many peaks there were, the live bytes, whether they were rising."""
        self._recompute: tuple[list[BytesPolynomial], BytesPolynomial] | None = None

    def record_peak(self) -> None:
        """Note the live bytes as a local maximum, if they have risen since the last one."""
        if self.rising:
            self.peaks.append(self.live)
            self.rising = False

    def take_peaks(self) -> list[BytesPolynomial]:
        """The local maxima since the last call, the live bytes of this moment included."""
        peaks, self.peaks = [self.live, *self.peaks], []
        self.rising = False
        return peaks

    def new(self, elements: BytesPolynomial, itemsize: int) -> TracedTensor:
        """A tensor that needs no gradient."""
        size = elements * itemsize
        return TracedTensor(Storage(self, size), elements, itemsize, size)

    def allocate(self, size: BytesPolynomial) -> Storage:
        """Bytes without a tensor around them."""
        return Storage(self, size)

    def save(self, *tensors: TracedTensor | None) -> list[SavedTensor]:
        """Keep tensors for backward; None stands for a weight, which costs nothing but is saved too."""
        if not (self.learning and self.keeps_saved):
            return []
        self._last_save = len(self.peaks), self.live, self.rising
        return [self._saved(tensor) for tensor in tensors if tensor is not None]

    def _saved(self, tensor: TracedTensor) -> SavedTensor:
        return tensor.size if self.offloads and waits_on_host(tensor) else tensor.storage

    def result(
        self,
        elements: BytesPolynomial,
        itemsize: int,
        inputs: Sequence[TracedTensor],
        backward: Backward,
        saved: list[SavedTensor] | None = None,
        *,
        trains: bool = False,
    ) -> TracedTensor:
        """The output of an operation; `trains` says that a trained weight takes part."""
        return self.on_tape(self.new(elements, itemsize), inputs, backward, saved, trains=trains)

    def on_tape(
        self,
        output: TracedTensor,
        inputs: Sequence[TracedTensor],
        backward: Backward,
        saved: list[SavedTensor] | None = None,
        *,
        trains: bool = False,
    ) -> TracedTensor:
        """Put the operation that made `output` on the tape, if a gradient is to come for any of its inputs."""
        nodes = [tensor.node for tensor in inputs]
        if self.learning and (trains or any(nodes)):
            output.node = Node(output.size, nodes, backward, saved)
            if self.keeps_saved:  # else no backward follows
                self.tape.append(output.node)
        return output

    def unary(
        self,
        x: TracedTensor,
        elements: BytesPolynomial,
        itemsize: int,
        saved: list[SavedTensor] | None = None,
    ) -> TracedTensor:
        """The output of an operation on `x` alone, whose backward makes one tensor: the gradient of `x`."""
        return self.result(elements, itemsize, [x], self.new_gradient(x), saved)

    def view(self, x: TracedTensor, elements: BytesPolynomial, backward: Backward) -> TracedTensor:
        """The output of an operation on `x` that shares its storage."""
        return self.on_tape(TracedTensor(x.storage, elements, x.itemsize), [x], backward)

    def new_gradient(self, x: TracedTensor) -> Backward:
        """A backward that makes the gradient of `x` and nothing else."""
        size = x.size
        return lambda gradient: [self.allocate(size)]

    def checkpoint(self, forward: Callable[[], TracedTensor]) -> TracedTensor:
        """Run `forward` as backward will run it again: up to the last tensor that is saved.

        Its maxima, and what it saves, count from the first operation of backward that unpacks a saved tensor. What the
        first pass holds is for a trace without `keeps_saved` to say.
        """
        earlier, self.peaks, before = self.peaks, [], self.live
        output = forward()
        count, live, rising = self._last_save
        maxima = self.peaks[:count] + [live] * rising
        self._recompute = [peak - before for peak in maxima], self.live - output.size - before
        self.live = before + output.size
        self.peaks, self.rising = earlier, False
        return output

    def _run_again(self) -> None:
        """Count what a checkpointed forward makes and saves."""
        if self._recompute is None:
            return
        maxima, kept = self._recompute
        self._recompute = None
        self.peaks += [self.live + peak for peak in maxima]
        self.live += kept
        self.rising = True

    def leaf_gradient(self, size_bytes: int) -> None:
        """The gradient of a trained weight: kept the first time, added to the one that is there and dropped later."""
        self.adopt_gradient(self.allocate(size_bytes * BYTE))

    def adopt_gradient(self, storage: Storage) -> None:
        """Make a storage the gradient of a trained weight. One trace is for the first micro-batch of a step and for
        later ones: at the storage's end its bytes become as many of `TRAINED_GRADS`."""
        storage.size -= storage.size.fixed * TRAINED_GRADS

    def backward(self, node: Node, gradient: Storage) -> None:
        """Run the tape from its end, as the autograd engine does: latest node first."""
        node.gradient = gradient
        del gradient
        while self.tape:
            current = self.tape.pop()
            if current.gradient is not None:
                self._run_backward(current)

    def _run_backward(self, node: Node) -> None:
        """Make the gradients of a node's inputs, drop what it saved, and pass the gradients on, the last one first."""
        unpacked = None if node.saved is None else self._unpack_saved(node.saved)
        assert node.backward is not None
        outgoing = node.backward(node.take_gradient())
        del unpacked
        node.saved, node.joined = None, None
        while outgoing:
            self._accumulate_grad(node.inputs[len(outgoing) - 1], outgoing.pop())

    def _unpack_saved(self, saved: list[SavedTensor]) -> list[Storage]:
        """Bring back what was saved: a checkpointed forward runs again, tensors come from the host."""
        self._run_again()
        return [self.allocate(size) for size in saved if isinstance(size, BytesPolynomial)]

    def _accumulate_grad(self, target: Node | None, gradient: Storage | None) -> None:
        """Give a gradient to its node, adding it to what is there."""
        if gradient is None or target is None:
            return
        if target.joined is not None:
            target.joined.append(gradient)
            target.gradient = gradient
        elif target.gradient is None:
            target.gradient = gradient
        elif self.metered or getrefcount(target.gradient) != 2:  # else added in place: nobody else refers to it
            target.gradient = self.allocate(target.size)


def waits_on_host(tensor: TracedTensor) -> bool:
    """Whether a saved tensor goes to the host: no whole numbers, nothing small, no mask, which is saved repeated for
    every head or row."""
    large = tensor.size.per_square > 0 or tensor.size.per_token > STAYING_BYTES
    return tensor.itemsize < 8 and large and tensor.elements != SQUARE
