"""The order of samples: complete, repeatable, a pure function of seed, epoch and step."""

from __future__ import annotations

import numpy as np
import pytest

from engine.data.order import MixedOrder, SampleOrder
from engine.errors import DataError


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("count", "batch_size"), [(1, 1), (7, 3), (64, 64), (10, 64), (101, 8)])
def test_every_epoch_holds_every_sample_once(count: int, batch_size: int, shuffle: bool) -> None:
    order = SampleOrder(count, seed=5, shuffle=shuffle, batch_size=batch_size)
    stream = np.concatenate([order.step(step) for step in range(1, 4 * count // batch_size + 2)])
    for epoch in range(3):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_whole_weights_repeat_samples_exactly_in_every_epoch() -> None:
    weights = [1.0, 2.0, 3.0, 1.0]
    order = SampleOrder(weights, seed=0, shuffle=True, batch_size=2)
    for epoch in range(5):
        assert np.bincount(order.epoch(epoch), minlength=4).tolist() == [1, 2, 3, 1]


def test_fractional_weights_keep_epochs_equally_long_and_favour_no_sample() -> None:
    order = SampleOrder([0.25] * 40 + [1.5] * 10, seed=3, shuffle=True, batch_size=4)
    assert order.epoch_size == 10 + 15
    counts = np.bincount(np.concatenate([order.epoch(epoch) for epoch in range(4)]), minlength=50)
    assert counts.tolist() == [1] * 40 + [6] * 10


def test_a_step_does_not_depend_on_what_was_asked_before() -> None:
    asked_in_order = SampleOrder(50, seed=9, shuffle=True, batch_size=7)
    forward = [asked_in_order.step(step).tolist() for step in range(1, 40)]
    for step in (39, 1, 20, 8):
        assert SampleOrder(50, seed=9, shuffle=True, batch_size=7).step(step).tolist() == forward[step - 1]
    assert [asked_in_order.step(step).tolist() for step in range(39, 0, -1)] == forward[::-1]


def test_batch_size_cuts_the_same_stream() -> None:
    small, large = (SampleOrder(30, seed=1, shuffle=True, batch_size=size) for size in (5, 20))
    pieces = np.concatenate([small.step(step) for step in range(1, 13)])
    assert pieces.tolist() == np.concatenate([large.step(step) for step in range(1, 4)]).tolist()


def test_seed_and_epoch_change_the_order() -> None:
    order = SampleOrder(100, seed=0, shuffle=True, batch_size=10)
    other = SampleOrder(100, seed=1, shuffle=True, batch_size=10)
    assert order.epoch(0).tolist() != order.epoch(1).tolist()
    assert order.epoch(0).tolist() != other.epoch(0).tolist()


def test_the_order_is_the_one_that_earlier_versions_gave() -> None:
    # A change here would break the resume of every run written before it.
    assert SampleOrder(8, seed=0, shuffle=True, batch_size=8).step(1).tolist() == FROZEN


def test_steps_of_a_run() -> None:
    order = SampleOrder(10, seed=0, shuffle=True, batch_size=4)
    assert (order.steps(None, None), order.steps(2.0, None), order.steps(None, 7), order.steps(1.0, 2)) == (3, 5, 7, 2)


def test_with_epochs_the_last_step_is_short_and_nothing_follows() -> None:
    order = SampleOrder(10, seed=0, shuffle=True, batch_size=4, epochs=1.0)
    assert [len(order.step(step)) for step in (1, 2, 3, 4)] == [4, 4, 2, 0]
    assert order.epoch_at(3) == 1.0


def test_weights_that_leave_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="no sample"):
        SampleOrder([0.1, 0.1], seed=0, shuffle=True, batch_size=1)


FROZEN = [3, 7, 4, 2, 1, 6, 5, 0]


@pytest.mark.parametrize(("batch_size", "parts"), [(4, 1), (4, 3), (7, 2), (3, 5)])
def test_parts_of_an_epoch_end_as_often_in_each_epoch(batch_size: int, parts: int) -> None:
    order = SampleOrder(50, seed=0, shuffle=True, batch_size=batch_size, epochs=3.0)
    ends = [step for step in range(1, order.steps(3.0, None) + 1) if order.ends_part(step, parts)]
    assert len(ends) == 3 * parts
    assert [order.epoch_at(step) * parts >= part for part, step in enumerate(ends, 1)] == [True] * len(ends)


def test_sources_are_drawn_by_probability_anew_in_each_epoch() -> None:
    source_of = np.array([0] * 300 + [1] * 100 + [2] * 600)
    order = MixedOrder(source_of, [3.0, 1.0, 1.0], seed=5, batch_size=8)
    epochs = [order.epoch(number) for number in range(20)]
    counts = np.array([np.bincount(source_of[epoch], minlength=3) for epoch in epochs])
    assert all(len(epoch) == 1000 for epoch in epochs)
    assert np.allclose(counts.mean(axis=0) / 1000, [0.6, 0.2, 0.2], atol=0.02)
    assert len({tuple(count) for count in counts}) > 10 and not np.array_equal(epochs[0], epochs[1])
    for epoch in epochs[:3]:
        used = np.bincount(epoch, minlength=1000)
        for source in range(3):  # none is used again before all of its source were
            assert np.ptp(used[source_of == source]) <= 1


def test_a_mixed_order_depends_on_seed_and_step_alone() -> None:
    source_of, weights = np.array([0] * 7 + [1] * 9), [0.5, 2.0]
    one, again = (MixedOrder(source_of, weights, seed=1, batch_size=3) for _ in range(2))
    late = again.step(40)
    assert np.array_equal(one.step(40), late) and np.array_equal(one.step(2), again.step(2))
    other = MixedOrder(source_of, weights, seed=2, batch_size=3)
    assert not np.array_equal(np.concatenate([one.step(n) for n in (1, 2, 3)]),
                              np.concatenate([other.step(n) for n in (1, 2, 3)]))  # fmt: skip
    larger = MixedOrder(source_of, weights, seed=1, batch_size=16)
    assert np.array_equal(larger.step(1), np.concatenate([one.step(n) for n in range(1, 7)])[:16])
