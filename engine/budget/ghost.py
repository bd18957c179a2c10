"""A walk through a model's operations that allocates nothing: tensors are sizes, and their lives are real.

`Ghost` stands for a tensor and owns a `Storage`; CPython frees it when the last name for it goes, which is exactly how
eager torch frees the real one. So a layer written here with the same local variables as in transformers has the same
live set at every moment, and a small autograd tape does the same for backward: what each operation saves, in which
order nodes run, when gradients are handed on, added up and dropped.

Sizes are packed (`engine.budget.packed`). The result of a walk is the set of live sizes at its local maxima:
evaluating those is the closed form.

What such a walk is made of, storages and nodes, is `engine.budget.tape`.

What torch does is taken from torch 2.13 (`torch/csrc/autograd/engine.cpp`, `input_buffer.cpp`, `accumulate_grad.h`,
`torch/utils/checkpoint.py`) and checked against counted real steps in `tests/budget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount

from engine.budget.packed import LEFT, SQUARE, TOKEN, beyond
from engine.budget.tape import Back, Kept, Node, Saved, Several, Single, Storage

STAYING_BYTES = 32
"""Per token: what is no larger is counted as staying on the device when activations wait on the host. The bound of
`engine.model.offload` is on the whole tensor, which this meets at 512 tokens; with more it is on the safe side."""


class Ghost:
    """A tensor: elements (packed), bytes per element, its storage, and its node when it needs a gradient."""

    __slots__ = ("elements", "itemsize", "node", "size", "storage")

    storage: Storage
    elements: int
    itemsize: int
    size: int
    """Packed bytes."""
    node: Node | None


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

    def take_peaks(self) -> list[int]:
        """The local maxima since the last call, the present one included."""
        peaks, self.peaks = [self.live, *self.peaks], []
        self.rising = False
        return peaks

    def new(self, elements: int, itemsize: int) -> Ghost:
        """A tensor that needs no gradient. Written out, as `allocate` and `tensor` are: the most frequent of all."""
        storage = Storage()
        storage.walk = self
        storage.freed = size = elements * itemsize
        storage.kept = None
        self.live += size
        self.rising = True
        ghost = Ghost()
        ghost.storage = storage
        ghost.elements = elements
        ghost.itemsize = itemsize
        ghost.size = size
        ghost.node = None
        return ghost

    def tensor(self, storage: Storage, elements: int, itemsize: int, size: int) -> Ghost:
        """The same in a storage that is there already, of so many bytes."""
        ghost = Ghost()
        ghost.storage = storage
        ghost.elements = elements
        ghost.itemsize = itemsize
        ghost.size = size
        ghost.node = None
        return ghost

    def allocate(self, size: int) -> Storage:
        """Bare bytes."""
        storage = Storage()
        storage.walk = self
        storage.freed = size
        storage.kept = None
        self.live += size
        self.rising = True
        return storage

    def leave(self, size: int) -> Storage:
        """Bytes that stay when more have gone, which `reach` was told of."""
        left = self.allocate(size)
        self.rising = False
        return left

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

    def take_passing(self) -> list[int]:
        """The local maxima so far of a forward pass that saves nothing, which ends here."""
        assert self.passing is not None
        passing, self.passing = [self.live - self.lingering, *self.passing], None
        return passing

    def stays(self, size: int) -> int:
        """Of so many bytes that an operation saves those that stay on the device; the others wait on the host."""
        if not self.learning or (self.offloads and size > STAYING_BYTES * TOKEN):
            return 0
        return size

    def mark(self, above: int = 0) -> None:
        """Something is saved here, with so much above what is live: so far a checkpointed forward runs again."""
        self._saved_at = len(self.peaks), self.live + above, self.rising or above > 0

    def save(self, *ghosts: Ghost | None) -> Saved:
        """Keep inputs for backward; None stands for a weight, which costs nothing but is saved too."""
        holder: Saved = []
        if self.learning:
            for ghost in ghosts:
                if ghost is not None:
                    holder.append(self.kept_of(ghost))
            self._saved_at = len(self.peaks), self.live, self.rising
        return holder

    def kept_of(self, ghost: Ghost) -> Kept | int:
        """What an operation keeps of one that it saves: all of it, or where it waits on the host its bytes."""
        if self.offloads and travels(ghost.elements, ghost.itemsize):
            return ghost.size
        storage = ghost.storage
        kept = storage.kept
        if kept is None:
            storage.kept = kept = Kept()
            kept.walk, kept.size = self, storage.freed
        return kept

    def held(self, ghost: Ghost) -> Saved:
        """What keeps a tensor whatever becomes of its names, but by no operation."""
        return [self.kept_of(ghost)]

    def save_into(self, holder: Saved, *ghosts: Ghost | None) -> Saved:
        """Keep more for the same operation: outputs are saved after they are made."""
        holder += self.save(*ghosts)
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
        return self.made_of(parents, self.new(elements, itemsize), back, saved, trains=trains)

    def made_of(
        self, parents: Sequence[Ghost], output: Ghost, back: Back, saved: Saved | None = None, *, trains: bool = False
    ) -> Ghost:
        """The same of an output that is there already."""
        inputs = [parent.node for parent in parents]
        if self.learning and (trains or any(inputs)):
            output.node = Several(inputs, back, output.size, saved)
            self.tape.append(output.node)
        return output

    def single(self, x: Ghost, elements: int, itemsize: int, gives: int, saved: Saved | None = None) -> Ghost:
        """The output of an operation on `x` whose gradient takes `gives` bytes."""
        output = self.new(elements, itemsize)
        if x.node is not None:
            self._tape_single(x.node, output, gives, saved)
        return output

    def view(self, x: Ghost, elements: int, gives: int, saved: Saved | None = None) -> Ghost:
        """The same where it shares the storage of `x`."""
        output = self.tensor(x.storage, elements, x.itemsize, elements * x.itemsize)
        if x.node is not None:
            self._tape_single(x.node, output, gives, saved)
        return output

    def _tape_single(self, before: Node, output: Ghost, gives: int, saved: Saved | None) -> None:
        node = Single()
        node.before = before
        node.gives = gives
        node.size = output.size
        node.gradient = None
        node.joins = False
        node.saved = saved
        output.node = node
        self.tape.append(node)

    def taped(self, output: Ghost, node: Node) -> Ghost:
        """The output of an operation with a node of its own kind."""
        output.node = node
        self.tape.append(node)
        return output

    def checkpoint(self, forward: Callable[[], Ghost]) -> Ghost:
        """Run `forward` as backward will run it again, up to the last that is saved.

        Its maxima, and what it saves, count from the first operation of backward that needs it. What the first pass
        holds, which keeps nothing, is what `take_passing` says.
        """
        earlier, self.peaks, before, lingering = self.peaks, [], self.live, self.lingering
        output = forward()
        count, live, rising = self._saved_at
        maxima, held = self.peaks[:count], self.live - output.size
        if rising:
            maxima.append(live)
        # Of these only what is more than all that is saved at the end, where backward goes on.
        self._recompute = [peak - before for peak in beyond(held, maxima)], held - before
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
        tape = self.tape
        while tape:
            current = tape.pop()
            if current.gradient is not None:
                current.go_back(self)

    def come_to(self, saved: Saved) -> list[Storage] | None:
        """Backward has come to something that was saved: what of it is on the host is brought back."""
        if self._recompute is not None:
            self.bring_back()
        if self.offloads:
            return [self.allocate(size) for size in saved if isinstance(size, int)]
        return None

    def exchange(self, incoming: Storage, size: int, *, noted: bool = True) -> Storage:
        """Other bytes made of these, which go then unless somebody else refers to them. Not `noted`: more was there."""
        if getrefcount(incoming) > 3:  # its names here and in the caller, and the argument of the question
            return self.allocate(size)
        live = self.live + size
        if noted:
            self.peaks.append(live)
        self.rising = False
        self.live = live - incoming.freed
        incoming.freed = size
        return incoming

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
            target.gradient = self.allocate(target.size)


def travels(elements: int, itemsize: int) -> bool:
    """Whether a tensor goes to the host: no whole numbers, nothing small, no mask, which is saved repeated for every
    head or row."""
    return itemsize < 8 and elements * itemsize > STAYING_BYTES * TOKEN and elements != SQUARE
