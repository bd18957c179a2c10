"""The micro-batches of gradient accumulation: a step's sequences, sorted by length and cut so that padding and
micro-batches stay few, none of several sequences above the budget. The costliest comes first: its OOM repeats no
other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Cost(Protocol):
    """Predicted bytes above the static level (weights and optimizer state). Never decreases as its arguments grow."""

    def __call__(self, rows: int, length: int, patches: int | None = None, /) -> int:
        """`rows` sequences padded to `length` tokens; `patches` of all images, None: the data's largest image in
        each."""


LAUNCH_TOKENS = 256
"""The fixed time of one more micro-batch, in tokens of work, where it is not measured (`launch_tokens`): on a CPU,
where Python's overhead is a few hundred tokens, in deterministic runs, which must not depend on timings, and where only
one sequence fits a micro-batch."""


@dataclass(frozen=True)
class MicroBatch:
    """Positions of its sequences in the step, padded length in tokens, and predicted bytes above the static level."""

    members: tuple[int, ...]
    length: int
    cost_bytes: int

    @property
    def rows(self) -> int:
        return len(self.members)


DUMMY_MICRO_BATCH = MicroBatch((), 0, 0)
"""A micro-batch of weight zero, run by a rank that has fewer micro-batches than others, so that collectives match."""


def plan_micro_batches(
    lengths: Sequence[int] | NDArray[np.int32],
    cost: Cost,
    budget_bytes: int,
    floor_tokens: int = 0,
    patches: NDArray[np.int64] | None = None,
    launch_tokens: int = LAUNCH_TOKENS,
) -> list[MicroBatch]:
    """Cut sequences of `lengths` tokens into micro-batches of at most `budget_bytes`, most expensive first.

    A sequence above the budget is a micro-batch of one row. Chosen is the cut with the fewest tokens, counting padding,
    `launch_tokens` per micro-batch and at least `floor_tokens` each. `patches` are those of each sequence's images;
    None: unknown, or no images.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-int(lengths[position]), position))
    sorted_lengths = [int(lengths[position]) for position in order]
    sums = None if patches is None else np.concatenate([[0], np.cumsum(patches[order])])

    def cost_of(start: int, end: int) -> int:
        within = None if sums is None else int(sums[end] - sums[start])
        return cost(end - start, sorted_lengths[start], within)

    ends = _last_ends(sorted_lengths, cost_of, budget_bytes, alike=sums is None)
    groups = [
        MicroBatch(tuple(order[start:end]), sorted_lengths[start], cost_of(start, end))
        for start, end in _cheapest_cuts(sorted_lengths, ends, floor_tokens, launch_tokens)
    ]
    return sorted(groups, key=lambda group: -group.cost_bytes)


def floor_tokens(tokens: int, seconds: float, shortest_seconds: float) -> int:
    """The number of tokens up to which all passes take the same time (launching kernels or reading weights), rounded:
    from the `seconds` of a pass over `tokens` tokens and the `shortest_seconds` of any pass."""
    worth = min(tokens * shortest_seconds / seconds, tokens) if seconds else 0.0
    return _steady(worth)


def launch_tokens(large: tuple[int, float], small: tuple[int, float], floor: int) -> int:
    """The fixed time of one more micro-batch, in tokens of work: what two passes over half of the tokens take longer
    than one over all of them; rounded.

    Computed from two passes as (tokens, seconds), and at most `floor`, up to which all passes take the same time.
    LAUNCH_TOKENS if the passes have the same size or the small one is below the floor.
    """
    tokens, seconds = large[0] - small[0], large[1] - small[1]
    if tokens <= 0 or seconds <= 0 or small[0] < max(1, floor):
        return LAUNCH_TOKENS
    fixed_seconds = large[1] - large[0] * seconds / tokens
    return _steady(min(fixed_seconds * tokens / seconds, floor))


def _steady(tokens: float) -> int:
    """Rounded to one of four numbers between one power of two and the next, so that timing noise seldom changes it."""
    return round(2 ** (round(4 * math.log2(tokens)) / 4)) if tokens >= 1 else 0


def costliest_sequences(
    lengths: NDArray[np.int32], cost: Cost, most: int, patches: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Positions of at most `most` sequences, the costliest first: the longest, or, with `patches` of images, those that
    cost most alone among the longest and those with most patches."""
    longest = lengths.argsort(kind="stable")[::-1][:most]
    if patches is None:
        return longest.copy()
    asked = np.unique(np.concatenate([longest, patches.argsort(kind="stable")[::-1][:most]]))
    alone = [cost(1, int(lengths[position]), int(patches[position])) for position in asked]
    return asked[np.argsort(alone, kind="stable")[::-1][:most]]


def _last_ends(lengths: list[int], cost_of: Callable[[int, int], int], budget_bytes: int, *, alike: bool) -> list[int]:
    """For each start in descending `lengths`, the last end whose sequences cost at most `budget_bytes`, at least start
    + 1. `alike`: the cost depends only on the first length and the number of sequences."""
    ends: list[int] = []
    for start, length in enumerate(lengths):
        if alike and start and lengths[start - 1] == length:
            ends.append(min(len(lengths), ends[-1] + 1))
            continue
        # What begins one sequence later costs no more, so it reaches at least as far.
        low, high = max(start + 1, ends[-1] if ends else 0), len(lengths)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost_of(start, middle) <= budget_bytes else (low, middle - 1)
        ends.append(low)
    return ends


def _cheapest_cuts(
    lengths: list[int], last_ends: list[int], floor_tokens: int, launch_tokens: int
) -> list[tuple[int, int]]:
    """Shortest path over cut points: ranges [start, end) of descending `lengths` with the least total work."""
    count = len(lengths)
    work = np.full(count + 1, np.inf)
    work[0] = 0.0
    came_from = np.zeros(count + 1, dtype=np.int64)
    for start in range(count):
        ends = np.arange(start + 1, last_ends[start] + 1)
        offered = work[start] + launch_tokens + np.maximum(floor_tokens, (ends - start) * lengths[start])
        better = offered < work[ends]
        work[ends[better]] = offered[better]
        came_from[ends[better]] = start
    cuts: list[tuple[int, int]] = []
    end = count
    while end:
        cuts.append((int(came_from[end]), end))
        end = int(came_from[end])
    return cuts[::-1]
