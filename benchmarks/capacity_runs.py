"""Checks the budget to one per cent: trains small models with 1 % more memory than predicted, and with 1 % less.

Run: python -m benchmarks.capacity_runs [--cases 40] [--seed 4]        (CPU, about three minutes)

Prints one line per case: the number of allocation failures in two real steps with 1 % more than the predicted peak
(must be 0) and with 1 % less (must not be 0), and the error of the prediction relative to the peak measured with 1 %
more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

from engine.model.config import disable_progress_bars
from tests.budget.capacity_runs import CASES, SEED, CapacityCase, capacity_cases, run_case


def main() -> int:
    """Train each case (a random small model) with 1 % more and 1 % less memory than predicted, and print a line for it.
    Returns 1 if a case ran out of memory with more, or did not with less; else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, default=SEED)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    disable_progress_bars()
    return show_cases(list(capacity_cases(asked.cases, asked.seed)))


def show_cases(cases: list[CapacityCase]) -> int:
    """Train each case and print its line. Returns 1 if one was wrong."""
    wrong = 0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            result = run_case(case, Path(folder))
        wrong += not result.right
        word = "right" if result.right else "WRONG"
        off = 100 * (result.predicted_bytes / result.measured_bytes - 1) if result.measured_bytes else float("nan")
        print(f"{word}  +1 %: {result.with_more}  -1 %: {result.with_less}  {off:+.2f} %  {case}", flush=True)
    print(f"{len(cases)} cases: {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
