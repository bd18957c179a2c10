"""One optimizer step's sequences cut into micro-batches, as a pure function of lengths, predicted cost and budget.

Sorted by length, cut where that wastes least, never above the budget, dearest first: when memory is short, it shows in
the first micro-batch and costs one. Nothing here knows torch or the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Cost = Callable[[int, int], int]
"""Predicted bytes above the static level of a micro-batch of (rows, padded length)."""

LAUNCH_TOKENS = 256
"""What one more micro-batch costs, in tokens of work. On a GPU a pass over few tokens is bound by reading the weights,
about as long as computing 300 tokens (H100 datasheet: 989 TFLOP/s over 3.35 TB/s); on a CPU Python's overhead per
micro-batch of a small model comes to a few hundred tokens as well."""


@dataclass(frozen=True)
class MicroBatch:
    """Positions into the step's sequences, the padded length, and the predicted bytes above the static level."""

    members: tuple[int, ...]
    length: int
    cost_bytes: int

    @property
    def rows(self) -> int:
        """Sequences in it."""
        return len(self.members)


STAND_IN = MicroBatch((), 0, 0)
"""Takes the place of a micro-batch on a rank that has fewer of them than others."""


def plan_micro_batches(lengths: Sequence[int] | NDArray[np.int32], cost: Cost, budget_bytes: int) -> list[MicroBatch]:
    """Cut sequences of `lengths` tokens into micro-batches that cost at most `budget_bytes` each, dearest first.

    Sequences are never reordered in the data, only here; a sequence that alone exceeds the budget stands alone. Among
    all cuts of the sorted sequences the one with the least padded work plus LAUNCH_TOKENS a micro-batch is taken.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-int(lengths[position]), position))
    sorted_lengths = [int(lengths[position]) for position in order]
    groups = [
        MicroBatch(tuple(order[start:end]), sorted_lengths[start], cost(end - start, sorted_lengths[start]))
        for start, end in _cheapest_cuts(sorted_lengths, cost, budget_bytes)
    ]
    return sorted(groups, key=lambda group: -group.cost_bytes)


def rows_within(cost: Cost, length: int, budget_bytes: int, most: int) -> int:
    """The most rows of `length` tokens, from 1 to `most`, that cost at most `budget_bytes` (1 where none does)."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle, length) <= budget_bytes else (low, middle - 1)
    return low


def _cheapest_cuts(lengths: list[int], cost: Cost, budget_bytes: int) -> list[tuple[int, int]]:
    """Ranges [start, end) over descending `lengths` with the least total work (shortest path over cut points)."""
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
        offered = work[start] + LAUNCH_TOKENS + (ends - start) * lengths[start]
        better = offered < work[ends]
        work[ends[better]] = offered[better]
        came_from[ends[better]] = start
    cuts = []
    end = count
    while end:
        cuts.append((int(came_from[end]), end))
        end = int(came_from[end])
    return cuts[::-1]
