"""Assigns the sequences of a step to ranks, or to groups of ranks: a pure function of the sequences' lengths.

Which sequences a step has does not depend on the number of ranks (`engine.data.order`), so a run resumes with the same
samples on fewer or more ranks. Try: `assign_samples([9, 1, 5, 5], 2)`
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def assign_samples(lengths: Sequence[int] | NDArray[np.int32], ranks: int) -> list[list[int]]:
    """Return for each rank the positions in `lengths` of its sequences, ascending; each position goes to exactly one
    rank.

    Sequences are assigned longest first, each to the rank with the fewest tokens so far (Graham 1969, list scheduling:
    at worst a third above the best assignment). Equal loads go to the rank with fewer sequences, then to the lower
    rank.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    waiting = [(0, 0, rank) for rank in range(ranks)]
    for position in sorted(range(len(lengths)), key=lambda index: (-int(lengths[index]), index)):
        tokens, count, rank = heapq.heappop(waiting)
        hands[rank].append(position)
        heapq.heappush(waiting, (tokens + int(lengths[position]), count + 1, rank))
    return [sorted(hand) for hand in hands]
