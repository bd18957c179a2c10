"""A run that was killed, stopped or paused continues after a resume with the same losses and the same weights, to the
bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config.schema.run import RunSpec
from engine.journal import control
from engine.journal.checkpoints_on_disk import find_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.events import EventTail
from engine.launch.process import start_engine
from tests.events import read_events
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, train, write_samples

TABLES: dict[str, Any] = {
    "train": {"max_steps": 18, "batch_size": 4, "micro_batch": 2, "learning_rate": 2e-3, "warmup_steps": 3},
    "checkpoint": {"every_steps": 5, "every_minutes": 0, "keep": 3},
}


Undisturbed = tuple[RunSpec, dict[int, float], dict[str, torch.Tensor]]
"""Spec, losses by step and weights of the run that was not disturbed."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """(spec, losses, weights) of a run that was not disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    spec = make_spec(write_samples(folder / "samples.jsonl"), **TABLES)
    place = new_run(folder / "runs", spec)
    code, events = train(place)
    assert code == 0
    return spec, losses(events), load_file(place.model / "model.safetensors")


def started_until_step(place: RunDirectory, step: int, *, resume: bool = False) -> subprocess.Popen[bytes]:
    """Start a real engine process and return it once it has finished `step`."""
    tail = EventTail(place.events)
    process = start_engine(place, resume=resume)
    while process.poll() is None:
        if any(event["kind"] == "step" and event["step"] >= step for event in tail.poll()):
            return process
        time.sleep(0.005)  # the engine needs the processor more
    raise AssertionError(f"the engine ended with {process.returncode} before step {step}:\n{place.log.read_text()}")


def assert_same(place: RunDirectory, undisturbed: Undisturbed) -> None:
    _, expected, weights = undisturbed
    assert losses(list(read_events(place.events))) == expected
    found = load_file(place.model / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("step", [7, 12])
def test_a_killed_run_resumes_bit_for_bit(undisturbed: Undisturbed, tmp_path: Path, step: int) -> None:
    place = new_run(tmp_path, undisturbed[0])
    process = started_until_step(place, step)
    process.send_signal(signal.SIGKILL)
    process.wait()
    code, events = train(place, resume=True)
    assert code == 0
    assert of_kind(events, "resumed")[0]["step"] in (step // 5 * 5, (step // 5 + 1) * 5)
    assert_same(place, undisturbed)


def test_a_run_killed_before_its_first_checkpoint_starts_over(undisturbed: Undisturbed, tmp_path: Path) -> None:
    place = new_run(tmp_path, undisturbed[0])
    process = started_until_step(place, 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for checkpoint in find_checkpoints(place.checkpoints):
        pytest.skip(f"the engine was quicker than the signal: {checkpoint.path.name}")
    assert train(place, resume=True)[0] == 0
    assert_same(place, undisturbed)


@pytest.mark.parametrize("how", ["signal", "stop", "pause"])
def test_an_asked_for_end_writes_a_checkpoint_and_exits_130(undisturbed: Undisturbed, tmp_path: Path, how: str) -> None:
    place = new_run(tmp_path, undisturbed[0])
    process = started_until_step(place, 3)
    if how == "signal":
        os.kill(process.pid, signal.SIGTERM)
    else:
        control.send_request(place, how)
    assert process.wait() == 130
    events = list(read_events(place.events))
    last = of_kind(events, "step")[-1]["step"]
    assert find_checkpoints(place.checkpoints)[0].step == last
    finished = of_kind(events, "run_finished")[-1]
    assert (finished["status"], finished["exit_code"]) == ("paused" if how == "pause" else "stopped", 130)
    assert train(place, resume=True)[0] == 0
    assert_same(place, undisturbed)


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(undisturbed: Undisturbed, tmp_path: Path) -> None:
    place = new_run(tmp_path, undisturbed[0])
    process = started_until_step(place, 11)
    process.kill()
    process.wait()
    newest = find_checkpoints(place.checkpoints)[0]
    optimizer = newest.path / "optimizer.safetensors"
    flipped = bytearray(optimizer.read_bytes())
    flipped[-8] ^= 1
    optimizer.write_bytes(bytes(flipped))
    code, events = train(place, resume=True)
    assert code == 0
    assert "damaged_checkpoint" in [event["code"] for event in of_kind(events, "warning")]
    assert of_kind(events, "resumed")[-1]["step"] < newest.step
    assert_same(place, undisturbed)


def test_a_checkpoint_on_request_is_answered_and_written(undisturbed: Undisturbed, tmp_path: Path) -> None:
    place = new_run(tmp_path, undisturbed[0])
    process = started_until_step(place, 2)
    control.send_request(place, "checkpoint")
    assert process.wait() == 0
    events = list(read_events(place.events))
    assert of_kind(events, "control")[0]["accepted"] is True
    assert any(event["reason"] == "asked for" for event in of_kind(events, "checkpoint_saved"))
    assert_same(place, undisturbed)


def test_other_data_is_refused(undisturbed: Undisturbed, tmp_path: Path) -> None:
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), **TABLES)
    place = new_run(tmp_path / "runs", spec)
    process = started_until_step(place, 6)
    process.kill()
    process.wait()
    write_samples(tmp_path / "samples.jsonl", seed=99)
    code, events = train(place, resume=True)
    assert code == 2
    assert "different data" in of_kind(events, "run_finished")[-1]["error"]


@pytest.mark.parametrize(("key", "code"), [("batch_size", 2), ("log_every_steps", 0)])
def test_a_run_spec_edited_by_hand_is_refused_where_a_resume_may_not_change_it(
    tmp_path: Path, key: str, code: int
) -> None:
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), train={"max_steps": 2, "log_every_steps": 1})
    place = new_run(tmp_path / "runs", spec)
    assert train(place)[0] == 0
    text = place.run_toml.read_text().replace("max_steps = 2\n", "max_steps = 3\n")
    edited = re.sub(rf"(?m)^{key} = .*$", f"{key} = 2", text)
    assert edited != text
    place.run_toml.write_text(edited)
    found, events = train(place, resume=True)
    assert found == code
    if code:
        assert "train.batch_size: 8 -> 2" in of_kind(events, "run_finished")[-1]["error"]
