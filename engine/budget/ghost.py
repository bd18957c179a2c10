"""A walk through a model's operations that allocates nothing: tensors are sizes, and their lives are real.

`Ghost` stands for a tensor and owns a `Storage`; CPython frees it when the last name for it goes, which is exactly how
eager torch frees the real one. So a layer written here with the same local variables as in transformers has the same
live set at every moment, and a small autograd tape does the same for backward: what each operation saves, in which
order nodes run, when gradients are handed on, added up and dropped.

Sizes are functions of the micro-batch, a + b · tokens + c · rows · length² and so on, packed into one integer so that
adding is one operation (`TOKEN`, `SQUARE` and the like are powers of two far above any coefficient). The result
of a walk is the set of live sizes at its local maxima: evaluating those is the closed form.

What torch does is taken from torch 2.13 (`torch/csrc/autograd/engine.cpp`, `input_buffer.cpp`, `accumulate_grad.h`,
`torch/utils/checkpoint.py`) and checked against counted real steps in `tests/budget`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

TOKEN = 1 << 56
"""Per token of the padded micro-batch."""
SQUARE = 1 << 112
"""Per row and length squared."""
CHUNK = 1 << 168
"""Per token of the loss's first chunk."""
SEVERAL = 1 << 224
"""Once where the loss takes more than one chunk."""
POSITION = 1 << 280
"""Per position of one row."""
LEFT = 1 << 336
"""Of finished gradients of weights: there from then on where no earlier micro-batch has left one to add them to."""

WIDTH = 56
"""Bits of each of these numbers; the highest of them is never used."""
GUARDS = sum(1 << (WIDTH * place + WIDTH - 1) for place in range(7))

Back = Callable[["Storage"], Sequence["Storage | None"]] | int
"""From the gradient of a node's output to the gradients of its inputs; or, of a single input, just the bytes that its
gradient takes, which is what most operations make."""
PASSED = -1
"""Instead of such bytes: the gradient is handed on as it is."""


def unpack(size: int) -> tuple[int, int, int, int, int, int]:
    """A packed size as (fixed, per token, per row and length squared, per token of a chunk, if several, position)."""
    mask = TOKEN - 1
    return (
        size & mask, size >> 56 & mask, size >> 112 & mask, size >> 168 & mask, size >> 224 & mask, size >> 280 & mask
    )  # fmt: skip


def settled(size: int, accumulating: bool) -> int:
    """The same without LEFT: nothing where an earlier micro-batch's gradients are held already, to which new ones are
    added and dropped, else a fixed number of bytes."""
    return size & LEFT - 1 if accumulating else (size & LEFT - 1) + (size >> 336)


def highest(sizes: Iterable[int]) -> list[int]:
    """Only those that are the largest for some shape: none that another exceeds in each of its numbers.

    All seven are compared by one subtraction: with the guard bits set, one that has to borrow loses its own.
    """
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        for guarded in reversed(kept):  # what was kept last is the likeliest
            if (guarded - size) & GUARDS == GUARDS:
                break
        else:
            kept.append(size | GUARDS)
    return [guarded ^ GUARDS for guarded in kept]


class Storage:
    """Bytes that are counted from creation until nobody refers to them any more."""

    __slots__ = ("freed", "walk")

    def __init__(self, walk: Walk, size: int) -> None:
        self.walk = walk
        self.freed = size
        """What its end takes from the live bytes."""
        walk.live += size
        walk.rising = True

    def __del__(self) -> None:
        walk = self.walk
        if walk.rising:
            walk.peaks.append(walk.live)
            walk.rising = False
        walk.live -= self.freed


Saved = list[Storage | int]
"""What an operation keeps for backward: tensors, and the bytes of those that wait on the host."""

STAYING_BYTES = 32
"""Per token: what is no larger is counted as staying on the device when activations wait on the host. The bound of
`engine.model.offload` is on the whole tensor, which this meets at 512 tokens; with more it is on the safe side."""


class Node:
    """One operation on the tape: where its gradients go, how they are made, and what it saved for that."""

    __slots__ = ("back", "chain", "gradient", "inputs", "joins", "saved", "saves", "size")

    def __init__(self, inputs: Sequence[Node | None], back: Back, size: int, saved: Saved | None) -> None:
        self.inputs = inputs
        self.back = back
        self.size = size
        self.gradient: Storage | None = None
        """What has come for it so far, until its turn."""
        self.joins = False
        """Has several outputs: their gradients wait side by side instead of being added up."""
        self.saves = saved is not None
        self.saved = saved
        self.chain: Callable[[Node], None] | None = None
        """Of several operations at once: the whole way back."""

    def take(self) -> Storage:
        """The gradient that has come, which is the caller's from now on."""
        assert self.gradient is not None
        gradient, self.gradient = self.gradient, None
        return gradient


class Ghost:
    """A tensor: elements (packed), bytes per element, its storage, and its node when it needs a gradient."""

    __slots__ = ("elements", "itemsize", "node", "size", "storage")

    def __init__(self, storage: Storage, elements: int, itemsize: int) -> None:
        self.storage = storage
        self.elements = elements
        self.itemsize = itemsize
        self.size = elements * itemsize
        """Packed bytes."""
        self.node: Node | None = None


class Walk:
    """Live bytes, their local maxima, and the tape.

    Without `learning` it is one under `torch.no_grad`; without `keeping` one through a checkpointed part, which saves
    nothing, as far as its forward pass goes.
    """

    def __init__(
        self,
        *,
        metered: bool,
        autocast: bool = False,
        offloads: bool = False,
        learning: bool = True,
        keeping: bool = True,
    ) -> None:
        self.live = 0
        self.rising = False
        self.peaks: list[int] = []
        self.tape: list[Node] = []
        self.metered = metered
        """On the metered device: under a dispatch mode torch adds gradients out of place, and softmax on the host
        converts its input to another dtype before it begins."""
        self.autocast = autocast
        """Products are made in half precision of fp32 weights and values; of experts, which it does not know, not."""
        self.offloads = offloads
        """What is saved waits on the host, and comes back when backward has come to it."""
        self.learning = learning
        self.casts: list[Storage] = []
        """Weights that autocast has cast: kept until the forward pass, loss included, is over."""
        self._forgotten = None if learning and keeping else Node((), PASSED, 0, None)
        """Of everything that needs a gradient where nothing is kept."""
        self._saved_at = (0, 0, False)
        """Where the walk was when it saved last: maxima so far, live bytes, whether they were rising."""
        self._recompute: tuple[list[int], int] | None = None

    def take_peaks(self) -> set[int]:
        """The local maxima since the last call, the present one included."""
        peaks = {self.live, *self.peaks}
        self.peaks = []
        self.rising = False
        return peaks

    def new(self, elements: int, itemsize: int) -> Ghost:
        """A tensor that needs no gradient."""
        return Ghost(Storage(self, elements * itemsize), elements, itemsize)

    def allocate(self, size: int) -> Storage:
        """Bare bytes."""
        return Storage(self, size)

    def reach(self, size: int) -> None:
        """A local maximum so much above what is live."""
        self.peaks.append(self.live + size)
        self.rising = False

    def keeps(self, size: int) -> tuple[int, int]:
        """Of so many bytes that an operation saves: those that stay, and those that wait on the host."""
        if self._forgotten is not None:
            return 0, 0
        return (0, size) if self.offloads and size > STAYING_BYTES * TOKEN else (size, 0)

    def mark(self, above: int = 0) -> None:
        """Something is saved here, with so much above what is live: so far a checkpointed forward runs again."""
        self._saved_at = len(self.peaks), self.live + above, self.rising or above > 0

    def save(self, *ghosts: Ghost | None) -> Saved:
        """Keep inputs for backward; None stands for a weight, which costs nothing but is saved too."""
        if not ghosts or self._forgotten is not None:
            return []
        self.mark()
        return self._kept(ghosts)

    def _kept(self, ghosts: Iterable[Ghost | None]) -> Saved:
        if self.offloads:
            return [ghost.size if _travels(ghost) else ghost.storage for ghost in ghosts if ghost is not None]
        return [ghost.storage for ghost in ghosts if ghost is not None]

    def save_into(self, holder: Saved, *ghosts: Ghost | None) -> Saved:
        """Keep more for the same operation: outputs are saved after they are made."""
        if ghosts and self._forgotten is None:
            holder += self._kept(ghosts)
            self.mark()
        return holder

    def result(
        self,
        elements: int,
        itemsize: int,
        parents: Sequence[Ghost],
        back: Back,
        saved: Saved | None = None,
        *,
        trains: bool = False,
    ) -> Ghost:
        """The output of an operation; `trains` says that a trained weight takes part."""
        output = Ghost(Storage(self, elements * itemsize), elements, itemsize)
        return self._on_tape(output, parents, back, saved, trains)

    def view(self, x: Ghost, elements: int, back: Back, saved: Saved | None = None) -> Ghost:
        """The output of an operation on `x` that shares its storage."""
        return self.within(x.storage, elements, x.itemsize, (x,), back, saved)

    def within(
        self,
        storage: Storage,
        elements: int,
        itemsize: int,
        parents: Sequence[Ghost],
        back: Back,
        saved: Saved | None = None,
    ) -> Ghost:
        """The output of an operation in a storage that is there already."""
        return self._on_tape(Ghost(storage, elements, itemsize), parents, back, saved, False)

    def _on_tape(
        self, output: Ghost, parents: Sequence[Ghost], back: Back, saved: Saved | None, trains: bool
    ) -> Ghost:
        """The same, with a node where anything before it needs a gradient. Written for speed, like all of a walk."""
        if not self.learning:
            return output
        for parent in parents:
            if parent.node is not None:
                break
        else:
            if not trains:
                return output
        if self._forgotten is not None:
            output.node = self._forgotten
        else:
            inputs = [parents[0].node] if len(parents) == 1 else [parent.node for parent in parents]
            output.node = Node(inputs, back, output.size, saved)
            self.tape.append(output.node)
        return output

    def chain(
        self,
        output: Ghost,
        before: Node | None,
        back: Callable[[Node], None],
        saved: Saved | None = None,
        *,
        trains: bool = False,
    ) -> Ghost:
        """The output of several operations that come one after the other, with one node for all of them.

        `back` takes the gradient from it and hands on what `before`, the node of what went in, is due.
        """
        if self.learning and (before is not None or trains):
            output.node = self._forgotten
            if output.node is None:
                output.node = Node([before], PASSED, output.size, saved)
                output.node.chain = back
                self.tape.append(output.node)
        return output

    def checkpoint(self, forward: Callable[[], Ghost]) -> Ghost:
        """Run `forward` as backward will run it again, up to the last that is saved.

        Its maxima, and what it saves, count from the first operation of backward that needs it; what the first pass
        holds, which keeps nothing, is for a walk without `keeping` to say.
        """
        earlier, self.peaks, before = self.peaks, [], self.live
        output = forward()
        count, live, rising = self._saved_at
        maxima = [peak - before for peak in (*self.peaks[:count], *([live] if rising else ()))]
        self._recompute = maxima, self.live - output.size - before
        self.live = before + output.size
        self.peaks, self.rising = earlier, False
        return output

    def bring_back(self) -> None:
        """Count what a checkpointed forward makes and saves, when backward has first come to something it saved."""
        if self._recompute is None:
            return
        maxima, kept = self._recompute
        self._recompute = None
        self.peaks += [self.live + peak for peak in maxima]
        self.live += kept
        self.rising = True

    def leaf_gradient(self, size: int) -> None:
        """The gradient of a trained weight: kept the first time, added to the one that is there and dropped later.

        One walk is for both: in the end it becomes as many bytes in another unit.
        """
        self.reach(size)
        self.live += size * LEFT

    def adopt_gradient(self, storage: Storage) -> None:
        """The same for one that was made earlier, at its end."""
        storage.freed -= storage.freed * LEFT

    def backward(self, node: Node, gradient: Storage) -> None:
        """Run the tape from its end, as the autograd engine does: latest node first."""
        node.gradient = gradient
        del gradient
        while self.tape:
            current = self.tape.pop()
            if current.gradient is None:
                continue
            if current.chain is not None:
                current.chain(current)
                continue
            incoming = current.take()
            if current.saves:
                self.bring_back()
            fetched = self._fetch(current.saved) if self.offloads and current.saved else None
            back = current.back
            if isinstance(back, int):
                made = incoming if back == PASSED else self.exchange(incoming, back)
                del incoming, fetched
                if current.saved:
                    current.saved.clear()
                self.hand_on(current.inputs[0], made)
                del made
                continue
            outgoing = list(back(incoming))
            del incoming, fetched
            if current.saved:
                current.saved.clear()
            while outgoing:
                self.hand_on(current.inputs[len(outgoing) - 1], outgoing.pop())

    def exchange(self, incoming: Storage, size: int) -> Storage:
        """Other bytes made of these, which go then unless somebody else refers to them."""
        if sys.getrefcount(incoming) > 3:  # its names here and in the caller, and the argument of the question
            return Storage(self, size)
        self.live += size
        self.peaks.append(self.live)
        self.rising = False
        self.live -= incoming.freed
        incoming.freed = size
        return incoming

    def _fetch(self, saved: Saved) -> list[Storage]:
        """What of it is on the host, brought back."""
        return [Storage(self, size) for size in saved if isinstance(size, int)]

    def hand_on(self, target: Node | None, gradient: Storage | None) -> None:
        """Give a gradient to its node, adding it to what is there."""
        if gradient is None or target is None:
            return
        if target.joins:
            target.saved = [*(target.saved or ()), gradient]
            target.gradient = gradient
        elif target.gradient is None:
            target.gradient = gradient
        elif self.metered or sys.getrefcount(target.gradient) != 2:
            target.gradient = Storage(self, target.size)


def _travels(ghost: Ghost) -> bool:
    """Whether it goes to the host: not whole numbers and small tensors; nor a mask, which is saved repeated for every
    head or row."""
    return ghost.itemsize < 8 and ghost.size > STAYING_BYTES * TOKEN and ghost.elements != SQUARE
