"""Several processes on one run or queue, processes that stand still, and a disk that turns read-only under a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.journal.directory import RunDirectory
from engine.journal.liveness import identify
from engine.journal.summary import summarise
from engine.launch.process import ENTRY_FILE
from engine.train.run.main import _describe
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe
from tests.events import read_events
from tests.journal.waiting import until


def steps_of(run: RunDirectory) -> list[int]:
    return [event["step"] for event in read_events(run.events) if event["kind"] == "step"]


def test_an_engine_that_is_stopped_for_a_while_keeps_its_run_and_goes_on(
    started: tuple[RunDirectory, int], tunedeck: Tunedeck
) -> None:
    run, pid = started
    os.killpg(pid, signal.SIGSTOP)
    until(lambda: summarise(run).phase.startswith("suspended"), seconds=120.0)
    step = summarise(run).step
    assert summarise(run).status == "running"
    tunedeck("resume", run.name).complains(6, f"process {pid}")
    os.killpg(pid, signal.SIGCONT)
    until(lambda: summarise(run).step > step, seconds=120.0)
    words = [sys.executable, "-P", ENTRY_FILE, "stop", run.path]
    consoles = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [console.wait() for console in consoles] == [0, 0, 0]
    until(lambda: identify(pid) is None, seconds=120.0)
    assert summarise(run).status == "stopped"
    assert steps_of(run) == list(range(1, summarise(run).step + 1))


def test_of_two_queue_workers_one_works_and_no_run_starts_twice(tmp_path: Path, tunedeck: Tunedeck) -> None:
    asked = ("-p", write_profile(tmp_path), "-r", write_recipe(tmp_path))
    for name in ("one", "two"):
        assert tunedeck("queue", "add", *asked, "--name", name).code == 0
    words = [sys.executable, "-P", ENTRY_FILE, "queue", "start"]
    both = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    codes = [each.wait() for each in both]
    assert 0 in codes and set(codes) <= {0, 6}
    for path in (tmp_path / "runs").iterdir():
        if path.name.startswith("."):
            continue
        kinds = Counter(event["kind"] for event in read_events(path / "events.jsonl"))
        assert (kinds["run_started"], kinds["run_finished"]) == (1, 1)


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that may be made read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_runs_folder_that_becomes_read_only_ends_the_engine_and_resume_goes_on(
    own_disk: Path, tmp_path: Path, tunedeck: Tunedeck
) -> None:
    more = "\n[backoff]\ngrow = false\n"
    recipe = write_recipe(
        tmp_path, ("max_steps = 2", "max_steps = 400"), ("every_steps = 1", "every_steps = 5"), more=more
    )
    words = [sys.executable, "-P", ENTRY_FILE, "train", "-p", write_profile(tmp_path), "-r", recipe, "--runs", own_disk]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as engine:
        until(lambda: bool(list(own_disk.glob("*/checkpoints/step-*"))), seconds=120.0)
        # With files open for writing the kernel refuses; a disk that fails does not ask.
        made = subprocess.run(["mount", "-o", "remount,ro", own_disk], capture_output=True, check=False)
        if made.returncode != 0:
            engine.terminate()
            engine.wait()
            pytest.skip("a disk in use cannot be made read-only here")
        told, _ = engine.communicate()
    assert engine.returncode not in (0, 1) and "Traceback" not in told, told
    subprocess.run(["mount", "-o", "remount,rw", own_disk], check=True)
    (run,) = [RunDirectory(path) for path in own_disk.iterdir() if (path / "run.toml").exists()]
    assert tunedeck("resume", run.path, "--set", "train.max_steps=400").code == 0
    assert summarise(run).status == "done" and steps_of(run)[-1] == 400


@pytest.mark.parametrize("text", ["GPU is lost", "uncorrectable ECC error encountered"])
def test_a_card_that_is_lost_ends_the_run_with_what_to_do(text: str, tmp_path: Path) -> None:
    """CUDA's own words; the card itself cannot be taken away here."""
    error = torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported", 999)
    status, code, told = _describe(error, RunDirectory(tmp_path / "one"))
    assert (status, code) == ("failed", 6)
    assert "the device failed" in told and "tunedeck resume one" in told and "asynchronously" not in told
