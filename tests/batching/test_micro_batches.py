"""Planning micro-batches: every sequence once, never above the budget, most expensive first, little waste."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.batching.micro_batches import (
    LAUNCH_TOKENS,
    Cost,
    costliest_sequences,
    floor_tokens,
    launch_tokens,
    plan_micro_batches,
)


def tokens(rows: int, length: int, patches: int | None = None) -> int:
    """A cost that is linear in padded tokens."""
    return rows * length


def quadratic(rows: int, length: int, patches: int | None = None) -> int:
    """A cost like that of eager attention."""
    return rows * length * (64 + length)


def ragged(seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randint(1, 400) for _ in range(drawn.randint(1, 80))]


@pytest.mark.parametrize("cost", [tokens, quadratic])
@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_comes_exactly_once_and_costs_stay_below_the_budget(cost: Cost, seed: int) -> None:
    lengths = ragged(seed)
    budget = random.Random(seed + 100).randint(cost(1, 1), cost(len(lengths), max(lengths)))
    plan = plan_micro_batches(lengths, cost, budget)
    assert sorted(member for group in plan for member in group.members) == list(range(len(lengths)))
    for group in plan:
        assert group.length == max(lengths[member] for member in group.members)
        assert group.cost_bytes == cost(group.rows, group.length)
        assert group.cost_bytes <= budget or group.rows == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_most_expensive_micro_batch_comes_first(seed: int) -> None:
    plan = plan_micro_batches(ragged(seed), quadratic, 50_000)
    costs = [group.cost_bytes for group in plan]
    assert costs == sorted(costs, reverse=True)


def test_equal_lengths_fill_the_budget() -> None:
    plan = plan_micro_batches([100] * 16, tokens, 600)
    assert sorted(group.rows for group in plan) == [4, 6, 6]


def test_one_long_sequence_does_not_make_the_short_ones_pay() -> None:
    lengths = [4000] + [10] * 30
    plan = plan_micro_batches(lengths, tokens, 10**9)
    assert [group.rows for group in plan] == [1, 30]


def test_short_sequences_are_not_split_to_save_a_few_tokens() -> None:
    assert len(plan_micro_batches([60, 50, 40, 30], tokens, 10**9)) == 1


@pytest.mark.parametrize(("floor", "launch"), [(0, LAUNCH_TOKENS), (700, LAUNCH_TOKENS), (700, 20), (0, 900)])
@pytest.mark.parametrize("seed", range(4))
def test_the_cut_is_the_best_of_all_cuts(seed: int, floor: int, launch: int) -> None:
    drawn = random.Random(seed)
    lengths = sorted((drawn.randint(1, 900) for _ in range(9)), reverse=True)
    budget = 2000

    def work(cuts: list[int]) -> int | None:
        total = 0
        for start, end in zip([0, *cuts], [*cuts, len(lengths)], strict=True):
            if (end - start) * lengths[start] > budget and end - start > 1:
                return None
            total += launch + max(floor, (end - start) * lengths[start])
        return total

    places = range(1, len(lengths))
    every = ([p for p in places if mask >> (p - 1) & 1] for mask in range(2 ** len(places)))
    best = min(total for total in map(work, every) if total is not None)
    plan = plan_micro_batches(lengths, tokens, budget, floor, launch_tokens=launch)
    assert sum(launch + max(floor, group.rows * group.length) for group in plan) == best


def test_passes_that_take_equally_long_are_not_split_to_save_padding() -> None:
    lengths = [1000, 1000, 100, 100, 100, 100]
    assert [group.rows for group in plan_micro_batches(lengths, tokens, 10**9)] == [2, 4]
    assert [group.rows for group in plan_micro_batches(lengths, tokens, 10**9, 8192)] == [6]


@pytest.mark.parametrize(
    ("tokens_of_large", "seconds", "shortest_seconds", "floor"),
    [
        (16_384, 0.4, 0.05, 2048),  # a GPU: launching the kernels takes as long as 2,000 tokens
        (16_384, 0.4, 0.052, 2048),  # noise of some per cent changes nothing
        (16_384, 0.4, 0.0708, 2896),  # no more than a tenth beside what was measured
        (512, 0.05, 0.05, 512),  # all passes of the run take equally long
        (512, 0.05, 0.06, 512),
        (4096, 4.0, 0.0001, 0),
        (0, 0.0, 0.05, 0),  # another rank had all samples
    ],
)
def test_the_floor_is_what_could_be_computed_meanwhile(
    tokens_of_large: int, seconds: float, shortest_seconds: float, floor: int
) -> None:
    assert floor_tokens(tokens_of_large, seconds, shortest_seconds) == floor


@pytest.mark.parametrize(
    ("large", "small", "launch"),
    [
        ((16_384, 0.50), (8192, 0.30), 4096),  # 0.1 s, and 24 us for each token
        ((16_384, 0.503), (8192, 0.30), 4096),  # a little noise changes nothing
        ((16_384, 0.51), (8192, 0.30), 3444),
        ((16_384, 0.50), (8192, 0.25), 0),  # no fixed time
        ((16_384, 0.50), (8192, 0.24), 0),  # noise
        ((16_384, 0.50), (8192, 0.49), 8192),  # no more than the shortest pass
        ((16_384, 0.50), (8192, 0.51), LAUNCH_TOKENS),
        ((16_384, 0.50), (16_384, 0.50), LAUNCH_TOKENS),  # micro-batches of one sequence
        ((9000, 0.50), (4500, 0.49), LAUNCH_TOKENS),  # both are among the shortest passes
        ((0, 0.0), (0, 0.0), LAUNCH_TOKENS),
    ],
)
def test_one_more_micro_batch_costs_what_two_halves_take_longer_than_the_whole(
    large: tuple[int, float], small: tuple[int, float], launch: int
) -> None:
    assert launch_tokens(large, small, 8192) == launch


def test_a_long_launch_makes_fewer_micro_batches() -> None:
    lengths = [1000, 1000, 100, 100, 100, 100]
    assert [group.rows for group in plan_micro_batches(lengths, tokens, 10**9, launch_tokens=4000)] == [6]
    assert len(plan_micro_batches([60, 50, 40, 30], tokens, 10**9, launch_tokens=0)) == 4


def test_a_micro_batch_holds_as_many_rows_as_the_budget_allows() -> None:
    assert [group.rows for group in plan_micro_batches([100] * 16, tokens, 1000)] == [10, 6]
    assert [group.rows for group in plan_micro_batches([100] * 3, tokens, 50)] == [1, 1, 1]


def test_the_costliest_sequence_may_be_short_with_a_large_image() -> None:
    lengths, patches = np.array([10, 90, 40, 50], np.int32), np.array([0, 0, 400, 4])

    def cost(rows: int, length: int, patches: int | None = None) -> int:
        return rows * length + (patches or 0)

    assert costliest_sequences(lengths, cost, 2, patches).tolist() == [2, 1]
    assert costliest_sequences(lengths, cost, 2).tolist() == [1, 3]


@pytest.mark.parametrize("seed", range(8))
def test_images_count_with_their_own_patches(seed: int) -> None:
    drawn = random.Random(seed)
    lengths = [drawn.choice([50, 60, 90]) for _ in range(30)]
    patches = np.array([drawn.choice([0, 0, 40, 400]) for _ in range(30)])

    def cost(rows: int, length: int, patches: int | None = None) -> int:
        return rows * length + 10 * (400 * rows if patches is None else patches)

    plan = plan_micro_batches(lengths, cost, 5000, patches=patches)
    assert sorted(member for group in plan for member in group.members) == list(range(30))
    for group in plan:
        assert group.cost_bytes == cost(group.rows, group.length, int(patches[list(group.members)].sum()))
        assert group.cost_bytes <= 5000 or group.rows == 1
    assert len(plan) < len(plan_micro_batches(lengths, cost, 5000))  # the largest image in every row
