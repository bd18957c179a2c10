"""The demo as a new user runs it: one command, a model that learns, and an out-of-memory error that costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.load import resolve
from engine.journal.directory import RunDirectory
from tests.events import read_events
from tests.fork_server import fresh_interpreters
from tests.train.run_helpers import Event, losses, new_run, of_kind, train

COMMAND = Path(__file__).resolve().parents[2] / "tunedeck.py"
SHORT = (
    "train.max_steps=8", "data.sources.dates.limit=4000",
    "eval.every_steps=", "eval.metrics=['loss']", "eval.samples=0",
)  # fmt: skip
"""What curves are compared over; no answers are generated, which the whole demo does."""


BEGINNING = ("--set", "train.max_steps=40", "--set", "eval.every_steps=40", "--set", "eval.limit=64")


@pytest.mark.parametrize(
    "sets", [BEGINNING, pytest.param((), marks=pytest.mark.torture)], ids=["its beginning", "the whole demo"]
)
def test_the_demo_learns_and_survives_without_losing_a_sample(sets: tuple[str, ...], tmp_path: Path) -> None:
    """Its first steps show that it learns; that all of them teach it the answers takes minutes."""
    with fresh_interpreters():
        done = subprocess.run(
            [sys.executable, "-P", COMMAND, "train", "-p", "demo", "-r", "demo", "--json", "--runs", tmp_path, *sets],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    metrics = [event["metrics"] for event in of_kind(events, "eval")]
    assert metrics[0]["exact_match"] == 0.0
    assert metrics[-1]["loss"] < 0.3 * metrics[0]["loss"]
    assert sets or metrics[-1]["exact_match"] >= 0.95
    assert len(of_kind(events, "backoff")) >= 1
    finished = of_kind(events, "run_finished")[0]
    assert (finished["status"], finished["samples_lost"]) == ("done", 0)
    assert {event["samples"] for event in of_kind(events, "step")} == {64}
    assert (next(tmp_path.iterdir()) / "model" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Event], list[Event]]:
    """Events of eight demo steps on a roomy and on a tight device."""
    folder = tmp_path_factory.mktemp("curves")

    def run(gib: float) -> list[Event]:
        sets = [f"device.memory_gib={gib}", *SHORT]
        place: RunDirectory = new_run(folder, resolve("demo", "demo", sets).spec)
        code, _ = train(place)
        assert code == 0
        return list(read_events(place.events))

    return run(4.0), run(0.03)


def test_a_tight_run_has_the_curve_of_a_roomy_one(curves: tuple[list[Event], list[Event]]) -> None:
    roomy, tight = curves
    assert not of_kind(roomy, "backoff")
    assert len(of_kind(tight, "backoff")) >= 1
    assert losses(tight).keys() == losses(roomy).keys() == set(range(1, 9))
    assert list(losses(tight).values()) == pytest.approx(list(losses(roomy).values()), rel=1e-4)


def test_a_tight_run_consumes_the_same_samples_in_as_many_steps(curves: tuple[list[Event], list[Event]]) -> None:
    roomy, tight = curves
    for name in ("samples", "tokens", "target_tokens", "learning_rate"):
        assert [e[name] for e in of_kind(tight, "step")] == [e[name] for e in of_kind(roomy, "step")]
    assert max(event["micro_batches"] for event in of_kind(tight, "step")) > 1
