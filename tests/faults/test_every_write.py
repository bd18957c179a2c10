"""A few faults of the sweep over all writes, always the same ones; all: `python -P -m tests.faults.every_write`."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.faults.scenarios import SCENARIOS
from tests.fork_server import ROOT


def swept(*words: str) -> str:
    """What a sweep prints that must lose nothing."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    command = [sys.executable, "-P", "-m", "tests.faults.every_write", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    return done.stdout


def test_two_failed_writes_of_a_run_lose_nothing() -> None:
    assert "nothing lost" in swept("--only", "single run", "--sample", "2")


def test_two_faults_of_each_process_that_is_no_run_lose_nothing() -> None:
    names = [scenario.name for scenario in SCENARIOS if scenario.files is not None]
    names.append("push")
    only = [word for name in names for word in ("--only", name)]
    assert swept(*only, "--sample", "2").count("nothing lost") == len(names) > 8
