"""`tunedeck train` as torchrun and srun start it: one run, one journal, also where the launcher starts ranks again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.journal import control
from engine.journal.directory import RunDirectory
from engine.journal.summary import summarise
from engine.launch.process import ENTRY_FILE
from tests.cli.small_recipes import write_profile, write_recipe
from tests.events import read_events
from tests.train.run_helpers import of_kind

LIMIT_SECONDS = 240.0
TORCHRUN = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Arguments of `tunedeck train` on two CPU devices."""
    recipe = write_recipe(tmp_path, ("max_steps = 2", "max_steps = 30"), ("every_steps = 1", "every_steps = 5"))
    both = 'memory_gib = 8.0\ncount = 2\n\n[parallel]\nstrategy = "replicated"\ntimeout_seconds = 60\n'
    profile = write_profile(tmp_path, ("memory_gib = 8.0\n", both))
    return ["train", "-p", str(profile), "-r", str(recipe), "--runs", str(tmp_path / "runs"), "--json"]


def started(command: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start the command, with its output in a file of its own, because a pipe that nobody reads may fill up."""
    output = (folder / f"out-{environment.get('SLURM_PROCID', 0)}").open("w")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    with output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**clean, **environment}, text=True
        )


def the_run(folder: Path) -> RunDirectory:
    """The only run in the folder; waits until it exists."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := list((folder / "runs").glob("2*/events.jsonl"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (events,) = found
    return RunDirectory(events.parent)


def events(place: RunDirectory) -> list[dict[str, Any]]:
    return list(read_events(place.events))


def wait_for_step(place: RunDirectory, step: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not any(event["step"] >= step for event in of_kind(events(place), "step")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pids_of_ranks(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """The process id of each rank, from torchrun's child processes."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    environments = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    return {
        int(entry[5:]): pid for pid, entries in environments.items() for entry in entries if entry.startswith(b"RANK=")
    }


@pytest.fixture
def torchrun(tmp_path: Path, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = started([*TORCHRUN, "--max-restarts", "1", str(ENTRY_FILE), *arguments], tmp_path)
    yield process
    process.terminate()
    process.wait(timeout=LIMIT_SECONDS)


def srun(command: list[str], folder: Path) -> list[int]:
    """Start the command as two tasks of a job step, as srun does; returns their exit codes."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    ranks = [
        started(command, folder, SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_STEP_NUM_TASKS="2", **job)
        for rank in ("0", "1")
    ]
    return [rank.wait(timeout=LIMIT_SECONDS) for rank in ranks]


def test_torchrun_starts_one_run_and_restarts_it_after_a_killed_rank_and_srun_goes_on_with_it(
    tmp_path: Path, torchrun: subprocess.Popen[str]
) -> None:
    place = the_run(tmp_path)
    wait_for_step(place, 6)
    os.kill(pids_of_ranks(torchrun)[1], signal.SIGKILL)
    assert torchrun.wait(timeout=LIMIT_SECONDS) == 0
    assert the_run(tmp_path) == place
    told = events(place)
    assert [event["world_size"] for event in of_kind(told, "run_started")] == [2, 2]
    assert "restarted" in [event["code"] for event in of_kind(told, "warning")]
    assert of_kind(told, "resumed")[0]["step"] >= 5
    assert summarise(place).status == "done" and summarise(place).step == 30

    longer = [sys.executable, "-P", str(ENTRY_FILE), "resume", str(place.path), "--set", "train.max_steps=32", "--json"]
    assert srun(longer, tmp_path) == [0, 0]
    shown = [json.loads(line) for line in (tmp_path / "out-0").read_text().splitlines() if line.startswith("{")]
    assert shown == events(place)[len(told) :] and shown[-1]["status"] == "done"
    assert of_kind(shown, "resumed")[0]["step"] == 30 and of_kind(shown, "step")[-1]["step"] == 32
    assert "{" not in (tmp_path / "out-1").read_text()


@pytest.mark.torture
def test_a_killed_rank_0_takes_its_run_up_again(tmp_path: Path, torchrun: subprocess.Popen[str]) -> None:
    place = the_run(tmp_path)
    wait_for_step(place, 6)
    os.kill(pids_of_ranks(torchrun)[0], signal.SIGKILL)
    assert torchrun.wait(timeout=LIMIT_SECONDS) == 0
    told = events(the_run(tmp_path))
    assert any(event["text"].startswith("torchrun started the ranks again") for event in of_kind(told, "warning"))
    assert summarise(place).status == "done" and summarise(place).step == 30


@pytest.mark.torture
def test_a_run_that_is_stopped_is_not_started_again_by_its_launcher(
    tmp_path: Path, torchrun: subprocess.Popen[str]
) -> None:
    place = the_run(tmp_path)
    wait_for_step(place, 6)
    control.send_request(place, "stop")
    assert torchrun.wait(timeout=LIMIT_SECONDS) == 0
    assert summarise(place).status == "stopped"
    assert len(of_kind(events(place), "run_started")) == 1
