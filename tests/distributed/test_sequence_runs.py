"""A whole run on two ranks that share every sequence: it has the losses of one process, and one process can resume
it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tunedeck
from engine.config.load import dump_run_spec, resolve
from engine.journal.directory import RunDirectory
from engine.train.run.run_state import settings
from tests.train.run_helpers import losses, new_run, of_kind, train

LIMIT_SECONDS = 240.0
SHORT = (
    "train.warmup_steps=4", "train.scheduler=constant", "train.batch_size=16", "train.micro_batch=16",
    "eval.every_steps=4", "eval.samples=0", "eval.metrics=['loss']", "checkpoint.every_steps=4",
)  # fmt: skip


def sharing_by_the_command_line(runs: Path) -> RunDirectory:
    """Train eight steps of the demo on two devices that share sequences, started by the command line; returns its
    run."""
    command = [sys.executable, "-P", str(Path(tunedeck.__file__)), "train", "-p", "demo-2", "-r", "demo"]
    command += ["--runs", str(runs), *(part for each in SHORT for part in ("--set", each))]
    command += ["--set", "train.max_steps=8", "--set", "parallel.sequence=2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    (place,) = runs.iterdir()
    return RunDirectory(place)


def test_ranks_that_share_sequences_learn_the_curve_of_one_process_which_then_goes_on_with_it(tmp_path: Path) -> None:
    twelve = resolve("demo", "demo", [*SHORT, "train.max_steps=12"]).spec
    code, alone = train(new_run(tmp_path / "alone", twelve))
    assert code == 0
    shared = sharing_by_the_command_line(tmp_path / "shared")
    shared.run_toml.write_text(dump_run_spec(twelve))
    code, told = train(shared, resume=True)
    assert code == 0
    assert [event["world_size"] for event in of_kind(told, "run_started")] == [2, 1]
    assert losses(told) == pytest.approx(losses(alone), rel=1e-4)
    here, there = ([event["metrics"]["loss"] for event in of_kind(events, "eval")] for events in (told, alone))
    assert here == pytest.approx(there, rel=1e-4)


def test_what_was_learned_of_memory_counts_for_the_same_sharing_only() -> None:
    def learned_with(*assignments: str) -> dict[str, Any]:
        return dict(settings(resolve("demo-4", "demo", list(assignments)).spec, 8)["memory"])

    by_twos = learned_with("parallel.sequence=2")
    assert by_twos == learned_with("parallel.sequence=2", "parallel.timeout_seconds=7.0")
    assert by_twos != learned_with("parallel.sequence=4")
    assert by_twos != learned_with("parallel.sequence=2", "parallel.strategy=sharded")
