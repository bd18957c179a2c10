"""Bytes as a function of a micro-batch's shape: so many fixed, per token, per row and length squared, and so on.

A memory trace counts in these polynomials; a prediction evaluates them at many shapes. Nothing here knows of models or
tensors.

Try: `python -m pytest tests/budget/test_polynomial.py`
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add, ge, mul, sub
from typing import NamedTuple


class Shape(NamedTuple):
    """What one of each unit of a polynomial amounts to in a micro-batch, in the units' order."""

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
    """The shape of `rows` sequences padded to `length` tokens, whose loss takes `chunk_tokens` at a time."""
    tokens = rows * length
    chunk = min(tokens, chunk_tokens)
    return Shape(1, tokens, tokens * length, chunk, int(tokens > chunk), length, length * length, rows)


class BytesPolynomial:
    """A number of bytes, or of elements, per unit of a shape. Never changed."""

    __slots__ = ("coefficients",)

    def __init__(self, coefficients: tuple[int, ...]) -> None:
        self.coefficients = coefficients

    def __add__(self, other: BytesPolynomial) -> BytesPolynomial:
        return BytesPolynomial(tuple(map(add, self.coefficients, other.coefficients)))

    def __sub__(self, other: BytesPolynomial) -> BytesPolynomial:
        return BytesPolynomial(tuple(map(sub, self.coefficients, other.coefficients)))

    def __mul__(self, times: int) -> BytesPolynomial:
        return BytesPolynomial(tuple([times * each for each in self.coefficients]))

    __rmul__ = __mul__

    def __floordiv__(self, parts: int) -> BytesPolynomial:
        return BytesPolynomial(tuple([each // parts for each in self.coefficients]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BytesPolynomial) and self.coefficients == other.coefficients

    def __hash__(self) -> int:
        return hash(self.coefficients)

    def __bool__(self) -> bool:
        return any(self.coefficients)

    def __repr__(self) -> str:
        return f"BytesPolynomial{self.coefficients}"

    @property
    def fixed(self) -> int:
        """What does not depend on the shape."""
        return self.coefficients[0]

    @property
    def per_token(self) -> int:
        """What there is for each token."""
        return self.coefficients[1]

    @property
    def per_square(self) -> int:
        """What there is for each row and length squared."""
        return self.coefficients[2]

    @property
    def per_position(self) -> int:
        """What there is for each position of one row."""
        return self.coefficients[5]

    def at(self, shape: Shape) -> int:
        """Evaluate at a shape; trained gradients must be settled before."""
        return sum(map(mul, self.coefficients, shape))

    def settled(self, accumulating: bool) -> BytesPolynomial:
        """Turn trained gradients into fixed bytes: none where an earlier micro-batch's gradients are held already, to
        which new ones are added and dropped."""
        fixed, *others, trained = self.coefficients
        return BytesPolynomial((fixed if accumulating else fixed + trained, *others, 0))


def _unit(place: int) -> BytesPolynomial:
    return BytesPolynomial(tuple([int(place == each) for each in range(9)]))


BYTE = _unit(0)
"""A fixed one."""
TOKEN = _unit(1)
"""One per token of the padded micro-batch."""
SQUARE = _unit(2)
"""One per row and length squared."""
CHUNK = _unit(3)
"""One per token of the loss's first chunk."""
SEVERAL = _unit(4)
"""One where the loss takes more than one chunk."""
POSITION = _unit(5)
"""One per position of one row."""
PAIR = _unit(6)
"""One per square of one row's positions."""
ROW = _unit(7)
"""One per row."""
TRAINED_GRADS = _unit(8)
"""One of a finished gradient of a weight: it stays from then on, unless an earlier micro-batch of the step has left a
gradient to add it to (`BytesPolynomial.settled`)."""
NO_BYTES = 0 * BYTE


def highest(sizes: Iterable[BytesPolynomial]) -> tuple[BytesPolynomial, ...]:
    """Keep only sizes that may be the largest for some shape: none that another one exceeds in every coefficient."""
    kept: list[tuple[int, ...]] = []
    # In this order a size comes after all that exceed it; the one kept last is the likeliest to do so.
    for size in sorted({size.coefficients[::-1] for size in sizes}, reverse=True):
        if not any(all(map(ge, other, size)) for other in reversed(kept)):
            kept.append(size)
    return tuple([BytesPolynomial(size[::-1]) for size in kept])


def maxima(sizes: Iterable[BytesPolynomial], accumulating: bool = False) -> tuple[BytesPolynomial, ...]:
    """The highest of several sizes, with trained gradients settled."""
    return highest([size.settled(accumulating) for size in sizes])


def highest_value(sizes: Iterable[BytesPolynomial], shape: Shape) -> int:
    """The most bytes of several sizes at a shape; 0 of none."""
    return max([size.at(shape) for size in sizes], default=0)
