"""One optimizer step's sequences cut into micro-batches: a pure function of their lengths, a cost and a budget.

Sequences are sorted by length and cut so that padding and the number of micro-batches stay low. No micro-batch of
several sequences costs more than the budget. The most expensive one comes first, so that an OOM happens in the first
micro-batch and no others have to be repeated. Nothing here uses torch or the device.

Try: `pytest tests/batching/test_micro_batches.py`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Cost = Callable[[int, int], int]
"""Micro-batch cost: predicted bytes above the static level of a micro-batch of (rows, padded length)."""

LAUNCH_TOKENS = 256
"""The fixed time of one more micro-batch, in tokens of work. On a GPU a pass over few tokens takes as long as reading
the weights, which is about as long as computing 300 tokens (H100 datasheet: 989 TFLOP/s over 3.35 TB/s); on a CPU
Python's overhead per micro-batch of a small model comes to a few hundred tokens as well."""


@dataclass(frozen=True)
class MicroBatch:
    """Positions of the sequences in the step, their padded length, and the predicted bytes above the static level."""

    members: tuple[int, ...]
    length: int
    cost_bytes: int

    @property
    def rows(self) -> int:
        """Number of sequences in the micro-batch."""
        return len(self.members)


DUMMY_MICRO_BATCH = MicroBatch((), 0, 0)
"""A micro-batch of weight zero, run by a rank that has fewer micro-batches than others, so that collectives match."""


def plan_micro_batches(
    lengths: Sequence[int] | NDArray[np.int32], cost: Cost, budget_bytes: int, floor_tokens: int = 0
) -> list[MicroBatch]:
    """Cut sequences of `lengths` tokens into micro-batches that cost at most `budget_bytes` each, most expensive first.

    Which sequences a step has does not change. A sequence that exceeds the budget by itself becomes a micro-batch of
    one row. Of all cuts of the sorted sequences, the one with the fewest tokens is chosen, counting padding and
    LAUNCH_TOKENS per micro-batch; a micro-batch of fewer than `floor_tokens` counts as that many.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-int(lengths[position]), position))
    sorted_lengths = [int(lengths[position]) for position in order]
    groups = [
        MicroBatch(tuple(order[start:end]), sorted_lengths[start], cost(end - start, sorted_lengths[start]))
        for start, end in _cheapest_cuts(sorted_lengths, cost, budget_bytes, floor_tokens)
    ]
    return sorted(groups, key=lambda group: -group.cost_bytes)


def floor_tokens(tokens: int, seconds: float, shortest_seconds: float) -> int:
    """The number of tokens up to which all passes take the same time, rounded to a power of two so that timing noise
    seldom changes it. It is computed from the `seconds` that a pass over `tokens` tokens takes, and the
    `shortest_seconds` that any pass takes.

    On a GPU a pass over few tokens takes as long as launching its kernels, or reading the weights, whichever is longer.
    """
    worth = min(tokens * shortest_seconds / seconds, tokens) if seconds else 0.0
    return 2 ** round(math.log2(worth)) if worth >= 1 else 0


def rows_within(cost: Cost, length: int, budget_bytes: int, most: int) -> int:
    """The most rows of `length` tokens, from 1 to `most`, that cost at most `budget_bytes` (1 where none does)."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle, length) <= budget_bytes else (low, middle - 1)
    return low


def _cheapest_cuts(lengths: list[int], cost: Cost, budget_bytes: int, floor_tokens: int) -> list[tuple[int, int]]:
    """Cut descending `lengths` into ranges [start, end) with the least total work (a shortest path over cut points)."""
    count = len(lengths)
    work = np.full(count + 1, np.inf)
    work[0] = 0.0
    came_from = np.zeros(count + 1, dtype=np.int64)
    rows, previous = 1, -1
    for start in range(count):
        if lengths[start] != previous:
            previous = lengths[start]
            rows = rows_within(cost, previous, budget_bytes, count)
        ends = np.arange(start + 1, min(count, start + rows) + 1)
        offered = work[start] + LAUNCH_TOKENS + np.maximum(floor_tokens, (ends - start) * lengths[start])
        better = offered < work[ends]
        work[ends[better]] = offered[better]
        came_from[ends[better]] = start
    cuts: list[tuple[int, int]] = []
    end = count
    while end:
        cuts.append((int(came_from[end]), end))
        end = int(came_from[end])
    return cuts[::-1]
