"""On a full disk a run waits and reports this; when there is room again, it continues, and nothing is lost.

Needs a file system of its own that may be filled, so it runs only where one can be mounted (as root on Linux).
"""

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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        command: list[str | Path] = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk]
        mounted = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


STAGES = '\n[[stages]]\nname = "one"\n\n[[stages]]\nname = "two"\nfrom = "one"\n'


@pytest.mark.parametrize("more", ["", STAGES], ids=["a run", "a stage"])
def test_a_full_disk_makes_the_run_wait_and_room_lets_it_go_on(small_disk: Path, tmp_path: Path, more: str) -> None:
    ballast = fill(small_disk, left=2 << 20)  # room for the journal, none for a checkpoint of 3 MiB
    asked: list[str | Path] = ["-p", write_profile(tmp_path), "-r", write_recipe(tmp_path, more=more)]
    command: list[str | Path] = [sys.executable, "-P", ENTRY_FILE, "train", *asked]
    with subprocess.Popen([*command, "--runs", small_disk / "runs", "--json"], stdout=subprocess.PIPE) as process:
        kinds = []
        for line in process.stdout or ():
            event = json.loads(line)
            kinds.append(event["kind"])
            if event.get("code") == "disk_full":
                assert not list(small_disk.glob("runs/**/checkpoints/*")), "nothing half-written is left"
                ballast.unlink(missing_ok=True)
    assert process.returncode == 0
    assert kinds.index("warning") < kinds.index("checkpoint_saved")
    assert len(list(small_disk.glob("runs/**/model/model.safetensors"))) == (2 if more else 1)


def test_a_disk_that_fills_between_two_stages_makes_the_second_wait(small_disk: Path, tmp_path: Path) -> None:
    asked: list[str | Path] = ["-p", write_profile(tmp_path), "-r", write_recipe(tmp_path, more=STAGES)]
    command: list[str | Path] = [sys.executable, "-P", ENTRY_FILE, "train", *asked]
    with subprocess.Popen([*command, "--runs", small_disk / "runs", "--json"], stdout=subprocess.PIPE) as process:
        waited = []
        for line in process.stdout or ():
            event = json.loads(line)
            if (event["kind"], event.get("name")) == ("stage_finished", "one"):
                ballast = fill(small_disk, left=1 << 20)
            if event.get("code") == "disk_full":
                waited.append(event["stage"])
                ballast.unlink(missing_ok=True)
    assert (process.returncode, waited) == (0, ["two"])


def fill(disk: Path, *, left: int = 0) -> Path:
    """A file that leaves no room on `disk`, or so many bytes."""
    ballast, room = disk / "ballast", os.statvfs(disk)
    ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - left))
    return ballast


def test_a_small_file_that_finds_no_room_is_named(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(OSError) as caught:
        write_atomically(small_disk / "engine.json", "{}\n")
    problem = disk_problem(caught.value, "standard output")
    assert (
        problem is not None and problem.found == f"{small_disk}/engine.json cannot be written: No space left on device"
    )


def test_a_result_that_finds_no_room_is_an_error_that_a_run_waits_for(small_disk: Path, tmp_path: Path) -> None:
    weights = tmp_path / "step-00000001" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    fill(small_disk)
    with pytest.raises(OSError) as caught:
        place_result(Checkpoint(1, weights.parent), small_disk / "model")
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(small_disk / "model")
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_failing_disk_is_told_with_its_file(number: int, tmp_path: Path) -> None:
    status, code, text = _describe(OSError(number, os.strerror(number), "x/weights"), RunDirectory(tmp_path))
    assert (status, code) == ("failed", 6) and text.startswith("x/weights cannot be")
    assert "tunedeck resume" in text and "traceback" not in text
