"""Bytes as a polynomial of a micro-batch's shape: a fixed number, a number per token, per row × length², and so on. A
memory trace adds up such polynomials; a prediction evaluates them at many shapes."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add, ge, mul, sub
from typing import NamedTuple

ATTENTION_BLOCK = 128
"""Flash attention's backward pass works on lengths rounded up to this many tokens (`seqlen_q_rounded` in flash-attn's
csrc/flash_attn/flash_api.cpp, which torch contains)."""


class Shape(NamedTuple):
    """The value of each unit of a polynomial (`BYTE`, `TOKEN`, …) for one micro-batch, in the order of coefficients."""

    one: int
    tokens: int
    """rows × length, padding included."""
    squares: int
    """rows × length²."""
    chunk: int
    """Targets of the first chunk of the loss."""
    several: int
    """1 if the loss is computed in more than one chunk, else 0."""
    positions: int
    """Tokens of one row."""
    pairs: int
    """The square of `positions`."""
    patches: int
    """Patches of all images."""
    targets: int
    """Target tokens: those that count in the loss."""
    blocks: int
    """rows × length, each length rounded up to whole ATTENTION_BLOCKs."""


def shape_of(rows: int, length: int, chunk_tokens: int, targets: int | None = None, patches: int = 0) -> Shape:
    """`rows` sequences padded to `length` tokens, with the loss of `chunk_tokens` at a time. `targets` None: all
    tokens. `patches`: those of all images of the sequences."""
    tokens = rows * length
    targets = tokens if targets is None else targets
    chunk = min(targets, chunk_tokens)
    blocks = rows * -(-length // ATTENTION_BLOCK) * ATTENTION_BLOCK
    several, pairs = int(targets > chunk), length * length
    return Shape(1, tokens, tokens * length, chunk, several, length, pairs, patches, targets, blocks)


class BytesPolynomial:
    """A number of bytes, or of elements, for each unit of a `Shape`; immutable."""

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

    def of_piece(self, pieces: int) -> BytesPolynomial:
        """The bytes for the longest of so many pieces of each sequence: what is fixed stays as it is."""
        fixed, *others, trained = self.coefficients
        return BytesPolynomial((fixed, *(-(-each // pieces) for each in others), trained))

    def after_first(self) -> BytesPolynomial:
        """Without `TRAINED_GRADS`: the bytes of a pass whose gradients are added to existing ones."""
        return BytesPolynomial((*self.coefficients[:-1], 0))

    def trained_grads(self) -> BytesPolynomial:
        """`TRAINED_GRADS` alone."""
        return self.coefficients[-1] * TRAINED_GRADS

    @property
    def fixed(self) -> int:
        return self.coefficients[0]

    @property
    def per_token(self) -> int:
        return self.coefficients[1]

    @property
    def per_square(self) -> int:
        return self.coefficients[2]

    @property
    def per_position(self) -> int:
        return self.coefficients[5]

    @property
    def per_block_token(self) -> int:
        return self.coefficients[9]

    def at(self, shape: Shape) -> int:
        """The value in bytes or elements. Call `settled` first: `TRAINED_GRADS` would not be counted."""
        return sum(map(mul, self.coefficients, shape))

    def settled(self, accumulating: bool) -> BytesPolynomial:
        """Replace `TRAINED_GRADS` by as many fixed bytes for the first micro-batch of a step, by none if
        `accumulating`: with gradient accumulation, new gradients are added to existing ones and freed."""
        fixed, *others, trained = self.coefficients
        return BytesPolynomial((fixed if accumulating else fixed + trained, *others, 0))


def _unit(place: int) -> BytesPolynomial:
    return BytesPolynomial(tuple([int(place == each) for each in range(11)]))


BYTE = _unit(0)
"""1 for every shape."""
TOKEN = _unit(1)
"""One per token of the padded micro-batch."""
SQUARE = _unit(2)
"""One per row × length²."""
CHUNK = _unit(3)
"""One per target of the loss's first chunk."""
SEVERAL = _unit(4)
"""One if the loss is computed in more than one chunk."""
POSITION = _unit(5)
"""One per position of one row."""
PAIR = _unit(6)
"""One per pair of positions of one row: length²."""
PATCH = _unit(7)
"""One per patch of the images."""
TARGET = _unit(8)
"""One per target token."""
BLOCK_TOKEN = _unit(9)
"""One per token, each length rounded up to whole ATTENTION_BLOCKs: the scratch of flash attention's backward pass."""
TRAINED_GRADS = _unit(10)
"""One byte of a weight's finished gradient: stays allocated after the first micro-batch of a step, and is freed in
later ones once it is added to the existing gradient (`BytesPolynomial.settled`)."""
NO_BYTES = 0 * BYTE


def highest(sizes: Iterable[BytesPolynomial]) -> tuple[BytesPolynomial, ...]:
    """What may be the largest for some shape: drops sizes that another one equals or exceeds in every coefficient."""
    kept: list[tuple[int, ...]] = []
    # Sorted so that a size comes after all that exceed it. Most often the latest in `kept` does, so try that first.
    for size in sorted({size.coefficients[::-1] for size in sizes}, reverse=True):
        if not any(all(map(ge, other, size)) for other in reversed(kept)):
            kept.append(size)
    return tuple([BytesPolynomial(size[::-1]) for size in kept])


def maxima(sizes: Iterable[BytesPolynomial], accumulating: bool = False) -> tuple[BytesPolynomial, ...]:
    return highest([size.settled(accumulating) for size in sizes])


def highest_value(sizes: Iterable[BytesPolynomial], shape: Shape) -> int:
    """0 if there are none."""
    return max([size.at(shape) for size in sizes], default=0)
