"""Engines on the plain CPU under a limit on their address space, at which the operating system refuses allocations; the
lowest limits leave no room for a single sequence."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.journal.checkpoints_on_disk import damage, find_checkpoints
from tests.events import read_events
from tests.train.fault_rig import write_model
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, write_samples

ROOT = Path(__file__).resolve().parents[3]
ROOMY_MIB, FLOOR_MIB = 500, 25
"""Above what libraries take: all sequences of a step at once; and less than the model takes."""
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31)}
"""As engines are started, but with one heap: glibc reserves 64 MiB of address space for each thread that allocates."""


@dataclass
class Limited:
    """How an engine ended under a limit of `mib` MiB."""

    mib: int
    code: int
    losses: list[float]
    events: list[dict[str, Any]]
    saved_step: int | None
    log: str


class Limits:
    """Runs of one spec under several limits."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.spec = make_spec(
            write_samples(folder / "samples.jsonl", count=40, longest=250),
            device="cpu",
            model={"id": str(write_model(folder / "model", 4, 128))},
            data={"max_length": 256},
            train={"max_steps": 3, "batch_size": 16, "gradient_checkpointing": False, "warmup_steps": 0},
        )

    def run(self, mib: int) -> Limited:
        """Run an engine process that may take `mib` MiB of address space in addition to that of its loaded
        libraries."""
        place = new_run(self.runs, self.spec)
        done = subprocess.run(
            [sys.executable, "-m", "tests.train.limited", str(place.path), str(mib)],
            cwd=ROOT,
            env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        events = list(read_events(place.events))
        found = find_checkpoints(place.checkpoints)
        sound = [checkpoint.step for checkpoint in found if damage(checkpoint) is None]
        return Limited(mib, done.returncode, [*losses(events).values()], events, max(sound, default=None), done.stderr)


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> Limits:
    return Limits(tmp_path_factory.mktemp("limits"))


@pytest.fixture(scope="module")
def roomy(limits: Limits) -> Limited:
    run = limits.run(ROOMY_MIB)
    assert run.code == 0, run.log
    assert not of_kind(run.events, "backoff")
    return run


@pytest.mark.parametrize("mib", [pytest.param(105, marks=pytest.mark.torture), 88])
def test_a_run_short_of_address_space_learns_the_same(limits: Limits, roomy: Limited, mib: int) -> None:
    run = limits.run(mib)
    assert run.code == 0, run.log
    assert of_kind(run.events, "backoff")
    assert run.losses == pytest.approx(roomy.losses, rel=1e-5)


def test_below_the_floor_it_ends_with_4_and_no_step(limits: Limits) -> None:
    run = limits.run(FLOOR_MIB)
    assert run.code == 4, run.log
    assert run.losses == []
    assert "unexpected" not in of_kind(run.events, "run_finished")[0]["error"]


@pytest.mark.torture
def test_every_limit_down_to_the_floor_learns_the_same_or_stops_with_a_checkpoint(
    limits: Limits, roomy: Limited, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [limits.run(mib) for mib in (*range(400, 120, -40), *range(120, FLOOR_MIB, -4))]
    with capsys.disabled():
        for run in runs:
            failures = len(of_kind(run.events, "backoff"))
            print(f"{run.mib:>5} MiB  exit {run.code}  {len(run.losses)} steps  {failures} failures")  # noqa: T201
    assert {run.code for run in runs} <= {0, 4}, [(run.mib, run.log) for run in runs if run.code not in (0, 4)]
    for run in runs:
        assert run.losses == pytest.approx(roomy.losses[: len(run.losses)], rel=1e-5)
        assert run.code == 4 or len(run.losses) == 3
        assert run.code == 0 or run.saved_step == (len(run.losses) or None)
