"""Sizes as functions of a micro-batch, a + b · tokens + c · rows · length² and so on, packed into one integer.

So adding two is one operation: the units are powers of two far above any coefficient. Walks count in them
(`engine.budget.ghost`); what they come to at a shape is `engine.budget.growth`.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from collections.abc import Iterable

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
