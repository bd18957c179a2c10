"""Two workers on one queue, and a card that is lost."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from engine.journal.directory import RunDirectory
from engine.launch.process import ENTRY_FILE
from engine.train.run.main import _describe
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe
from tests.events import read_events


def test_of_two_queue_workers_one_works_and_no_run_starts_twice(tmp_path: Path, tunedeck: Tunedeck) -> None:
    asked = ("-p", write_profile(tmp_path), "-r", write_recipe(tmp_path))
    for name in ("one", "two"):
        assert tunedeck("queue", "add", *asked, "--name", name).code == 0
    words = [sys.executable, "-P", str(ENTRY_FILE), "queue", "start"]
    both = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    codes = [each.wait() for each in both]
    assert 0 in codes and set(codes) <= {0, 6}
    for path in (tmp_path / "runs").iterdir():
        if path.name.startswith("."):
            continue
        kinds = Counter(event["kind"] for event in read_events(path / "events.jsonl"))
        assert (kinds["run_started"], kinds["run_finished"]) == (1, 1)


@pytest.mark.parametrize("text", ["GPU is lost", "uncorrectable ECC error encountered"])
def test_a_card_that_is_lost_ends_the_run_with_what_to_do(text: str, tmp_path: Path) -> None:
    """CUDA's own words; the card itself cannot be taken away here."""
    error = torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported")
    status, code, told = _describe(error, RunDirectory(tmp_path / "one"))
    assert (status, code) == ("failed", 6)
    assert "the device failed" in told and "tunedeck resume one" in told and "asynchronously" not in told
