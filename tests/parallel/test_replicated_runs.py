"""Whole runs on two ranks: the curve of one process, through killed and stopped ranks, and on fewer ranks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.journal.directory import RunDirectory
from engine.journal.events import read_events
from engine.spec.load import dump_run_spec
from engine.spec.run import RunSpec
from engine.start import start_engine
from tests.parallel.steps import SAMPLES, spec_of
from tests.train.harness import losses, new_run, of_kind, train, write_samples

LIMIT_SECONDS = 240.0
TABLES: dict[str, Any] = {
    "train": {"max_steps": 24, "epochs": 10.0},
    "checkpoint": {"every_steps": 4, "every_minutes": 0, "keep": 10},
}


def engine_ends(
    place: RunDirectory, *, resume: bool = False, meanwhile: Callable[[], None] = lambda: None,
    limit_seconds: float = LIMIT_SECONDS,
) -> int:
    process = start_engine(place, resume=resume)
    try:
        meanwhile()
        return process.wait(timeout=limit_seconds)
    finally:
        process.kill()


def wait_for_step(place: RunDirectory, step: int, limit_seconds: float = LIMIT_SECONDS) -> None:
    deadline = time.monotonic() + limit_seconds
    while not any(event["step"] >= step for event in of_kind(events(place), "step")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def events(place: RunDirectory) -> list[dict[str, Any]]:
    return list(read_events(place.events)) if place.events.exists() else []


def rank_process(place: RunDirectory, rank: int) -> psutil.Process:
    """The newest process that works on the run as this rank."""
    for process in sorted(psutil.process_iter(), key=lambda each: -each.create_time()):
        try:
            environment = process.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if environment.get("TORCHELASTIC_RUN_ID") == place.name and environment.get("RANK") == str(rank):
            return process
    raise AssertionError(f"no process is rank {rank} of {place.name}")


def first_process(place: RunDirectory, rank: int) -> psutil.Process:
    """This rank's process, as soon as it is there."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        with suppress(AssertionError):
            return rank_process(place, rank)
        time.sleep(0.05)
    return rank_process(place, rank)


def with_ranks(
    folder: Path, ranks: int, timeout_seconds: float = 60.0, restarts: int = 3, strategy: str = "replicated"
) -> RunSpec:
    spec = spec_of(folder, ranks, {**TABLES, "parallel": {"strategy": strategy}})
    changes = {
        "parallel": spec.profile.parallel.model_copy(update={"timeout_seconds": timeout_seconds}),
        "nodes": spec.profile.nodes.model_copy(update={"max_restarts": restarts}),
    }
    return spec.model_copy(update={"profile": spec.profile.model_copy(update=changes)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_samples(folder / SAMPLES)
    return folder


@pytest.fixture(scope="module")
def curve(folder: Path) -> dict[int, float]:
    """The losses of one process."""
    code, told = train(new_run(folder / "alone", with_ranks(folder, 1)))
    assert code == 0
    return losses(told)


def ask_to_stop(place: RunDirectory) -> None:
    """As a scheduler does: TERM to the supervisor."""
    os.kill(rank_process(place, 0).ppid(), signal.SIGTERM)


def restarts(place: RunDirectory) -> list[str]:
    return [event["text"] for event in of_kind(events(place), "warning") if event["code"] == "rank_lost"]


def finish_alone(place: RunDirectory, folder: Path) -> dict[int, float]:
    """Go on with one process to the end; returns the losses of the whole run."""
    place.run_toml.write_text(dump_run_spec(with_ranks(folder, 1)))
    code, told = train(place, resume=True)
    assert code == 0
    return losses(told)


def test_a_killed_rank_restarts_the_run_a_stopped_one_too_many_ends_it_and_one_process_goes_on_with_it(
    folder: Path, curve: dict[int, float]
) -> None:
    place = new_run(folder / "lost", with_ranks(folder, 2, timeout_seconds=20.0, restarts=1))

    def disturb() -> None:
        wait_for_step(place, 6)
        rank_process(place, 1).send_signal(signal.SIGKILL)
        wait_for_step(place, 11)
        rank_process(place, 1).send_signal(signal.SIGSTOP)

    assert engine_ends(place, meanwhile=disturb) == 1
    assert of_kind(events(place), "run_started")[0]["world_size"] == 2
    (restart,) = restarts(place)
    assert "rank 1 was killed" in restart and "restart 1 of 1" in restart
    end = events(place)[-1]
    assert (end["kind"], end["status"]) == ("run_finished", "failed")
    assert "no answer from rank 1, which is stopped or stuck, after 1 restart" in end["error"]
    assert finish_alone(place, folder) == pytest.approx(curve, rel=1e-5)


@pytest.mark.torture
@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
@pytest.mark.parametrize("seed", range(8))
def test_a_rank_killed_or_stopped_at_any_moment_costs_a_restart_and_nothing_else(
    seed: int, strategy: str, folder: Path, curve: dict[int, float]
) -> None:
    """Also while ranks are imported, joined, or set up, and while rank 0 writes alone."""
    drawn = random.Random(seed)
    rank, blow = drawn.randrange(2), (signal.SIGKILL, signal.SIGSTOP)[seed % 2]
    spec = with_ranks(folder, 2, timeout_seconds=20.0, strategy=strategy)
    place = new_run(folder / f"moment-{seed}-{strategy}", spec)

    def strike() -> None:
        process = first_process(place, rank)
        time.sleep(drawn.uniform(0.0, 10.0))
        process.send_signal(blow)

    assert engine_ends(place, meanwhile=strike) == 0
    assert len(restarts(place)) == 1
    assert losses(events(place)) == pytest.approx(curve, rel=1e-5)


@pytest.mark.torture
def test_rank_0_stopped_while_it_works_alone_is_noticed_within_the_bound(
    folder: Path, curve: dict[int, float]
) -> None:
    place = new_run(folder / "alone-stopped", with_ranks(folder, 2, timeout_seconds=20.0))

    def stop() -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any(event["name"] == "saving" for event in of_kind(events(place), "phase")):
            assert time.monotonic() < deadline
        rank_process(place, 0).send_signal(signal.SIGSTOP)

    assert engine_ends(place, meanwhile=stop) == 0
    assert ["no answer from rank 0" in text for text in restarts(place)] == [True]
    assert losses(events(place)) == pytest.approx(curve, rel=1e-5)


@pytest.mark.torture
@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_four_ranks_then_two_then_one_go_on_on_one_curve(
    strategy: str, folder: Path, curve: dict[int, float]
) -> None:
    place = new_run(folder / f"fewer-{strategy}", with_ranks(folder, 4, strategy=strategy))
    for ranks, step in ((4, 8), (2, 16)):
        place.run_toml.write_text(dump_run_spec(with_ranks(folder, ranks, strategy=strategy)))

        def stop(step: int = step) -> None:
            wait_for_step(place, step)
            ask_to_stop(place)

        assert engine_ends(place, resume=ranks < 4, meanwhile=stop) == 130
    assert finish_alone(place, folder) == pytest.approx(curve, rel=1e-5)
