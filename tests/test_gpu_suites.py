"""The suites for a real card, small on the metered device: each has a cell that measures what it says it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_suites import SUITES, SuiteDevice

ROOT = Path(__file__).resolve().parent.parent


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments, "--device", "metered"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("suite", "cell", "key"),
    [
        ("smoke", "out-of-memory", "samples_lost"),
        ("budget", "qwen2.5-0.5b-lora-1x512", "error_percent"),
        ("backoff", "attention-lora-0.05gb", "samples_lost"),
        ("edge", "full-0.05gb", "largest_sequences"),
    ],
)
def test_a_cell_is_measured_kept_and_shown(suite: str, cell: str, key: str, tmp_path: Path) -> None:
    done = gpu(suite, "--out", str(tmp_path), "--cell", cell)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / suite / f"{cell}.json").read_text())
    assert found["ok"], found
    assert key in found
    # Nothing is run in no time: the table has what is kept, and says what is missing.
    table = gpu(suite, "--out", str(tmp_path), "--limit", "0").stdout.splitlines()
    assert "simulated device" in table[0]
    assert [line.split()[0] for line in table if f" {cell} " in line] == ["ok"]
    assert sum("not run yet" in line for line in table) == len(table) - 2
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert machine["simulated"] and machine["torch"]


def test_a_cell_that_fails_is_recorded_and_told(tmp_path: Path) -> None:
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "lora-bfloat16.json").write_text('{"ok": false, "error": "Traceback\\nRuntimeError: no"}')
    done = gpu("smoke", "--out", str(tmp_path), "--limit", "0")
    assert done.returncode == 1
    assert "WRONG  lora-bfloat16" in done.stdout and "RuntimeError: no" in done.stdout


def test_on_a_card_the_models_are_of_their_real_size() -> None:
    card = SuiteDevice("cuda", "a card", 139.8, 9.0)
    names = [cell.name for cell in SUITES["budget"](card)]
    assert len(names) > 15
    assert len(list(SUITES["edge"](card))) == 9
