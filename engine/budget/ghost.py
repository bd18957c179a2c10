"""A walk through a model's operations that allocates nothing: tensors are sizes, and their lives are real.

`Ghost` stands for a tensor and owns a `Storage`; CPython frees it when the last name for it goes, which is exactly how
eager torch frees the real one. So a layer written here with the same local variables as in transformers has the same
live set at every moment, and a small autograd tape does the same for backward: what each operation saves, in which
order nodes run, when gradients are handed on, added up and dropped.

Sizes are packed (`engine.budget.packed`). The result of a walk is the set of live sizes at its local maxima:
evaluating those is the closed form.

What torch does is taken from torch 2.13 (`torch/csrc/autograd/engine.cpp`, `input_buffer.cpp`, `accumulate_grad.h`,
`torch/utils/checkpoint.py`) and checked against counted real steps in `tests/budget`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount

from engine.budget.packed import LEFT, SQUARE, TOKEN

Back = Callable[["Storage"], list["Storage | None"]] | int
"""From the gradient of a node's output to a new list of the gradients of its inputs; or, of a single input, just the
bytes that its gradient takes, which is what most operations make."""
PASSED = -1
"""Instead of such bytes: the gradient is handed on as it is."""


class Storage:
    """Bytes that are counted from creation until nobody refers to them any more."""

    __slots__ = ("freed", "kept", "walk")

    def __init__(self, walk: Walk, size: int) -> None:
        self.walk = walk
        self.freed = size
        """What its end takes from the live bytes."""
        self.kept: Kept | None = None
        walk.live += size
        walk.rising = True

    def __del__(self) -> None:
        walk = self.walk
        if walk.rising:  # as `reach(0)`, less a call for every tensor
            walk.peaks.append(walk.live)
            if walk.passing is not None:
                walk.passing.append(walk.live - walk.lingering)
            walk.rising = False
        if self.kept is None:
            walk.live -= self.freed
        else:
            walk.lingering += self.freed


class Kept:
    """What an operation saves of a tensor: its bytes, which stay when nobody else refers to them any more."""

    __slots__ = ("size", "walk")

    def __init__(self, storage: Storage) -> None:
        self.walk = storage.walk
        self.size = storage.freed

    def __del__(self) -> None:
        walk = self.walk
        if walk.rising:
            walk.reach(0)
        walk.live -= self.size
        walk.lingering -= self.size


Saved = list[Kept | Storage | int]
"""What an operation keeps for backward: tensors, the bytes of those that wait on the host, and of several outputs the
gradients that are there before the others."""

STAYING_BYTES = 32
"""Per token: what is no larger is counted as staying on the device when activations wait on the host. The bound of
`engine.model.offload` is on the whole tensor, which this meets at 512 tokens; with more it is on the safe side."""


class Node:
    """One operation on the tape: where its gradients go, how they are made, and what it saved for that."""

    gradient: Storage | None = None
    """What has come for it so far, until its turn."""
    joins = False
    """Has several outputs: their gradients wait side by side instead of being added up."""
    chain: Callable[[Node], None] | None = None
    """Of several operations at once: the whole way back."""

    def __init__(self, inputs: Sequence[Node | None], back: Back, size: int, saved: Saved | None) -> None:
        self.inputs = inputs
        self.back = back
        self.size = size
        self.saves = saved is not None
        self.saved = saved

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

    Without `learning` it is one under `torch.no_grad`. With `passes` it also notes what its forward pass would hold
    were nothing saved, as under `torch.no_grad` or in a checkpointed part before its backward pass has come.
    """

    def __init__(
        self,
        *,
        metered: bool,
        autocast: bool = False,
        offloads: bool = False,
        learning: bool = True,
        passes: bool = False,
    ) -> None:
        self.live = 0
        self.rising = False
        self.peaks: list[int] = []
        self.lingering = 0
        """Of the live bytes, those that only an operation that saved them still refers to."""
        self.passing: list[int] | None = [] if passes else None
        """The local maxima were nothing saved, for as long as the forward pass goes on."""
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
        top = self.live + size
        self.peaks.append(top)
        if self.passing is not None:
            self.passing.append(top - self.lingering)
        self.rising = False

    def keep(self, size: int) -> None:
        """Bytes that are saved and that nobody refers to otherwise."""
        self.live += size
        self.lingering += size

    def take_passing(self) -> set[int]:
        """The local maxima so far of a forward pass that saves nothing, which ends here."""
        assert self.passing is not None
        passing, self.passing = {self.live - self.lingering, *self.passing}, None
        return passing

    def keeps(self, size: int) -> tuple[int, int]:
        """Of so many bytes that an operation saves: those that stay, and those that wait on the host."""
        if not self.learning:
            return 0, 0
        return (0, size) if self.offloads and size > STAYING_BYTES * TOKEN else (size, 0)

    def mark(self, above: int = 0) -> None:
        """Something is saved here, with so much above what is live: so far a checkpointed forward runs again."""
        self._saved_at = len(self.peaks), self.live + above, self.rising or above > 0

    def save(self, *ghosts: Ghost | None) -> Saved:
        """Keep inputs for backward; None stands for a weight, which costs nothing but is saved too."""
        if not ghosts or not self.learning:
            return []
        self.mark()
        return self._kept(ghosts)

    def _kept(self, ghosts: Iterable[Ghost | None]) -> Saved:
        return [self.kept_of(ghost) for ghost in ghosts if ghost is not None]

    def kept_of(self, ghost: Ghost) -> Kept | int:
        """What an operation keeps of one that it saves: all of it, or where it waits on the host its bytes."""
        if self.offloads and travels(ghost.elements, ghost.itemsize):
            return ghost.size
        storage = ghost.storage
        if storage.kept is None:
            storage.kept = Kept(storage)
        return storage.kept

    def held(self, ghost: Ghost) -> Saved:
        """What keeps a tensor whatever becomes of its names, but by no operation."""
        return self._kept((ghost,))

    def save_into(self, holder: Saved, *ghosts: Ghost | None) -> Saved:
        """Keep more for the same operation: outputs are saved after they are made."""
        if ghosts and self.learning:
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
        if not self.learning:
            return output
        inputs = [parents[0].node] if len(parents) == 1 else [parent.node for parent in parents]
        if trains or any(inputs):
            output.node = Node(inputs, back, output.size, saved)
            self.tape.append(output.node)
        return output

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
        output = Ghost(storage, elements, itemsize)
        inputs = [parent.node for parent in parents]
        if self.learning and any(inputs):
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
            output.node = Node([before], PASSED, output.size, saved)
            output.node.chain = back
            self.tape.append(output.node)
        return output

    def checkpoint(self, forward: Callable[[], Ghost]) -> Ghost:
        """Run `forward` as backward will run it again, up to the last that is saved.

        Its maxima, and what it saves, count from the first operation of backward that needs it. What the first pass
        holds, which keeps nothing, is what `take_passing` says.
        """
        earlier, self.peaks, before, lingering = self.peaks, [], self.live, self.lingering
        output = forward()
        count, live, rising = self._saved_at
        maxima = [peak - before for peak in (*self.peaks[:count], *([live] if rising else ()))]
        self._recompute = maxima, self.live - output.size - before
        self.live, self.lingering = before + output.size, lingering
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
        tape, offloads = self.tape, self.offloads
        while tape:
            current = tape.pop()
            if current.gradient is None:
                continue
            if current.chain is not None:
                current.chain(current)
                continue
            incoming, current.gradient = current.gradient, None
            if current.saves and self._recompute is not None:
                self.bring_back()
            fetched = self._fetch(current.saved) if offloads and current.saved else None
            back = current.back
            if isinstance(back, int):
                made = incoming if back == PASSED else self.exchange(incoming, back)
                del incoming, fetched
                if current.saved:
                    current.saved.clear()
                target = current.inputs[0]
                if target is not None:
                    if target.gradient is None and not target.joins:
                        target.gradient = made
                    else:
                        self.hand_on(target, made)
                del made
                continue
            outgoing = back(incoming)
            del incoming, fetched
            if current.saved:
                current.saved.clear()
            while outgoing:
                self.hand_on(current.inputs[len(outgoing) - 1], outgoing.pop())

    def exchange(self, incoming: Storage, size: int) -> Storage:
        """Other bytes made of these, which go then unless somebody else refers to them."""
        if getrefcount(incoming) > 3:  # its names here and in the caller, and the argument of the question
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
        elif self.metered or getrefcount(target.gradient) != 2:
            target.gradient = Storage(self, target.size)


def travels(elements: int, itemsize: int) -> bool:
    """Whether a tensor goes to the host: no whole numbers, nothing small, no mask, which is saved repeated for every
    head or row."""
    return itemsize < 8 and elements * itemsize > STAYING_BYTES * TOKEN and elements != SQUARE
