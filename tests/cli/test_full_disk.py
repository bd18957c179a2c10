"""On a full disk a run waits and reports this; when there is room again, it continues, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import disk_problem
from engine.journal.checkpoints_on_disk import Checkpoint
from engine.journal.directory import RunDirectory
from engine.journal.files import write_atomically
from engine.launch.process import ENTRY_FILE
from engine.train.run.checkpoint_files import place_result
from engine.train.run.main import _describe
from tests.cli.small_recipes import write_profile, write_recipe
from tests.small_disk import fill, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path) as mounted:
        yield mounted


STAGES = '\n[[stages]]\nname = "one"\n\n[[stages]]\nname = "two"\nfrom = "one"\n'


@pytest.mark.parametrize("more", ["", STAGES], ids=["a run", "a stage"])
def test_a_full_disk_makes_the_run_wait_and_room_lets_it_go_on(disk: Path, tmp_path: Path, more: str) -> None:
    ballast = fill(disk, left=2 << 20)  # room for the journal, none for a checkpoint of 3 MiB
    asked: list[str | Path] = ["-p", write_profile(tmp_path), "-r", write_recipe(tmp_path, more=more)]
    command: list[str | Path] = [sys.executable, "-P", ENTRY_FILE, "train", *asked]
    with subprocess.Popen([*command, "--runs", disk / "runs", "--json"], stdout=subprocess.PIPE) as process:
        kinds = []
        for line in process.stdout or ():
            event = json.loads(line)
            kinds.append(event["kind"])
            if event.get("code") == "disk_full":
                assert not list(disk.glob("runs/**/checkpoints/*")), "nothing half-written is left"
                ballast.unlink(missing_ok=True)
    assert process.returncode == 0
    assert kinds.index("warning") < kinds.index("checkpoint_saved")
    assert len(list(disk.glob("runs/**/model/model.safetensors"))) == (2 if more else 1)


def test_a_disk_that_fills_between_two_stages_makes_the_second_wait(disk: Path, tmp_path: Path) -> None:
    asked: list[str | Path] = ["-p", write_profile(tmp_path), "-r", write_recipe(tmp_path, more=STAGES)]
    command: list[str | Path] = [sys.executable, "-P", ENTRY_FILE, "train", *asked]
    with subprocess.Popen([*command, "--runs", disk / "runs", "--json"], stdout=subprocess.PIPE) as process:
        waited = []
        for line in process.stdout or ():
            event = json.loads(line)
            if (event["kind"], event.get("name")) == ("stage_finished", "one"):
                ballast = fill(disk, left=1 << 20)
            if event.get("code") == "disk_full":
                waited.append(event["stage"])
                ballast.unlink(missing_ok=True)
    assert (process.returncode, waited) == (0, ["two"])


def test_a_small_file_that_finds_no_room_is_named(disk: Path) -> None:
    fill(disk)
    with pytest.raises(OSError) as caught:
        write_atomically(disk / "engine.json", "{}\n")
    problem = disk_problem(caught.value, "standard output")
    assert problem is not None and problem.found == f"{disk}/engine.json cannot be written: No space left on device"


def test_a_result_that_finds_no_room_is_an_error_that_a_run_waits_for(disk: Path, tmp_path: Path) -> None:
    weights = tmp_path / "step-00000001" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    fill(disk)
    with pytest.raises(OSError) as caught:
        place_result(Checkpoint(1, weights.parent), disk / "model")
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(disk / "model")
    assert [path.name for path in disk.iterdir()] == ["ballast"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_failing_disk_is_told_with_its_file(number: int, tmp_path: Path) -> None:
    status, code, text = _describe(OSError(number, os.strerror(number), "x/weights"), RunDirectory(tmp_path))
    assert (status, code) == ("failed", 6) and text.startswith("x/weights cannot be")
    assert "tunedeck resume" in text and "traceback" not in text
