"""Checkpoint folders: a checkpoint is complete or absent, is used only if its hashes match, and the best one is kept
separately."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from pathlib import Path

import pytest
from safetensors import SafetensorError

from engine.journal import checkpoints_on_disk
from engine.journal.checkpoints_on_disk import (
    Checkpoint,
    best_step,
    damage,
    find_checkpoints,
    hashes_of,
    newest_sound,
)
from engine.train.run.checkpoint_files import forget_after, mark_best, place_result, prune, write_checkpoint


def fill(path: Path) -> None:
    (path / "weights").mkdir()
    (path / "weights" / "model.safetensors").write_bytes(b"w" * 100)
    (path / "state.json").write_text(json.dumps({"step": 1}))


def write(folder: Path, *steps: int) -> list[Checkpoint]:
    return [write_checkpoint(folder, step, fill) for step in steps]


def test_what_was_written_is_found_newest_first(tmp_path: Path) -> None:
    write(tmp_path, 3, 20, 100)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [100, 20, 3]
    assert all(damage(checkpoint) is None for checkpoint in find_checkpoints(tmp_path))


def test_a_full_disk_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def full(path: Path) -> None:
        fill(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_checkpoint(tmp_path, 2, full)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


def test_a_full_disk_is_recognised_in_the_words_of_the_library_that_met_it(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        fill(path)
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError) as caught:
        write_checkpoint(tmp_path, 1, full)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["flip", "shorten", "remove", "manifest", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, harm: str) -> None:
    _, newest = write(tmp_path, 1, 2)
    weights = newest.weights / "model.safetensors"
    if harm == "flip":
        weights.write_bytes(b"x" + b"w" * 99)
    elif harm == "shorten":
        weights.write_bytes(b"w" * 50)
    elif harm == "remove":
        weights.unlink()
    elif harm == "manifest":
        (newest.path / "manifest.json").write_text('{"files": ')
    else:
        (newest.path / "manifest.json").unlink()
    found, complaints = newest_sound(tmp_path)
    assert found is not None and found.step == 1
    assert len(complaints) == 1 and "step-00000002" in complaints[0]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4)
    mark_best(tmp_path, 1, "loss", 0.5)
    (tmp_path / ".step-00000009.1").mkdir()
    prune(tmp_path, keep=2)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [4, 3, 1]
    assert best_step(tmp_path) == 1
    assert not list(tmp_path.glob(".step-*"))


def test_going_back_forgets_what_came_later(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    forget_after(tmp_path, 1)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [1]


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    write(tmp_path, 5)
    (again,) = write(tmp_path, 5)
    assert damage(again) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_the_result_is_the_checkpoints_weights_and_replaces_an_older_one(tmp_path: Path) -> None:
    (checkpoint,) = write(tmp_path / "checkpoints", 5)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("old")
    place_result(checkpoint, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model"]


def test_large_files_are_hashed_side_by_side_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / str(number) for number in range(5)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 1000)
    alone = hashes_of(files)
    threads = set()
    whole = checkpoints_on_disk.sha256

    def noting(path: Path) -> str:
        threads.add(threading.current_thread().name)
        return whole(path)

    monkeypatch.setattr(checkpoints_on_disk, "LARGE_BYTES", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(checkpoints_on_disk, "sha256", noting)
    assert hashes_of(files) == alone == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert threading.main_thread().name not in threads
