"""The scripts of `tunedeck launch`, run on this machine as two "nodes" that connect over loopback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe
from tests.events import read_events
from tests.train.run_helpers import of_kind

LIMIT_SECONDS = 240.0

TWO_NODES = """\
memory_gib = 8.0

[parallel]
strategy = "replicated"
timeout_seconds = 60

[nodes]
count = 2
"""

COMMANDS = {
    "scontrol": "echo localhost; echo localhost",
    "srun": """\
while [[ "$1" == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node SLURMD_NODENAME=localhost "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit ${code:-0}
""",
}
"""What stands in for Slurm here: every step runs twice, side by side."""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A profile of two machines and a recipe."""
    recipe = write_recipe(tmp_path, ("max_steps = 2", "max_steps = 30"), ("every_steps = 1", "every_steps = 10"))
    return write_profile(tmp_path, ("memory_gib = 8.0\n", TWO_NODES)), recipe


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A $PATH whose first folder has the scripts that replace the launchers' programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def started(script: Path, path: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start the script as its launcher would, with its output in a log file beside it."""
    # No other test's rendezvous: the port follows from the job's number.
    with script.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            ["bash", str(script)],
            env={**os.environ, "PATH": path, "TUNEDECK_PYTHON": sys.executable, **environment},
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def job_number() -> dict[str, str]:
    return {"SLURM_JOB_ID": str(random.SystemRandom().randrange(10_000)), "SLURM_JOB_NODELIST": "a,b"}


def events(folder: Path) -> list[dict[str, Any]]:
    """Events of the only run in the folder."""
    found = list((folder / "runs").glob("2*/events.jsonl"))
    assert len(found) <= 1
    return list(read_events(found[0])) if found else []


def ends(process: subprocess.Popen[bytes], script: Path) -> int:
    try:
        return process.wait(timeout=LIMIT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.torture  # `tests/distributed/test_two_machines.py` runs the same script on two machines
def test_a_slurm_script_trains_one_run_on_two_nodes(
    tunedeck: Tunedeck, files: tuple[Path, Path], path: str, tmp_path: Path
) -> None:
    assert tunedeck("launch", "-p", files[0], "-r", files[1], "--slurm", "--set", "train.max_steps=4").code == 0
    script = tmp_path / "mine.sbatch"
    assert ends(started(script, path, **job_number()), script) == 0
    told = events(tmp_path)
    assert of_kind(told, "run_started")[0]["world_size"] == 2
    assert (told[-1]["status"], of_kind(told, "step")[-1]["step"]) == ("done", 4)


def test_a_folder_of_runs_that_a_node_does_not_see_ends_the_job_first(
    tunedeck: Tunedeck, files: tuple[Path, Path], path: str, tmp_path: Path
) -> None:
    tunedeck("launch", "-p", files[0], "-r", files[1], "--slurm")
    script = tmp_path / "mine.sbatch"
    (tmp_path / "mine.run.toml").unlink()
    assert ends(started(script, path, **job_number()), script) == 6
    assert "does not see" in script.with_suffix(".log").read_text() and events(tmp_path) == []


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not any(event["step"] >= step for event in of_kind(events(folder), "step")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.torture
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_lost_on_one_node_is_started_again_on_both(
    rank: str, tunedeck: Tunedeck, files: tuple[Path, Path], path: str, tmp_path: Path
) -> None:
    tunedeck("launch", "-p", files[0], "-r", files[1], "--slurm", "--set", "train.max_steps=60")
    script = tmp_path / "mine.sbatch"
    job = started(script, path, **job_number())
    wait_for_step(tmp_path, 12)
    for process in psutil.Process(job.pid).children(recursive=True):
        if "--run-spec" in process.cmdline()[:6] and process.environ().get("RANK") == rank:
            process.kill()
    assert ends(job, script) == 0
    told = events(tmp_path)
    assert told[-1]["status"] == "done" and of_kind(told, "step")[-1]["step"] == 60
    assert [event["world_size"] for event in of_kind(told, "run_started")] == [2, 2]


@pytest.mark.torture
def test_a_job_that_is_ended_and_queued_again_goes_on_with_its_run(
    tunedeck: Tunedeck, files: tuple[Path, Path], path: str, tmp_path: Path
) -> None:
    tunedeck("launch", "-p", files[0], "-r", files[1], "--slurm", "--set", "train.max_steps=300")
    script, job = tmp_path / "mine.sbatch", job_number()
    first = started(script, path, **job)
    wait_for_step(tmp_path, 12)
    for agent in psutil.Process(first.pid).children(recursive=True):
        # As Slurm does it: the step is asked to end, not the script.
        if agent.cmdline()[1:4] == ["-P", "-m", "torch.distributed.run"]:
            agent.terminate()
    assert ends(first, script) != 0
    stopped = events(tmp_path)[-1]
    assert (stopped["kind"], stopped["status"]) == ("run_finished", "stopped")
    assert ends(started(script, path, **job), script) == 0
    told = events(tmp_path)
    assert told[-1]["status"] == "done" and of_kind(told, "resumed")[0]["step"] >= 12
    before = len(told)
    assert ends(started(script, path, **job), script) == 0, "a job that is done is done"
    assert len(events(tmp_path)) == before


@pytest.mark.torture
def test_a_skypilot_task_trains_one_run_on_two_nodes(
    tunedeck: Tunedeck, files: tuple[Path, Path], tmp_path: Path
) -> None:
    tunedeck("launch", "-p", files[0], "-r", files[1], "--skypilot", "--set", "train.max_steps=4")
    task = yaml.safe_load((tmp_path / "mine.sky.yaml").read_text())
    script = tmp_path / "run.sh"
    script.write_text(task["run"])
    sky = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_TASK_ID": "sky-1", **task["envs"]}
    nodes = [started(script, os.environ["PATH"], **sky, SKYPILOT_NODE_RANK=str(rank)) for rank in range(2)]
    assert [ends(node, script) for node in nodes] == [0, 0]
    assert of_kind(events(tmp_path), "run_started")[0]["world_size"] == 2
    assert events(tmp_path)[-1]["status"] == "done"


def test_a_skypilot_task_asks_for_machines_and_brings_the_recipes_files(
    tunedeck: Tunedeck, files: tuple[Path, Path], tmp_path: Path
) -> None:
    nodes = '[nodes]\ncount = 2\ncloud = "aws"\naccelerators = "H100"\n'
    profile = write_profile(
        tmp_path, ('"cpu"', '"cuda"'), ("memory_gib = 8.0\n", f"memory_gib = 79.1\ncount = 4\n\n"
        f'[parallel]\nstrategy = "replicated"\n\n{nodes}'), name="clouds",
    )  # fmt: skip
    outcome = tunedeck("launch", "-p", profile, "-r", files[1], "--skypilot", "--setup", "echo ready")
    assert outcome.code == 0, outcome.err
    task = yaml.safe_load((tmp_path / "mine.sky.yaml").read_text())
    assert task["num_nodes"] == 2 and task["resources"] == {"cloud": "aws", "accelerators": "H100:4"}
    assert {str(tmp_path / "data.jsonl"), str(tmp_path / "mine.sky.run.toml")} == set(task["file_mounts"])
    assert task["run"].startswith("echo ready\n") and "--nproc-per-node=4" in task["run"]


def test_what_a_profile_of_someone_else_says_cannot_become_a_command(tunedeck: Tunedeck, tmp_path: Path) -> None:
    profile = write_profile(tmp_path, ("memory_gib = 8.0\n", 'memory_gib = 8.0\n\n[nodes]\npartition = "a; rm b"\n'))
    outcome = tunedeck("launch", "-p", profile, "-r", "demo", "--slurm")
    outcome.complains(2, "nodes.partition", "a; rm b")
    assert not (tmp_path / "demo.sbatch").exists()


def test_a_script_that_was_edited_is_not_replaced(tunedeck: Tunedeck, tmp_path: Path) -> None:
    assert tunedeck("launch", "-p", "demo-2", "-r", "demo", "--slurm").code == 0
    assert tunedeck("launch", "-p", "demo-2", "-r", "demo", "--slurm").code == 0, "the same again is no loss"
    script = tmp_path / "demo.sbatch"
    script.write_text(script.read_text() + "# mine\n")
    tunedeck("launch", "-p", "demo-2", "-r", "demo", "--slurm").complains(2, "demo.sbatch", "--out FILE")
    assert script.read_text().endswith("# mine\n")


def test_a_launcher_must_be_named(tunedeck: Tunedeck, files: tuple[Path, Path]) -> None:
    tunedeck("launch", "-p", files[0], "-r", files[1]).complains(2, "nodes.launcher", "--target, with one of: slurm")
    tunedeck("launch", "-p", files[0], "-r", files[1], "--slurm", "--skypilot").complains(2, "exclude each other")


def test_a_profile_of_several_machines_is_not_started_on_one(
    tunedeck: Tunedeck, files: tuple[Path, Path], tmp_path: Path
) -> None:
    for command in (["train"], ["queue", "add"]):
        tunedeck(*command, "-p", files[0], "-r", files[1]).complains(2, "2 machines", "tunedeck launch")
    assert not list((tmp_path / "runs").glob("2*"))
