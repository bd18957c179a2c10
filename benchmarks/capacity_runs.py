"""Is the budget right to one per cent? Small models trained with a little more memory than predicted, and with less.

Run: python -m benchmarks.capacity_runs [--cells 40] [--seed 4]        (CPU, about three minutes)

A line a cell: allocation failures of two real steps with the predicted peak + 1 % (none is right) and - 1 % (some are),
and the prediction over the peak of the roomier run, less one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

from engine.model.library_output import disable_progress_bars
from tests.budget.capacity_runs import CELLS, SEED, cells, judge


def main() -> int:
    """Judge and print; 1 when a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=CELLS)
    parser.add_argument("--seed", type=int, default=SEED)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    disable_progress_bars()
    wrong = 0
    for cell in cells(asked.cells, asked.seed):
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(cell, Path(folder))
        wrong += not verdict.right
        word = "right" if verdict.right else "WRONG"
        off = 100 * (verdict.predicted_bytes / verdict.measured_bytes - 1) if verdict.measured_bytes else float("nan")
        print(f"{word}  +1 %: {verdict.with_more}  -1 %: {verdict.with_less}  {off:+.2f} %  {cell}", flush=True)
    print(f"{asked.cells} cells, seed {asked.seed}: {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
