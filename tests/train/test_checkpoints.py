"""Checkpoint folders: a checkpoint is complete or absent, is used only if its hashes match, and the best one is kept
separately."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors import SafetensorError

from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.distributed.votes import LostRankError
from engine.journal import checkpoints_on_disk
from engine.journal.checkpoints_on_disk import (
    Checkpoint,
    best_step,
    damage,
    find_checkpoints,
    hashes_of,
    newest_sound,
)
from engine.journal.control import RunRequests
from engine.train.run.checkpoint_files import forget_after, mark_best, place_result, prune, write_checkpoint
from engine.train.run.checkpoints import asked_to_end
from engine.train.run.run_state import RunState, damage_for_resume
from tests.train.run_helpers import make_spec, new_run, of_kind, train, write_samples


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


GOOD = {"size": 100, "sha256": "0" * 64}
MANIFESTS = {
    "a number for facts": {"files": {"state.json": 1}},
    "no hash": {"files": {"state.json": {"size": 1}}},
    "no files": {"files": {}},
    "a list of files": {"files": ["state.json"]},
    "a list": [1],
    "a size in words": {"files": {"state.json": {"size": "1", "sha256": "0"}}},
    "a path out of the checkpoint": {"files": {"../step-00000001/state.json": GOOD}},
    "an absolute path": {"files": {"/etc/passwd": GOOD}},
    "a NUL": {"files": {"a\0b": GOOD}},
    "a name that is too long": {"files": {"a" * 5000: GOOD}},
}


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_of_another_shape_is_a_damaged_checkpoint(tmp_path: Path, manifest: object) -> None:
    _, newest = write(tmp_path, 1, 2)
    (newest.path / "manifest.json").write_text(json.dumps(manifest))
    found, complaints = newest_sound(tmp_path)
    assert found is not None and found.step == 1
    assert len(complaints) == 1 and "step-00000002" in complaints[0]


def test_no_nesting_and_no_name_of_a_folder_hides_a_sound_checkpoint(tmp_path: Path) -> None:
    _, newest = write(tmp_path, 1, 2)
    (newest.path / "manifest.json").write_text("[" * 100_000)
    (tmp_path / ("step-" + "9" * 200)).mkdir()
    (tmp_path / "step-00000003").write_text("")
    found, complaints = newest_sound(tmp_path)
    assert found is not None and found.step == 1 and len(complaints) == 2


SOUND_STATE = {
    "state": asdict(RunState(step=2)),
    "identity": {},
    "budget": {"budget_bytes": 1},
    "remedies": dict.fromkeys(
        ("checkpointing", "chunk_tokens", "activation_offload", "optimizer_offload", "max_length")
    ),
    "standing": [],
    "scaler": {"enabled": False},
    "settings": {},
}
HARMED = {
    "a list": [1],
    "of another step": {**SOUND_STATE, "state": asdict(RunState(step=9))},
    "a step in words": {**SOUND_STATE, "state": {**asdict(RunState()), "step": "two"}},
    "no best": {**SOUND_STATE, "state": {"step": 2}},
    "no budget": {name: table for name, table in SOUND_STATE.items() if name != "budget"},
    "settings of another shape": {**SOUND_STATE, "settings": [1]},
    "an unknown remedy": {**SOUND_STATE, "remedies": {"x": 1}},
    "standing of another shape": {**SOUND_STATE, "standing": [1]},
}


@pytest.mark.parametrize("state", HARMED.values(), ids=HARMED)
def test_a_state_of_another_shape_is_a_damaged_checkpoint(tmp_path: Path, state: object) -> None:
    def fill_with(content: object) -> Callable[[Path], None]:
        def write_state(path: Path) -> None:
            (path / "state.json").write_text(json.dumps(content))

        return write_state

    sound = write_checkpoint(tmp_path, 2, fill_with(SOUND_STATE))
    assert damage_for_resume(sound) is None
    harmed = write_checkpoint(tmp_path, 2, fill_with(state))
    assert damage(harmed) is None and "state.json" in str(damage_for_resume(harmed))


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


def test_a_rank_that_is_ended_while_all_wait_for_room_has_lost_another_one() -> None:
    requests = RunRequests(None, None, None)
    with requests.handling_signals():
        assert not asked_to_end(requests, Ranks(size=2))
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked_to_end(requests, SINGLE_PROCESS)
        with pytest.raises(LostRankError, match="another rank ended"):
            asked_to_end(requests, Ranks(size=2))


def test_the_best_checkpoints_are_kept_beside_the_newest(tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "samples.jsonl", count=24)
    spec = make_spec(
        samples, device="cpu", train={"max_steps": 8, "learning_rate": 0.2}, data={"valid_fraction": 0.3},
        eval={"every_steps": 1}, checkpoint={"keep": 1, "keep_best": 3},
    )  # fmt: skip
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    values = {event["step"]: event["metrics"]["loss"] for event in of_kind(events, "eval")}
    best = sorted(values, key=lambda step: values[step])[:3]
    assert code == 0 and len(values) == 8
    assert {checkpoint.step for checkpoint in find_checkpoints(place.checkpoints)} == {8, *best}
    assert best_step(place.checkpoints) == best[0]
    place.run_toml.write_text(place.run_toml.read_text().replace("max_steps = 8", "max_steps = 11"))
    _, events = train(place, resume=True)
    values = {event["step"]: event["metrics"]["loss"] for event in of_kind(events, "eval")}
    best = sorted(values, key=lambda step: values[step])[:3]
    assert {checkpoint.step for checkpoint in find_checkpoints(place.checkpoints)} == {11, *best}
