"""A part of the cells of `python -m benchmarks.capacity_runs`: 1 % more than predicted is enough, 1 % less is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.budget.capacity_runs import Cell, cells, judge


@pytest.mark.parametrize("cell", list(cells(9)), ids=str)
def test_a_run_fits_into_its_predicted_peak_and_not_into_less(cell: Cell, tmp_path: Path) -> None:
    verdict = judge(cell, tmp_path)
    assert verdict.right, verdict
