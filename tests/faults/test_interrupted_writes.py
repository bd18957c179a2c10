"""What a failed write leaves of files that were complete before."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import disk_problem
from engine.journal.checkpoints_on_disk import damage, find_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.files import locked
from engine.train.run.checkpoint_files import place_result, prune, write_checkpoint
from engine.train.run.main import _forget_attempt
from tests.faults.failing_disk import MOVE, preload


def fill(draft: Path) -> None:
    (draft / "weights").mkdir()
    (draft / "weights" / "model.safetensors").write_bytes(b"weights")


RENAMES_FAIL = """
import sys
from pathlib import Path
from engine.journal.checkpoints_on_disk import Checkpoint
from engine.train.run.checkpoint_files import place_result, write_checkpoint

folder = Path(sys.argv[1])
fill = lambda draft: (draft / "new").write_text("x") and None
work = {
    "checkpoint": lambda: write_checkpoint(folder / "checkpoints", 2, fill),
    "result": lambda: place_result(Checkpoint(2, folder / "checkpoints" / "step-00000002"), folder / "model"),
}
try:
    work[sys.argv[2]]()
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize("what", ["checkpoint", "result"])
def test_what_is_complete_stays_complete_wherever_its_replacement_fails(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    for name in ("LD_PRELOAD", "FAILING_DISK"):
        monkeypatch.setenv(name, "")  # restored after the test
    disk = preload(tmp_path)
    folder = tmp_path / "run"
    number, failed = 0, True
    while failed:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "checkpoints").mkdir(parents=True)
        checkpoint = write_checkpoint(folder / "checkpoints", 2, fill)
        place_result(checkpoint, folder / "model")
        with disk.failing(folder, number, errno.EIO):
            done = subprocess.run(
                [sys.executable, "-P", "-c", RENAMES_FAIL, folder, what], capture_output=True, text=True, check=True,
                cwd=tmp_path,
            )  # fmt: skip
        failed = bool(disk.what)
        assert damage(checkpoint) is None, disk.what
        assert (folder / "model" / "model.safetensors").read_bytes() == b"weights" or not failed, disk.what
        assert done.stdout in ("", f"{errno.EIO}\n"), disk.what
    assert number > 5


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_moved_while_a_checkpoint_is_written_leaves_nothing_at_its_old_place(tmp_path: Path, fails: bool) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    folder = tmp_path / "runs" / "one" / "checkpoints"

    def move(draft: Path) -> None:
        fill(draft)
        (tmp_path / "runs").rename(tmp_path / "elsewhere")
        (draft / "weights").mkdir(parents=True)  # as save_pretrained does
        (draft / "weights" / "tokenizer.json").write_text("{}")
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output" if fails else "it was moved while a checkpoint was written"):
        write_checkpoint(folder, 2, move)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert find_checkpoints(tmp_path / "elsewhere" / "one" / "checkpoints") == []


def test_a_lock_stays_with_its_folder_and_makes_none(tmp_path: Path) -> None:
    before, moved = tmp_path / "before", tmp_path / "moved"
    before.mkdir()
    with locked(before / "lock"):
        before.rename(moved)
        with pytest.raises(TimeoutError), locked(moved / "lock", timeout_seconds=0.0):
            pass
    with pytest.raises(FileNotFoundError), locked(before / "lock"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_lock_whose_folder_is_moved_at_its_first_change_is_in_the_moved_one(tmp_path: Path) -> None:
    before, moved = tmp_path / "runs", tmp_path / "moved"
    before.mkdir()
    disk, lines = preload(tmp_path), "import sys, pathlib; from engine.journal.files import locked\n"
    lines += "with locked(pathlib.Path(sys.argv[1], 'lock')): pass"
    with disk.failing(before, 1, MOVE, moved=(before, moved)):
        subprocess.run([sys.executable, "-P", "-c", lines, str(before)], check=True)
    assert disk.what and not before.exists() and [path.name for path in moved.iterdir()] == ["lock"]


def test_a_record_of_the_best_that_was_not_finished_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".best.0123456789ab.tmp").write_text("{")
    (tmp_path / "best").write_text('{"step": 2}')
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_missing_permission_is_told_with_its_file(number: int) -> None:
    problem = disk_problem(OSError(number, os.strerror(number), "runs/one"), "standard output")
    assert problem is not None and problem.found.startswith("runs/one cannot be read or written")
    assert "permission" in problem.fix


def test_a_note_that_cannot_be_removed_does_not_hide_how_the_run_ended(tmp_path: Path) -> None:
    (tmp_path / "host_memory.json").mkdir()
    _forget_attempt(RunDirectory(tmp_path))
