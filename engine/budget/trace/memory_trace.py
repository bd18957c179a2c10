"""Memory traces: a model's operations run on tensors that have sizes and real lifetimes, but no data.

CPython frees a `Storage` with the last reference to it, exactly as eager torch frees a real one, so a layer written
with the local variables of transformers has the same live bytes at every moment. What a function frees before it
returns is handed over in a list, from which it takes it: with a frame evaluation hook, such as torch.compile's, CPython
keeps a call's arguments until the call is over. A small autograd tape imitates
backward: what each operation saves, in which order nodes run, and when gradients are passed on, accumulated and freed.
Sizes are polynomials of the micro-batch's shape; the result is the live bytes at local maxima.

The rules are those of torch 2.13 (`torch/csrc/autograd/engine.cpp`, `input_buffer.cpp`, `accumulate_grad.h`,
`torch/utils/checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount

from engine.budget.trace.polynomial import BYTE, NO_BYTES, SQUARE, TRAINED_GRADS, BytesPolynomial

SMALLEST_OFFLOADED_BYTES = 16 * 1024
"""Saved tensors below this size (norm statistics, masks) are not offloaded: starting the copy takes as long as the
copy."""

STAYING_BYTES = SMALLEST_OFFLOADED_BYTES // 512
"""Bytes per token up to which a saved tensor is counted as staying on the device: the same as that size at 512 tokens.
With more tokens some are moved that are counted as staying, so the count is too high rather than too low."""


class Storage:
    """A block of memory, whose bytes count as live until the last reference to this object is gone."""

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
    """A tensor without data: storage, number of elements, bytes per element, and its autograd node if it has one."""

    __slots__ = ("elements", "itemsize", "node", "on_host", "size", "storage")

    def __init__(
        self, storage: Storage, elements: BytesPolynomial, itemsize: int, size: BytesPolynomial | None = None
    ) -> None:
        self.storage = storage
        self.elements = elements
        self.itemsize = itemsize
        self.size = elements * itemsize if size is None else size
        """Bytes."""
        self.node: Node | None = None
        self.on_host = False
        """Whether it was copied to the host for backward; all operations that save it share one copy."""


SavedTensor = Storage | BytesPolynomial
"""A tensor saved for backward: its storage, or only its size if it is offloaded to the host."""

Backward = Callable[[Storage], list[Storage | None]]
"""Maps the gradient of an operation's output to the gradients of its inputs."""


class Node:
    """An operation on the autograd tape: its inputs' nodes, its saved tensors, and the backward function."""

    __slots__ = ("backward", "gradient", "inputs", "joined", "saved", "size")

    def __init__(
        self,
        size: BytesPolynomial,
        inputs: Sequence[Node | None] = (),
        backward: Backward | None = None,
        saved: list[SavedTensor] | None = None,
    ) -> None:
        self.size = size
        """Bytes of the gradient of the operation's output."""
        self.inputs = inputs
        self.backward = backward
        """None: the gradients of the inputs are written over what was saved of them."""
        self.saved = saved
        """None: backward needs nothing from forward. Empty list: backward needs a weight, which adds no bytes."""
        self.gradient: Storage | None = None
        """Gradient of the operation's output, as accumulated so far."""
        self.joined: list[Storage] | None = None
        """For an operation with several outputs in one storage: their gradients, live until its backward has run."""

    def take_gradient(self) -> Storage:
        """The node drops its reference."""
        assert self.gradient is not None
        gradient, self.gradient = self.gradient, None
        return gradient


class MemoryTrace:
    """Live bytes, their local maxima, and the autograd tape.

    Without `learning`, operations run as under `torch.no_grad`. Without `keeps_saved`, outputs need gradients but
    nothing is saved, as in the first forward pass of gradient checkpointing.
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
        """Imitates the metered device: under its dispatch mode torch adds gradients out of place, and softmax in host
        memory first makes a copy of its input in the output's dtype."""
        self.autocast = autocast
        """Linear layers and attention cast fp32 weights and inputs to half precision; the grouped products of experts,
        which autocast does not cover, run in fp32."""
        self.offloads = offloads
        """Saved tensors are moved to the host, and copied back to the device when backward unpacks them."""
        self.learning = learning
        self.keeps_saved = keeps_saved
        self.offloaded = NO_BYTES
        """Bytes of the saved tensors that were moved to the host."""
        self.largest_offloaded = NO_BYTES
        """Bytes of the largest of them."""
        self.casts: list[Storage] = []
        """Half-precision copies of trained weights, which autocast caches until the loss has been computed."""
        self._last_save = 0, NO_BYTES, False
        """When a tensor was last saved for backward: number of peaks, live bytes, `rising`."""
        self._recompute: tuple[list[BytesPolynomial], BytesPolynomial] | None = None

    def record_peak(self) -> None:
        if self.rising:
            self.peaks.append(self.live)
            self.rising = False

    def take_peaks(self) -> list[BytesPolynomial]:
        """The bytes that are live now, followed by the local maxima since the last call; clears the record."""
        peaks, self.peaks = [self.live, *self.peaks], []
        self.rising = False
        return peaks

    def add_peaks(self, peaks: Sequence[BytesPolynomial], leaving: BytesPolynomial = NO_BYTES) -> None:
        """Count an operation traced apart: its local maxima come on top of what is live, and `leaving` stays."""
        self.peaks += [self.live + peak for peak in peaks]
        self.live += leaving
        self.rising = True

    def new(self, elements: BytesPolynomial, itemsize: int) -> TracedTensor:
        """A tensor that needs no gradient."""
        size = elements * itemsize
        return TracedTensor(Storage(self, size), elements, itemsize, size)

    def allocate(self, size: BytesPolynomial) -> Storage:
        """A storage that belongs to no `TracedTensor`, such as a gradient or a temporary."""
        return Storage(self, size)

    def save(self, *tensors: TracedTensor | None) -> list[SavedTensor]:
        """Save tensors for backward; None stands for a weight, which adds no bytes."""
        if not (self.learning and self.keeps_saved):
            return []
        self._last_save = len(self.peaks), self.live, self.rising
        return [self._saved(tensor) for tensor in tensors if tensor is not None]

    def _saved(self, tensor: TracedTensor) -> SavedTensor:
        if not (self.offloads and waits_on_host(tensor)):
            return tensor.storage
        if not tensor.on_host:
            tensor.on_host = True
            self.offloaded += tensor.size
            self.largest_offloaded = max(self.largest_offloaded, tensor.size, key=_by_growth)
        return tensor.size

    def result(
        self,
        elements: BytesPolynomial,
        itemsize: int,
        inputs: Sequence[TracedTensor],
        backward: Backward | None,
        saved: list[SavedTensor] | None = None,
        *,
        trains: bool = False,
    ) -> TracedTensor:
        """Allocate an operation's output and record the operation as `on_tape` does."""
        return self.on_tape(self.new(elements, itemsize), inputs, backward, saved, trains=trains)

    def on_tape(
        self,
        output: TracedTensor,
        inputs: Sequence[TracedTensor],
        backward: Backward | None,
        saved: list[SavedTensor] | None = None,
        *,
        trains: bool = False,
    ) -> TracedTensor:
        """Record the operation that made `output`, if one of `inputs` or of its weights (`trains`) needs a gradient.

        `backward` maps the gradient of the output to those of the inputs; `saved` is what `save` returned.
        """
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
        """An operation whose backward allocates the gradient of `x` and nothing else."""
        return self.result(elements, itemsize, [x], self.new_gradient(x), saved)

    def view(self, x: TracedTensor, elements: BytesPolynomial, backward: Backward) -> TracedTensor:
        """An operation whose output shares the storage of `x`."""
        return self.on_tape(TracedTensor(x.storage, elements, x.itemsize), [x], backward)

    def new_gradient(self, x: TracedTensor) -> Backward:
        """A backward function that allocates the gradient of `x` and nothing else."""
        size = x.size
        return lambda gradient: [self.allocate(size)]

    def checkpoint(self, forward: Callable[[], TracedTensor]) -> TracedTensor:
        """Gradient checkpointing: trace the recomputation of a layer, which stops after the last tensor that backward
        needs.

        Peaks and saved tensors of `forward` are counted when backward first unpacks one; only the output is live now.
        The first forward pass is a trace of its own, without `keeps_saved`.
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
        """Count the recomputation of a checkpointed layer, once: its peaks, and the tensors it saves."""
        if self._recompute is None:
            return
        maxima, kept = self._recompute
        self._recompute = None
        self.peaks += [self.live + peak for peak in maxima]
        self.live += kept
        self.rising = True

    def leaf_gradient(self, size_bytes: int) -> None:
        """Allocate a trained weight's gradient; kept if it is the first of its step, else added to that and freed."""
        self.adopt_gradient(self.allocate(size_bytes * BYTE))

    def adopt_gradient(self, storage: Storage) -> None:
        """Make a storage the gradient of a trained weight. Its fixed bytes stay counted after it is freed, as the
        coefficient `TRAINED_GRADS`: only the first micro-batch of a step adds them (`BytesPolynomial.settled`)."""
        storage.size -= storage.size.fixed * TRAINED_GRADS

    def backward(self) -> None:
        """Run backward from the node whose gradient is set; as in autograd, the latest node runs first."""
        while self.tape:
            current = self.tape.pop()
            if current.gradient is not None:
                self._run_backward(current)

    def _run_backward(self, node: Node) -> None:
        """Compute the gradients of a node's inputs, free its saved tensors, then pass on the gradients, last first."""
        unpacked = None if node.saved is None else self._unpack_saved(node.saved)
        outgoing = node.backward(node.take_gradient()) if node.backward else _over_saved(node, unpacked)
        del unpacked
        node.saved, node.joined = None, None
        while outgoing:
            self._accumulate_grad(node.inputs[len(outgoing) - 1], outgoing.pop())

    def _unpack_saved(self, saved: list[SavedTensor]) -> list[Storage]:
        """Recompute a checkpointed layer, and allocate copies of offloaded tensors."""
        self._run_again()
        return [self.allocate(size) for size in saved if isinstance(size, BytesPolynomial)]

    def _accumulate_grad(self, target: Node | None, gradient: Storage | None) -> None:
        """Set the gradient of `target`, or add to it; nothing is done if one of both is None."""
        if gradient is None or target is None:
            return
        if target.joined is not None:
            target.joined.append(gradient)
            target.gradient = gradient
        elif target.gradient is None:
            target.gradient = gradient
        elif self.metered or getrefcount(target.gradient) != 2:  # 2: no other reference, so torch adds in place
            target.gradient = self.allocate(target.size)


def _over_saved(node: Node, unpacked: list[Storage] | None) -> list[Storage | None]:
    """The storages that hold a node's saved tensors, in order: copies on the device of those that were offloaded."""
    node.take_gradient()
    copies = iter(unpacked or [])
    return [next(copies) if isinstance(each, BytesPolynomial) else each for each in node.saved or []]


def _by_growth(size: BytesPolynomial) -> tuple[int, int]:
    return size.per_square, size.per_token


def waits_on_host(tensor: TracedTensor) -> bool:
    """Whether activation offload moves it: no integers, small tensors, or attention masks (saved as expanded views)."""
    size = tensor.size
    large = size.per_square > 0 or size.per_token > STAYING_BYTES or size.fixed >= SMALLEST_OFFLOADED_BYTES
    return tensor.itemsize < 8 and large and tensor.elements != SQUARE
