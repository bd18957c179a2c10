"""Two faults of the sweep over all writes, always the same ones; all: `python -P -m tests.faults.every_write`."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.fork_server import ROOT


def test_two_failed_writes_of_a_run_lose_nothing() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    words = ["-P", "-m", "tests.faults.every_write", "--only", "single run", "--sample", "2"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "nothing lost" in done.stdout, done.stdout + done.stderr
