"""The tape of a walk: storages that are counted as long as somebody refers to them, and nodes that know their way back.

Who makes them is `engine.budget.ghost`; kinds of their own stand beside the operations they belong to.

Try: `python -m pytest tests/budget/test_rotary_walk.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.budget.ghost import Walk

Back = Callable[["Storage"], list["Storage | None"]]
"""From the gradient of a node's output to a new list of the gradients of its inputs."""
PASSED = -1
"""Instead of the bytes of a gradient: it is handed on as it is."""


class Storage:
    """Bytes that are counted from creation (`Walk.allocate`) until nobody refers to them any more.

    A walk makes hundreds of these and of what follows. So they have no constructor, which would take longer than all
    that is done with most of them.
    """

    __slots__ = ("freed", "kept", "walk")

    walk: Walk
    freed: int
    """What its end takes from the live bytes."""
    kept: Kept | None

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

    walk: Walk
    size: int

    def __del__(self) -> None:
        walk = self.walk
        if walk.rising:
            walk.reach(0)
        walk.live -= self.size
        walk.lingering -= self.size


Saved = list[Kept | Storage | int]
"""What an operation keeps for backward: tensors, the bytes of those that wait on the host, and of several outputs the
gradients that are there before the others."""

class Node:
    """An operation on the tape, or several that are gone through at once; what kind of one says how it goes back."""

    __slots__ = ("gradient", "joins", "saved", "size")

    size: int
    """Packed bytes of the gradient of its output."""
    gradient: Storage | None
    """What has come of it so far, until its turn."""
    joins: bool
    """Has several outputs: their gradients wait side by side instead of being added up."""
    saved: Saved | None

    def take(self) -> Storage:
        """The gradient that has come, which is the caller's from now on."""
        assert self.gradient is not None
        gradient, self.gradient = self.gradient, None
        return gradient

    def go_back(self, walk: Walk) -> None:
        """Its backward pass: hand on what the nodes of its inputs are due, and drop what was saved."""
        raise NotImplementedError


class Single(Node):
    """An operation with one input, of whose gradient only the bytes matter: most are. Made by `Walk.single`."""

    __slots__ = ("before", "gives")

    before: Node
    gives: int
    """Bytes of the gradient of its input, or PASSED."""

    def go_back(self, walk: Walk) -> None:
        """Make that gradient from the one that has come."""
        made, self.gradient = self.gradient, None
        assert made is not None
        saved, target, gives = self.saved, self.before, self.gives
        fetched = walk.come_to(saved) if saved is not None else None
        if gives != PASSED:
            if getrefcount(made) > 2:  # its name here and the argument of the question: somebody else has it, too
                made = walk.allocate(gives)
            else:  # as if another one were made before it goes
                live = walk.live + gives
                walk.peaks.append(live)
                walk.rising = False
                walk.live = live - made.freed
                made.freed = gives
        if saved:
            del fetched
            saved.clear()
        if target.gradient is None and not target.joins:
            target.gradient = made
        else:
            walk.hand_on(target, made)


class Operation(Node):
    """One of a kind of its own, or by itself one that backward only comes to: what goes in."""

    __slots__ = ()

    def __init__(self, size: int, saved: Saved | None = None) -> None:
        self.size = size
        self.gradient = None
        self.joins = False
        self.saved = saved


class Several(Operation):
    """An operation whose gradients are made in an order of their own."""

    __slots__ = ("back", "inputs")

    def __init__(self, inputs: Sequence[Node | None], back: Back, size: int, saved: Saved | None) -> None:
        super().__init__(size, saved)
        self.inputs = inputs
        self.back = back

    def go_back(self, walk: Walk) -> None:
        """Make the gradients of its inputs, and hand them on from the last to the first."""
        fetched = walk.come_to(self.saved) if self.saved is not None else None
        outgoing = self.back(self.take())
        del fetched
        if self.saved:
            self.saved.clear()
        while outgoing:
            walk.hand_on(self.inputs[len(outgoing) - 1], outgoing.pop())
