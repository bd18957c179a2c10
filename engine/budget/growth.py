"""Bytes as functions of a micro-batch's shape: how much there is per token, per row, per chunk of the loss.

A `Walk` counts in packed sizes, which are added up as they are; to be evaluated at many shapes they become `Growth`.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.budget.packed import (
    CHUNK,
    LEFT,
    ONE,
    PAIR,
    POSITION,
    ROW,
    SEVERAL,
    SQUARE,
    TOKEN,
    beyond,
    highest,
    settled,
)


class Shape(NamedTuple):
    """What sizes are functions of; the first is always 1."""

    one: int
    tokens: int
    """rows × length, padding included."""
    squares: int
    """rows × length²."""
    chunk: int
    """Tokens of the first chunk of the loss."""
    several: int
    """1 where the loss takes more than one chunk, else 0."""
    positions: int
    """Tokens of one row."""
    pairs: int
    """Their square."""
    rows: int
    known: dict[int, int]
    """What sizes came to here that many phases have in common."""


def shape_of(rows: int, length: int, chunk_tokens: int) -> Shape:
    """The shape of `rows` sequences padded to `length` tokens."""
    tokens = rows * length
    chunk = min(tokens, chunk_tokens)
    return Shape(1, tokens, tokens * length, chunk, int(tokens > chunk), length, length * length, rows, {})


class Growth(NamedTuple):
    """Bytes per unit of each part of a `Shape`."""

    fixed: int = 0
    token: int = 0
    square: int = 0
    chunk: int = 0
    several: int = 0
    position: int = 0
    pair: int = 0
    row: int = 0

    def at(self, shape: Shape) -> int:
        """Bytes at a shape. Written out: this is where a plan spends its time, and a loop takes thrice as long."""
        fixed, token, square, chunk, several, position, pair, row = self
        _, tokens, squares, first, more, positions, pairs, rows, _known = shape
        return (
            fixed
            + token * tokens
            + square * squares
            + chunk * first
            + several * more
            + position * positions
            + pair * pairs
            + row * rows
        )

    def plus(self, other: Growth, times: int = 1) -> Growth:
        """This and `times` another. Written out for the same reason."""
        fixed, token, square, chunk, several, position, pair, row = other
        return Growth(
            self.fixed + times * fixed,
            self.token + times * token,
            self.square + times * square,
            self.chunk + times * chunk,
            self.several + times * several,
            self.position + times * position,
            self.pair + times * pair,
            self.row + times * row,
        )


@dataclass(slots=True, eq=False)
class PhaseCost:
    """What is live in one phase above the static bytes, packed: known parts, and the alternatives for the rest."""

    gradients: int
    saved: int
    """Activations kept for backward by the layers."""
    working: tuple[int, ...]
    """What else is live, at each local maximum that some shape may be decided by."""
    label: str
    """The component the working bytes are shown as."""
    inputs: int
    """The batch, its positions and masks."""
    buffers: int = 0
    """What several devices communicate through."""
    closer: Callable[[], tuple[int, ...]] | None = None
    """Where `working` is a bound, as a rule far from deciding: how to find what it is."""

    def exact(self) -> PhaseCost:
        """The same without a bound."""
        if self.closer is None:
            return self
        return PhaseCost(self.gradients, self.saved, self.closer(), self.label, self.inputs, self.buffers)

    def sizes(self) -> list[int]:
        """All that is live, for each alternative."""
        around = self.gradients + self.saved + self.inputs + self.buffers
        return [around + working for working in self.working]

    def at(self, shape: Shape) -> int:
        """Bytes at a shape."""
        return self.around(shape) + highest_value(self.working, shape)

    def around(self, shape: Shape) -> int:
        """All but the working bytes."""
        return self.gradients + value(self.saved, shape) + value(self.inputs, shape) + self.buffers


def dearest(costs: Sequence[PhaseCost], shape: Shape) -> tuple[int, PhaseCost]:
    """The one of several that decides at a shape, and its bytes there."""
    if len(costs) == 1:
        only = costs[0].exact()
        return only.at(shape), only
    costs, sizes = list(costs), []
    working, most = None, 0
    for cost in costs:
        if cost.working is not working:  # kinds that are walked alike have theirs in common
            working = cost.working
            most = highest_value(working, shape)
        sizes.append(cost.around(shape) + most)
    while True:
        size = max(sizes)
        place = sizes.index(size)
        top = costs[place]
        if top.closer is None:
            return size, top
        costs[place] = top.exact()
        sizes[place] = costs[place].at(shape)


def deciding(costs: Sequence[PhaseCost]) -> tuple[Growth, ...]:
    """Of several phases every live set that decides some shape. A bound is looked behind where it would."""
    known = highest([size for cost in costs if cost.closer is None for size in cost.sizes()])
    found = list(known)
    for cost in costs:
        if cost.closer is not None:
            above = cost.sizes()
            for size in known:
                above = beyond(size, above)
            found += cost.exact().sizes() if above else []
    return growths(found)


def most_rows(size: int, room_bytes: int, length: int, chunk_tokens: int) -> int:
    """The most rows of `length` tokens at which a live set is within so many bytes; none where that is not positive.
    It is settled, and grows with tokens as every batch does."""
    parts = growth(size)
    room_bytes -= parts.fixed + parts.position * length + parts.pair * length**2
    each = (parts.token + parts.square * length) * length + parts.row
    most = (room_bytes - parts.several - parts.chunk * chunk_tokens) // each
    whole = chunk_tokens // length  # with no more than these the loss takes one chunk
    return most if most > whole else min(whole, room_bytes // (each + parts.chunk * length))


def value(size: int, shape: Shape) -> int:
    """Bytes of a settled size at a shape, for once."""
    if size < LEFT:
        return (size & ONE) + (size >> 56) * shape[1]
    if size < CHUNK:
        return (size & ONE) + (size >> 56 & ONE) * shape[1] + (size >> 168) * shape[2]
    found = shape.known.get(size)
    if found is None:
        _, tokens, squares, first, more, positions, pairs, rows, known = shape
        found = (size & ONE) + (size >> 56 & ONE) * tokens
        rest = size >> 168
        found += (rest & ONE) * squares + (rest >> 56 & ONE) * first + (rest >> 112 & ONE) * more
        rest >>= 168
        if rest:
            found += (rest & ONE) * positions + (rest >> 56 & ONE) * pairs + (rest >> 112) * rows
        known[size] = found
    return found


def highest_value(sizes: Iterable[int], shape: Shape) -> int:
    """The most bytes of several settled sizes at a shape; most are a + b · tokens, in eager attention + c · squares.

    These are written out as in `value`, for a call takes longer.
    """
    tokens, squares, most = shape.tokens, shape.squares, 0
    for size in sizes:
        if size < LEFT:
            found = (size & ONE) + (size >> 56) * tokens
        elif size < CHUNK:
            found = (size & ONE) + (size >> 56 & ONE) * tokens + (size >> 168) * squares
        else:
            found = value(size, shape)
        if found > most:
            most = found
    return most


def growth(size: int) -> Growth:
    """A settled size, to be evaluated often."""
    return Growth(
        size & ONE, size >> 56 & ONE, size >> 168 & ONE, size >> 224 & ONE, size >> 280 & ONE, size >> 336 & ONE,
        size >> 392 & ONE, size >> 448,
    )  # fmt: skip


def packed(growth: Growth) -> int:
    """The other way round, to be added up."""
    return sum([size * unit for size, unit in zip(growth, UNITS, strict=True)])


UNITS = (1, TOKEN, SQUARE, CHUNK, SEVERAL, POSITION, PAIR, ROW)
"""In the order of `Shape`."""


def maxima(sizes: Iterable[int], accumulating: bool = False) -> tuple[int, ...]:
    """Of several, those that are the largest for some shape, settled."""
    return tuple(highest(settled(sizes, accumulating)))


def growths(sizes: Iterable[int]) -> tuple[Growth, ...]:
    """Of several settled sizes those that are the largest for some shape, to be evaluated often."""
    return tuple([growth(size) for size in highest(sizes)])


def prune(candidates: Iterable[Growth]) -> tuple[Growth, ...]:
    """Only those that are the largest for some shape."""
    return growths({packed(candidate) for candidate in candidates})
