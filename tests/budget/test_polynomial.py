"""Bytes as polynomials of a micro-batch's shape."""

from __future__ import annotations

import random

import pytest

from engine.budget.trace.polynomial import (
    BYTE,
    CHUNK,
    SEVERAL,
    SQUARE,
    TOKEN,
    TRAINED_GRADS,
    BytesPolynomial,
    highest,
    highest_value,
    shape_of,
)


def test_a_polynomial_is_evaluated_at_the_shape_of_a_micro_batch() -> None:
    size = 5 * BYTE + 3 * TOKEN + 2 * SQUARE + 7 * CHUNK + 100 * SEVERAL
    assert size.at(shape_of(2, 10, 1000)) == 5 + 3 * 20 + 2 * 200 + 7 * 20
    assert size.at(shape_of(2, 10, 8)) == 5 + 3 * 20 + 2 * 200 + 7 * 8 + 100


def test_gradients_of_weights_are_new_in_the_first_micro_batch_of_a_step_only() -> None:
    size = 3 * TOKEN + 8 * TRAINED_GRADS
    assert size.settled(accumulating=False) == 3 * TOKEN + 8 * BYTE
    assert size.settled(accumulating=True) == 3 * TOKEN


@pytest.mark.parametrize("seed", range(20))
def test_the_highest_sizes_hold_the_largest_for_every_shape(seed: int) -> None:
    drawn = random.Random(seed)
    sizes = [BytesPolynomial((*(drawn.randrange(6) for _ in range(8)), 0)) for _ in range(40)]
    kept = highest(sizes)
    assert len(kept) < len(sizes)
    for _ in range(50):
        shape = shape_of(drawn.randint(1, 9), drawn.randint(1, 99), drawn.randint(1, 200))
        assert highest_value(kept, shape) == highest_value(sizes, shape)
