"""Measures the error of the budget's closed form against engine steps, by model family and training method.

Run: python -m benchmarks.budget_error [--family NAME]... [--markdown]        (CPU, some five minutes for all)

Each cell is one optimizer step of a small model of the family on the metered device, with two micro-batches of 2 × 200
tokens. The error says by how many percent the predicted peak is above the measured one; negative errors are unsafe.
The cells are those of `tests/budget/budget_cases.py`; the tests check some of them against bounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from transformers.utils import logging

from tests.budget.budget_cases import DENSE, FAMILIES, WAYS, applies, error


def main() -> None:
    """Measure all cells and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES))
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args()
    logging.set_verbosity_error()
    families = asked.family or list(FAMILIES)
    edge, between = ("| ", " | ") if asked.markdown else ("", "  ")

    def show(first: str, cells: list[str]) -> None:
        print(edge + between.join([f"{first:<22}", *(f"{cell:>11}" for cell in cells)]) + edge[::-1], flush=True)

    show("percent", families)
    if asked.markdown:
        show("---", ["---"] * len(families))
    errors: dict[str, list[float]] = {family: [] for family in families}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            found = {f: error(f, way, Path(folder), micro_batches=2) for f in families if applies(f, way)}
            for family, value in found.items():
                errors[family].append(value)
            show(way, [f"{100 * found[f]:+.2f}" if f in found else "-" for f in families])
    for name in ("dense", "experts"):
        values = [value for family in families if (family in DENSE) == (name == "dense") for value in errors[family]]
        if values:
            print(summary(name, values))


def summary(name: str, values: list[float]) -> str:
    """Format `values` (errors in percent) as a line of text that begins with `name`: the median of the absolute errors,
    the lowest error and the highest error."""
    median = statistics.median(abs(value) for value in values)
    low, high = min(values), max(values)
    return f"{name}: {len(values)} cells, median {100 * median:.2f} %, from {100 * low:+.2f} to {100 * high:+.2f} %"


if __name__ == "__main__":
    main()
