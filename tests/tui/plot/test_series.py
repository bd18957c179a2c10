"""BoundedSeries: merged buckets, cutting, and the columns of a plot."""

from __future__ import annotations

import math

import pytest

from tui.plot.series import BoundedSeries, PlotColumn, smoothed

MILLION = 1_000_000


@pytest.fixture(scope="module")
def long() -> BoundedSeries:
    """A million points that fall from 4, with one spike and one dip of a single point each."""
    series = BoundedSeries()
    for start in range(0, MILLION, 5000):
        steps = range(start + 1, start + 5001)
        series.extend(steps, [{777_777: 50.0, 123_456: -9.0}.get(step, 4 - 3 * step / MILLION) for step in steps])
    return series


def test_memory_does_not_grow_with_the_run(long: BoundedSeries) -> None:
    assert long.points == MILLION
    assert 2048 <= len(long) <= 4096


def test_no_single_point_is_ever_lost(long: BoundedSeries) -> None:
    columns = [column for column in long.columns(160) if column is not None]
    assert max(column.greatest for column in columns) == 50.0
    assert min(column.least for column in columns) == -9.0


def test_a_column_holds_the_mean_of_its_points(long: BoundedSeries) -> None:
    columns = long.columns(100)
    middle = columns[50]
    assert middle is not None
    assert middle.mean == pytest.approx(4 - 3 * 0.505, abs=0.005)


def test_points_one_by_one_make_the_same_curve_as_all_at_once() -> None:
    together, single = BoundedSeries(limit=8), BoundedSeries(limit=8)
    values = [math.sin(step) for step in range(100)]
    together.extend(range(100), values)
    for step, value in enumerate(values):
        single.extend([step], [value])
    for column, other in zip(together.columns(10), single.columns(10), strict=True):
        assert column is not None and other is not None
        assert (column.least, column.greatest) == (other.least, other.greatest)
        assert column.mean == pytest.approx(other.mean, abs=1e-12)  # Python 3.12 sums a list more exactly than pairs
    assert len(together) <= 8


def test_what_a_resume_voids_is_gone_and_the_curve_goes_on_from_there() -> None:
    series = BoundedSeries(limit=8)
    series.extend(range(1, 101), [1.0] * 100)
    series.cut_after(40)
    assert series.end <= 40
    series.extend(range(41, 101), [2.0] * 60)
    assert {column.greatest for column in series.columns(4, 51, 100) if column} == {2.0}


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    series = BoundedSeries()
    series.extend([1, 2, 3, 4], [1.0, None, math.nan, 2.0])
    assert series.points == 2


def test_a_bucket_leaves_no_gap_between_the_columns_it_reaches_into() -> None:
    series = BoundedSeries(limit=4)
    series.extend(range(1000), [1.0] * 1000)
    assert all(column is not None for column in series.columns(64))


def test_a_window_shows_only_what_lies_in_it() -> None:
    series = BoundedSeries()
    series.extend(range(100), range(100))
    columns = [column for column in series.columns(10, 90, 99) if column is not None]
    assert min(column.least for column in columns) >= 90


def test_an_empty_curve_has_empty_columns() -> None:
    assert BoundedSeries().columns(3) == [None] * 3


def test_smoothing_of_a_constant_changes_nothing_from_its_first_column_on() -> None:
    columns = [PlotColumn(2.0, 1.0, 3.0), None, PlotColumn(2.0, 1.0, 3.0)]
    assert smoothed(columns, 5.0) == columns


def test_smoothing_forgets_half_in_its_half_life() -> None:
    columns = [PlotColumn(0.0, 0.0, 0.0)] * 1000 + [PlotColumn(1.0, 1.0, 1.0)] * 7
    last = smoothed(columns, 7.0)[-1]
    assert last is not None
    assert last.mean == pytest.approx(0.5, abs=1e-3)
