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
from collections.abc import Callable, Sequence

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

Back = Callable[["Storage"], Sequence["Storage | None"]]
"""From the gradient of a node's output to the gradients of its inputs."""


def unpack(size: int, accumulating: bool) -> tuple[int, int, int, int, int, int]:
    """A packed size as (fixed, per token, per row and length squared, per token of a chunk, if several, position).

    `accumulating` where gradients of an earlier micro-batch are held already: new ones are added to them and dropped.
    """
    mask = TOKEN - 1
    fixed = (size & mask) + (0 if accumulating else size >> 336)
    return fixed, size >> 56 & mask, size >> 112 & mask, size >> 168 & mask, size >> 224 & mask, size >> 280 & mask


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
            walk.peaks.add(walk.live)
            walk.rising = False
        walk.live -= self.freed


class Node:
    """One operation on the tape: where its gradients go, how they are made, and what it saved for that."""

    __slots__ = ("back", "inputs", "joins", "saved", "saves", "size")

    def __init__(self, inputs: Sequence[Node | None], back: Back, size: int, saved: list[Storage] | None) -> None:
        self.inputs = inputs
        self.back = back
        self.size = size
        self.joins = False
        """Has several outputs: their gradients wait side by side instead of being added up."""
        self.saves = saved is not None
        self.saved = saved if saved is not None else []


class Ghost:
    """A tensor: elements (packed), bytes per element, its storage, and its node when it needs a gradient."""

    __slots__ = ("elements", "itemsize", "node", "storage")

    def __init__(self, storage: Storage, elements: int, itemsize: int, node: Node | None = None) -> None:
        self.storage = storage
        self.elements = elements
        self.itemsize = itemsize
        self.node = node

    @property
    def size(self) -> int:
        """Packed bytes."""
        return self.elements * self.itemsize


class _StopRecomputing(Exception):
    """Everything backward needs has been saved again: checkpointing leaves the forward here."""


class Walk:
    """Live bytes, their local maxima, and the tape."""

    def __init__(self, *, metered: bool, learning: bool = True) -> None:
        self.live = 0
        self.rising = False
        self.peaks: set[int] = set()
        self.tape: list[Node] = []
        self.metered = metered
        """On the metered device: under a dispatch mode torch adds gradients out of place, and softmax on the host
        converts its input to another dtype before it begins."""
        self.learning = learning
        """False under `torch.no_grad`: nothing is saved, there is no tape."""
        self.casts: list[Storage] = []
        """Weights that autocast has cast: kept until the forward pass, loss included, is over."""
        self._recompute: Callable[[], object] | None = None
        self._holders: list[list[Storage]] = []
        self._forgetting = False
        self._refilling = -1
        self._saves = 0
        self._saves_left = 0

    def take_peaks(self) -> set[int]:
        """The local maxima since the last call, the present one included."""
        peaks = self.peaks | {self.live}
        self.peaks = set()
        self.rising = False
        return peaks

    def new(self, elements: int, itemsize: int) -> Ghost:
        """A tensor that needs no gradient."""
        return Ghost(Storage(self, elements * itemsize), elements, itemsize)

    def allocate(self, size: int) -> Storage:
        """Bare bytes."""
        return Storage(self, size)

    def save(self, *ghosts: Ghost | None) -> list[Storage]:
        """Keep inputs for backward; None stands for a weight, which costs nothing but is saved too."""
        if self._refilling >= 0:
            holder = self._holders[self._refilling]
            self._refilling += 1
        else:
            holder = []
            self._holders.append(holder)
        return self.save_into(holder, *ghosts)

    def save_into(self, holder: list[Storage], *ghosts: Ghost | None) -> list[Storage]:
        """Keep more for the same operation: outputs are saved after they are made."""
        if self.learning and not self._forgetting:
            holder.extend(ghost.storage for ghost in ghosts if ghost is not None)
        if self._refilling >= 0:
            self._saves_left -= len(ghosts)
            if self._saves_left <= 0:
                raise _StopRecomputing
        else:
            self._saves += len(ghosts)
        return holder

    def result(
        self,
        elements: int,
        itemsize: int,
        parents: Sequence[Ghost],
        back: Back,
        saved: list[Storage] | None = None,
        *,
        trains: bool = False,
    ) -> Ghost:
        """The output of an operation; `trains` says that a trained weight takes part."""
        size = elements * itemsize
        output = Ghost(Storage(self, size), elements, itemsize)
        if self.learning:
            nodes = [parent.node for parent in parents]
            if trains or any(nodes):
                output.node = Node(nodes, back, size, saved)
                if self._refilling < 0:
                    self.tape.append(output.node)
        return output

    def checkpoint(self, forward: Callable[[], Ghost]) -> Ghost:
        """Run `forward` without keeping what it saves; the first operation of backward that needs it runs it again."""
        self._forgetting, self._saves, self._holders = True, 0, []
        output = forward()
        self._forgetting, self._recompute = False, forward
        return output

    def _run_again(self) -> None:
        """Recompute the checkpointed forward up to its last save, filling in what backward needs."""
        forward, self._recompute = self._recompute, None
        assert forward is not None
        self._refilling, self._saves_left = 0, self._saves
        try:
            forward()
        except _StopRecomputing:
            pass
        self._refilling = -1

    def leaf_gradient(self, size: int) -> None:
        """The gradient of a trained weight: kept the first time, added to the one that is there and dropped later.

        One walk is for both: at its end it becomes as many bytes in another unit.
        """
        self.adopt_gradient(Storage(self, size))

    def adopt_gradient(self, storage: Storage) -> None:
        """The same for one that was made earlier."""
        storage.freed -= storage.freed * LEFT

    def backward(self, node: Node, gradient: Storage) -> None:
        """Run the tape from its end, as the autograd engine does: latest node first."""
        gradients = {node: gradient}
        del gradient
        while self.tape:
            current = self.tape.pop()
            incoming = gradients.pop(current, None)
            if incoming is None:
                continue
            if current.saves and self._recompute is not None:
                self._run_again()
            outgoing = list(current.back(incoming))
            del incoming
            current.saved.clear()
            while outgoing:
                self._hand_on(gradients, current.inputs[len(outgoing) - 1], outgoing)

    def _hand_on(self, gradients: dict[Node, Storage], target: Node | None, outgoing: list[Storage | None]) -> None:
        """Give the last of `outgoing` to its node, adding it to what is there."""
        gradient = outgoing.pop()
        if gradient is None or target is None:
            return
        if target.joins:
            target.saved.append(gradient)
            gradients[target] = gradient
        elif target not in gradients:
            gradients[target] = gradient
        elif self.metered or sys.getrefcount(gradients[target]) != 2:
            gradients[target] = Storage(self, target.size)
