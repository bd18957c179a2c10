"""Plans against peaks of memory that `python -m benchmarks.gpu budget` has measured on cards
(benchmarks/results/gpu.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_runs import SuiteDevice
from benchmarks.gpu_suites import BUDGET
from engine.budget.advise.plan import make_plan
from engine.config.changes import with_changes
from engine.config.files.machine import installed

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu.json"
WORST_PERCENT = 0.02

pytestmark = pytest.mark.skipif(not installed("liger-kernel"), reason="they were measured with liger-kernel")


def measured() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, machine, result) of each budget cell. Without padded rows, of which a plan counts each as the longest, and
    without runs whose micro-batch was chosen on the card."""
    cells = [
        (name.removeprefix("budget/"), each["machine"], found)
        for each in json.loads(RESULTS.read_text("utf-8"))
        for name, found in each["cells"].items()
        if name.startswith("budget/")
    ]
    return [(name, machine, found) for name, machine, found in cells if name in BUDGET and not BUDGET[name].padded]


@pytest.mark.parametrize(("name", "machine", "found"), measured(), ids=[name for name, _, _ in measured()])
def test_the_plan_is_what_the_card_measured(
    name: str, machine: dict[str, Any], found: dict[str, Any], tmp_path: Path
) -> None:
    device = SuiteDevice("cuda", machine["device"], found.get("profile_gib", machine["memory_gib"]), 9.0, "")
    kernels = found.get("kernels", "torch")  # which were the default at first
    spec = with_changes(BUDGET[name].spec(device, tmp_path), {"model.kernels": kernels})
    planned = make_plan(spec).prediction
    bytes_of_torch = planned.peak_bytes + planned.components["workspace"]  # torch's allocator has cuBLAS' workspaces
    assert 100 * abs(bytes_of_torch / found["measured"]["peak_bytes"] - 1) < WORST_PERCENT
