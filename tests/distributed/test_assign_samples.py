"""Sequences dealt over ranks: every one once, evenly, and the same on every rank."""

from __future__ import annotations

import random

import pytest

from engine.distributed.ranks import assign_samples


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_sequence_goes_to_exactly_one_rank(ranks: int) -> None:
    lengths = [random.Random(ranks).randint(1, 4000) for _ in range(29)]
    hands = assign_samples(lengths, ranks)
    assert len(hands) == ranks
    assert sorted(position for hand in hands for position in hand) == list(range(29))


def test_no_rank_has_more_than_the_mean_and_one_sequence() -> None:
    lengths = [random.Random(5).randint(1, 900) for _ in range(64)]
    loads = [sum(lengths[position] for position in hand) for hand in assign_samples(lengths, 4)]
    assert max(loads) <= sum(lengths) / 4 + max(lengths)
    assert max(loads) - min(loads) <= min(lengths) * 4 + max(lengths) / 4


def test_equal_sequences_are_dealt_in_equal_numbers() -> None:
    assert [len(hand) for hand in assign_samples([64] * 12, 4)] == [3, 3, 3, 3]


def test_with_fewer_sequences_than_ranks_some_ranks_have_none() -> None:
    assert assign_samples([7], 3) == [[0], [], []]
