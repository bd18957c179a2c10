"""Files by strangers, a small sample with a fixed seed: `python -P -m tests.fuzz.run` takes 10^5 (`make torture`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS, Target

SAMPLE = 40


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_file_by_a_stranger_runs_code_climbs_out_or_ends_a_reader(target: Target, tmp_path: Path) -> None:
    assert fuzz(target, max(4, int(SAMPLE * target.share)), tmp_path, seed=36).inputs > 0
