"""Sizes as functions of a micro-batch, a + b · tokens + c · rows · length² and so on, packed into one integer.

So adding two is one operation: the units are powers of two far above any coefficient. What is met seldom comes last:
most sizes are short numbers, which are soon added. Walks count in them (`engine.budget.ghost`); what they come to at a
shape is `engine.budget.growth`.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from collections.abc import Iterable

TOKEN = 1 << 56
"""Per token of the padded micro-batch."""
LEFT = 1 << 112
"""Of finished gradients of weights: there from then on where no earlier micro-batch has left one to add them to."""
SQUARE = 1 << 168
"""Per row and length squared."""
CHUNK = 1 << 224
"""Per token of the loss's first chunk."""
SEVERAL = 1 << 280
"""Once where the loss takes more than one chunk."""
POSITION = 1 << 336
"""Per position of one row."""
PAIR = 1 << 392
"""Per square of one row's positions."""
ROW = 1 << 448
"""Per row."""

WIDTH = 56
"""Bits of each of these numbers; the highest of them is never used."""
PLACES = 9
ONE = TOKEN - 1
"""All bits of the first of them."""
SETTLED = (1 << PLACES * WIDTH) - 1 - ONE * LEFT
"""Those of all but LEFT."""
GUARDS = [sum(1 << (WIDTH * place + WIDTH - 1) for place in range(places)) for places in range(PLACES + 1)]
"""The unused bits of so many of them."""


def settled(sizes: Iterable[int], accumulating: bool) -> list[int]:
    """The same without LEFT: nothing where an earlier micro-batch's gradients are held already, to which new ones are
    added and dropped, else a fixed number of bytes."""
    if accumulating:
        return [size & SETTLED for size in sizes]
    return [(size & SETTLED) + (size >> 112 & ONE) for size in sizes]


def leading(sizes: Iterable[int]) -> int:
    """Of several the one that is the largest for some long sequences; nothing of it is LEFT."""
    return max([size & SETTLED for size in sizes])


def highest(sizes: Iterable[int]) -> list[int]:
    """Only those that are the largest for some shape: none that another exceeds in each of its numbers.

    All numbers are compared by one subtraction: with the guard bits set, one that has to borrow loses its own. Sizes
    come by their leading number, so that only one before can exceed another; as a rule it is the last that was kept.
    """
    rest = sorted(sizes, reverse=True)
    if not rest:
        return rest
    guards = GUARDS[-(-rest[0].bit_length() // WIDTH)]
    last = rest[0] | guards
    kept = [last]
    for size in rest:
        if (last - size) & guards == guards:
            continue
        for guarded in kept:
            if (guarded - size) & guards == guards:
                break
        else:
            last = size | guards
            kept.append(last)
    return [guarded ^ guards for guarded in kept]


def beyond(top: int, sizes: Iterable[int]) -> list[int]:
    """Those of several that another does not exceed in each of its numbers."""
    guards = GUARDS[-(-top.bit_length() // WIDTH)]
    guarded = top | guards
    return [size for size in sizes if size > top or (guarded - size) & guards != guards]
