"""Some cases of `python -m benchmarks.capacity_runs`: 1 % more memory than predicted suffices, 1 % less does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.budget.capacity_runs import CapacityCase, capacity_cases, run_case


@pytest.mark.parametrize("case", list(capacity_cases(9)), ids=str)
def test_a_run_fits_into_its_predicted_peak_and_not_into_less(case: CapacityCase, tmp_path: Path) -> None:
    result = run_case(case, tmp_path)
    assert result.right, result
