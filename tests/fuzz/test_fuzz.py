"""Files by strangers, a small sample with a fixed seed: `python -P -m tests.fuzz.run` takes 10^5 (`make torture`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.killable import KillableProcess
from tests.fuzz.guard import guarded
from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS, Target

SAMPLE = 40


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_file_by_a_stranger_runs_code_climbs_out_or_ends_a_reader(target: Target, tmp_path: Path) -> None:
    assert fuzz(target, max(4, int(SAMPLE * target.share)), tmp_path, seed=36).inputs > 0


def test_what_a_process_that_renders_does_is_seen(tmp_path: Path) -> None:
    def write(path: str) -> None:
        Path(path).write_text("x")

    process, outside = KillableProcess(write), tmp_path.parent / f"{tmp_path.name}-outside"
    with pytest.raises(AssertionError, match="opened for writing"), guarded(tmp_path):
        process.ask(str(outside))
    with guarded(tmp_path):
        process.ask(str(tmp_path / "inside"))
    process.close()
    outside.unlink()


@pytest.mark.parametrize("forbidden", [os.fork, lambda: Path("/etc/passwd").read_text(), lambda: os.system("true")])
def test_what_is_forbidden_is_seen(forbidden: Callable[[], Any], tmp_path: Path) -> None:
    with pytest.raises(AssertionError), guarded(tmp_path):
        if forbidden() == 0 and forbidden is os.fork:
            os._exit(0)
