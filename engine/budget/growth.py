"""Bytes as functions of a micro-batch's shape: how much there is per token, per row, per chunk of the loss.

A `Walk` counts in packed sizes; here they become `Growth`, which is added up and evaluated.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from engine.budget.packed import highest, settled, unpack


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


def shape_of(rows: int, length: int, chunk_tokens: int) -> Shape:
    """The shape of `rows` sequences padded to `length` tokens."""
    tokens = rows * length
    chunk = min(tokens, chunk_tokens)
    return Shape(1, tokens, tokens * length, chunk, int(tokens > chunk), length, length * length, rows)


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
        _, tokens, squares, first, more, positions, pairs, rows = shape
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


class PhaseCost(NamedTuple):
    """What is live in one phase above the static bytes: known parts, and the alternatives for the rest."""

    gradients: int
    saved: Growth
    """Activations kept for backward by the layers."""
    working: tuple[Growth, ...]
    """What else is live, at each local maximum that some shape may be decided by."""
    label: str
    """The component the working bytes are shown as."""
    inputs: Growth
    """The batch, its positions and masks."""
    buffers: int = 0
    """What several devices communicate through."""
    closer: Callable[[], tuple[Growth, ...]] | None = None
    """Where `working` is a bound, as a rule far from deciding: how to find what it is."""

    def exact(self) -> PhaseCost:
        """The same without a bound."""
        return self if self.closer is None else self._replace(working=self.closer(), closer=None)

    def at(self, shape: Shape) -> int:
        """Bytes at a shape."""
        around = self.gradients + self.buffers + self.saved.at(shape) + self.inputs.at(shape)
        return around + max([working.at(shape) for working in self.working])


def dearest(costs: Sequence[PhaseCost], shape: Shape) -> tuple[int, PhaseCost]:
    """The one of several that decides at a shape, and its bytes there."""
    while True:
        sizes = [cost.at(shape) for cost in costs]
        top = costs[sizes.index(max(sizes))]
        if top.closer is None:
            return max(sizes), top
        costs = [top.exact(), *(cost for cost in costs if cost is not top)]


def growth(size: int, accumulating: bool = False) -> Growth:
    """A packed size of a walk; see `ghost.settled`."""
    return Growth(*unpack(settled(size, accumulating)))


@lru_cache(maxsize=256)
def growths(sizes: tuple[int, ...], accumulating: bool = False) -> tuple[Growth, ...]:
    """Of several, those that are the largest for some shape. Layers of several kinds often come to the same."""
    return tuple(Growth(*unpack(size)) for size in highest({settled(size, accumulating) for size in sizes}))


def prune(candidates: Iterable[Growth]) -> tuple[Growth, ...]:
    """Only those that are the largest for some shape: none that another exceeds in every coefficient."""
    kept: list[Growth] = []
    for candidate in sorted(set(candidates), key=lambda item: item[1:] + item[:1], reverse=True):
        if not any(all(map(ge, other, candidate)) for other in kept):
            kept.append(candidate)
    return tuple(kept)
