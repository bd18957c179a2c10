"""A run that is killed at any moment can continue: its losses and weights are those of a run without interruption.

`make torture` kills at every file operation and at more than a hundred random moments; a seeded handful runs always.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config.schema.run import RunSpec
from engine.journal.checkpoints_on_disk import damage, find_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.events import Event
from tests.events import read_events
from tests.train.crash_server import CrashServer, Death
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, write_samples

NEVER = Death()
SEED = 20261121
TABLES: dict[str, dict[str, Any]] = {
    "data": {"valid_fraction": 0.2},
    "train": {"batch_size": 4, "micro_batch": 2, "learning_rate": 2e-3, "warmup_steps": 2},
    "eval": {"every_steps": 3, "limit": 4},
    "checkpoint": {"every_steps": 2, "every_minutes": 0, "keep": 2, "result": "best"},
}
IN_A_CHECKPOINT = ("checkpoints/.step-*", "checkpoints/.step-*/weights/*", "checkpoints/.step-*/manifest.json",
                   "checkpoints/.step-*.gone.*", "checkpoints/.best", ".model.*")  # fmt: skip
"""What is only there while a checkpoint is written, an old one removed, the best marked, the result put in place."""


@dataclass(frozen=True)
class Undisturbed:
    """The run that was not disturbed."""

    spec: RunSpec
    losses: dict[int, float]
    scores: dict[int, float]
    weights: dict[str, torch.Tensor]
    seconds: float


@pytest.fixture(scope="module")
def server() -> Iterator[CrashServer]:
    with CrashServer() as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, server: CrashServer) -> Undisturbed:
    return left_alone(server, tmp_path_factory.mktemp("undisturbed"), max_steps=20)


def left_alone(server: CrashServer, folder: Path, *, max_steps: int) -> Undisturbed:
    tables: dict[str, Any] = {**TABLES, "train": {**TABLES["train"], "max_steps": max_steps}}
    spec = make_spec(write_samples(folder / "samples.jsonl"), device="cpu", **tables)
    place = new_run(folder / "runs", spec)
    ended = server.run(place.path, NEVER, resume=False)
    assert ended.code == 0, place.log.read_text()
    events = list(read_events(place.events))
    weights = load_file(place.model / "model.safetensors")
    return Undisturbed(spec, losses(events), scores(events), weights, ended.seconds)


def scores(events: list[Event]) -> dict[int, float]:
    return {event["step"]: event["metrics"]["loss"] for event in of_kind(events, "eval")}


def assert_as_if_nothing_happened(place: RunDirectory, undisturbed: Undisturbed) -> None:
    """Assert that losses, scores and weights are equal to the bit, every step has one event, and no file is left
    half-written."""
    events = list(read_events(place.events))
    assert losses(events) == undisturbed.losses
    assert scores(events) == undisturbed.scores
    found = load_file(place.model / "model.safetensors")
    assert found.keys() == undisturbed.weights.keys()
    assert all(torch.equal(found[name], undisturbed.weights[name]) for name in found)
    assert [event["step"] for event in of_kind(counted(events), "step")] == list(undisturbed.losses)
    assert of_kind(events, "run_finished")[-1]["samples_lost"] == 0
    lines = place.events.read_bytes().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert [damage(checkpoint) for checkpoint in find_checkpoints(place.checkpoints)].count(None) >= 2
    assert not [*place.checkpoints.glob(".*"), *place.path.glob(".model.*")]


def counted(events: list[Event]) -> list[Event]:
    """The events that remain valid: a `resumed` event makes earlier events of later steps invalid."""
    kept: list[Event] = []
    for event in events:
        if event["kind"] == "resumed":
            kept = [earlier for earlier in kept if earlier.get("step", 0) <= event["step"]]
        kept.append(event)
    return kept


def kill(server: CrashServer, runs: Path, undisturbed: Undisturbed, deaths: Iterator[Death], count: int) -> None:
    """Kill engines until `count` have died; a run is killed again and again until it ends, then the next begins."""
    killed = started = 0
    while killed < count:
        place = new_run(runs, undisturbed.spec)
        started += 1
        ended = server.run(place.path, next(deaths), resume=False)
        while ended.code == -9:
            killed += 1
            ended = server.run(place.path, next(deaths) if killed < count else NEVER, resume=True)
        assert ended.code == 0, place.log.read_text()
        assert_as_if_nothing_happened(place, undisturbed)
    sys.stdout.write(f"\n{killed} kills in {started} runs, seed {SEED}: losses, scores and weights equal every time\n")


def random_moments(drawn: random.Random, seconds: float) -> Iterator[Death]:
    """Yield random moments to kill an engine that would live for `seconds`: a random time, or the writing of a
    checkpoint."""
    while True:
        any_time = drawn.random() < 0.7
        yield Death(after_seconds=drawn.uniform(0, seconds)) if any_time else Death(seen=drawn.choice(IN_A_CHECKPOINT))


def random_operations(drawn: random.Random) -> Iterator[Death]:
    """Yield deaths at random file operations, which fall into the first few steps of an engine."""
    while True:
        yield Death(at_operation=drawn.randint(1, 150))


def test_a_handful_of_random_kills_changes_nothing(
    server: CrashServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    kill(server, tmp_path, undisturbed, random_moments(random.Random(SEED), undisturbed.seconds), 4)


def test_a_handful_of_kills_before_file_operations_changes_nothing(
    server: CrashServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    kill(server, tmp_path, undisturbed, random_operations(random.Random(SEED)), 3)


@pytest.mark.torture
def test_a_hundred_random_kills_change_nothing(server: CrashServer, undisturbed: Undisturbed, tmp_path: Path) -> None:
    kill(server, tmp_path, undisturbed, random_moments(random.Random(SEED), undisturbed.seconds), 120)


@pytest.mark.torture
def test_a_kill_before_each_file_operation_of_a_run_changes_nothing(server: CrashServer, tmp_path: Path) -> None:
    undisturbed = left_alone(server, tmp_path, max_steps=7)
    whole = server.run(new_run(tmp_path, undisturbed.spec).path, Death(at_operation=10**9), resume=False)
    each = ((Death(at_operation=number), NEVER) for number in range(1, whole.operations + 1))
    kill(server, tmp_path, undisturbed, chain.from_iterable(each), whole.operations)
