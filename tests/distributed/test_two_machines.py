"""A run on two "machines" (network namespaces): one of them is killed, and the run goes on to the same result.

The machines' own names resolve to 127.0.1.1, their folders for caches are different, and only the folder of runs is
shared. The scripts of `tunedeck launch` start the run; srun and scontrol are stand-ins.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from engine.journal.directory import RunDirectory
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import make_run, write_profile, write_recipe
from tests.distributed.namespaces import ADDRESSES, Machine, machines
from tests.distributed.supervised import events, wait_for_step
from tests.distributed.test_launch_scripts import TWO_NODES
from tests.train.run_helpers import losses, of_kind, train

LIMIT_SECONDS = 300.0

STEPS = 40

OWN_FOLDERS = ("XDG_CACHE_HOME", "HF_HOME", "TUNEDECK_STATE")

SRUN = """\
#!/bin/bash
# A task on each machine, side by side. The task of a machine that was killed is started again.
while [[ "$1" == --* ]]; do shift; done
holders=({holders}) names=({names})
task() {{
    local node=$1; shift
    while :; do
        nsenter -t ${{holders[$node]}} -n -m -u env SLURM_NODEID=$node SLURMD_NODENAME=${{names[$node]}} \\
            {own_folders} "$@"
        code=$?
        [ $code = 137 ] || return $code
        echo "started again on ${{names[$node]}}"
    done
}}
for node in 0 1; do task $node "$@" & pids+=($!); done
for pid in "${{pids[@]}}"; do wait "$pid" || code=$?; done
exit ${{code:-0}}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A profile of two machines and a recipe."""
    recipe = write_recipe(
        tmp_path, ("max_steps = 2", f"max_steps = {STEPS}"), ("every_steps = 1", "every_steps = 10"),
        ("learning_rate = 1e-3", "learning_rate = 0.03"),
    )  # fmt: skip
    return write_profile(tmp_path, ("memory_gib = 8.0\n", TWO_NODES)), recipe


def own_folders(folder: Path, number: int) -> dict[str, str]:
    """Environment variables with the folders that each machine has for itself."""
    return {name: str(folder / f"machine-{number}" / name) for name in OWN_FOLDERS}


def start_slurm_job(script: Path, pair: Sequence[Machine], folder: Path) -> list[subprocess.Popen[str]]:
    """Run the batch script on the first machine, as Slurm does."""
    programs = folder / "bin"
    programs.mkdir()
    names = [machine.name for machine in pair]
    srun = SRUN.format(
        holders=" ".join(str(machine.holder) for machine in pair),
        names=" ".join(names),
        own_folders=" ".join(f"{name}={folder}/machine-$node/{name}" for name in OWN_FOLDERS),
    )
    for name, text in {"srun": srun, "scontrol": f"#!/bin/bash\nprintf '%s\\n' {' '.join(names)}\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "node-[0-1]", "PATH": f"{programs}:{os.environ['PATH']}"}
    return [started(pair[0], script, job)]


def start_sky_task(script: Path, pair: Sequence[Machine], folder: Path) -> list[subprocess.Popen[str]]:
    """Run the task on each machine, as SkyPilot does."""
    sky = {
        "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
        "SKYPILOT_TASK_ID": "sky-1",
        "TUNEDECK_RUNS": str(folder / "runs"),
    }
    return [
        started(machine, script, {**sky, **own_folders(folder, number), "SKYPILOT_NODE_RANK": str(number)})
        for number, machine in enumerate(pair)
    ]


def started(machine: Machine, script: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start the script on the machine, with its output in a log file beside it."""
    everywhere = {name: value for name, value in os.environ.items() if name != "TUNEDECK_CACHE"}
    with script.with_suffix(".log").open("a") as log:
        return machine.start(
            "bash", str(script), stdout=log, stderr=log,
            env={**everywhere, "TUNEDECK_PYTHON": sys.executable, **environment},
        )  # fmt: skip


def the_run(folder: Path) -> RunDirectory:
    """The only run in the folder; waits until it exists."""
    wait_until(lambda: bool(list((folder / "runs").glob("2*/events.jsonl"))))
    (found,) = (folder / "runs").glob("2*/events.jsonl")
    return RunDirectory(found.parent)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def equals_one_process(place: RunDirectory, recipe: Path, folder: Path) -> None:
    """Require the losses and weights of a run on one device that nothing disturbed."""
    folder.mkdir()
    alone = make_run(folder, recipe)
    code, told = train(alone)
    assert code == 0
    expected = losses(told)
    assert len(expected) == STEPS and losses(events(place)) == pytest.approx(expected, rel=1e-5)
    weights, same = (load_file(each.path / "model" / "model.safetensors") for each in (alone, place))
    for name, value in weights.items():
        assert torch.allclose(same[name], value, rtol=1e-5, atol=1e-6), name


def tokenised_once(folder: Path) -> None:
    """Require that the tokens are in the shared folder, and in no machine's own."""
    assert list((folder / "runs" / ".cache").rglob("*")), "the tokens are shared"
    assert not [file for number in range(2) for file in (folder / f"machine-{number}").rglob("tunedeck/**/*")]


def went_on(place: RunDirectory) -> None:
    """Require that the run was resumed after its first checkpoint, on both machines, and that it ended well."""
    told = events(place)
    assert [event["world_size"] for event in of_kind(told, "run_started")] == [2, 2]
    assert of_kind(told, "resumed")[0]["step"] >= 10
    assert (told[-1]["kind"], told[-1]["status"]) == ("run_finished", "done")


def test_a_slurm_job_goes_on_when_a_killed_machine_is_back(
    tunedeck: Tunedeck, files: tuple[Path, Path], tmp_path: Path
) -> None:
    assert tunedeck("launch", "-p", files[0], "-r", files[1], "--slurm").code == 0
    with machines(tmp_path) as pair:
        (job,) = start_slurm_job(tmp_path / "mine.sbatch", pair, tmp_path)
        place = the_run(tmp_path)
        wait_for_step(place, 12)
        pair[1].kill_processes()
        assert job.wait(timeout=LIMIT_SECONDS) == 0
    assert "started again on node-1" in (tmp_path / "mine.log").read_text()
    went_on(place)
    tokenised_once(tmp_path)
    equals_one_process(place, files[1], tmp_path / "alone")


@pytest.mark.torture
def test_a_machine_that_falls_silent_is_lost_within_the_time_limit(
    tunedeck: Tunedeck, files: tuple[Path, Path], tmp_path: Path
) -> None:
    """No connection is closed: what a machine without power is to the others."""
    short = ["--set", "parallel.timeout_seconds=20"]
    assert tunedeck("launch", "-p", files[0], "-r", files[1], "--slurm", *short).code == 0
    with machines(tmp_path) as pair:
        (job,) = start_slurm_job(tmp_path / "mine.sbatch", pair, tmp_path)
        place = the_run(tmp_path)
        wait_for_step(place, 12)
        with pair[1].cut_off():
            pair[1].kill_processes()
            wait_until(lambda: "rank_lost" in [event.get("code") for event in events(place)])
        assert job.wait(timeout=LIMIT_SECONDS) == 0
    went_on(place)
    equals_one_process(place, files[1], tmp_path / "alone")


@pytest.mark.torture
def test_a_sky_task_that_is_recovered_after_a_machine_was_killed_goes_on(
    tunedeck: Tunedeck, files: tuple[Path, Path], tmp_path: Path
) -> None:
    assert tunedeck("launch", "-p", files[0], "-r", files[1], "--skypilot").code == 0
    script = tmp_path / "run.sh"
    script.write_text(yaml.safe_load((tmp_path / "mine.sky.yaml").read_text())["run"])
    with machines(tmp_path) as pair:
        first = start_sky_task(script, pair, tmp_path)
        place = the_run(tmp_path)
        wait_for_step(place, 12)
        for machine in reversed(pair):  # a lost machine ends the task, and SkyPilot starts it again with its id
            machine.kill_processes()
        assert [node.wait(timeout=LIMIT_SECONDS) for node in first] == [-9, -9]
        again = start_sky_task(script, pair, tmp_path)
        assert [node.wait(timeout=LIMIT_SECONDS) for node in again] == [0, 0]
    went_on(place)
    tokenised_once(tmp_path)
    equals_one_process(place, files[1], tmp_path / "alone")
