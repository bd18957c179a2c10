"""Whole runs on several ranks under the supervisor, and what tests do to them meanwhile.

Not a test module.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.journal.directory import RunDirectory
from engine.launch.process import start_engine
from tests.distributed.rank_workbench import spec_of
from tests.events import read_events
from tests.train.run_helpers import losses, of_kind, train

LIMIT_SECONDS = 900.0
"""Until something is there that has to come: for machines with other work to do."""

VOTE_SECONDS = 40.0
"""How long ranks wait for each other in tests that stop one: longer than a busy machine leaves one without a turn."""

SHARING: dict[str, dict[str, Any]] = {
    "replicated": {"strategy": "replicated"},
    "sharded": {"strategy": "sharded"},
    "sequence": {"strategy": "replicated", "sequence": 2},
}
TABLES: dict[str, Any] = {
    "train": {"max_steps": 24, "epochs": 10.0},
    "checkpoint": {"every_steps": 4, "every_minutes": 0, "keep": 10},
}


def engine_ends(
    place: RunDirectory,
    *,
    resume: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
    limit_seconds: float = LIMIT_SECONDS,
) -> int:
    process = start_engine(place, resume=resume)
    try:
        meanwhile()
        return process.wait(timeout=limit_seconds)
    finally:
        process.kill()


def wait_for(holds: Callable[[], bool], limit_seconds: float = LIMIT_SECONDS) -> None:
    deadline = time.monotonic() + limit_seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_step(place: RunDirectory, step: int, limit_seconds: float = LIMIT_SECONDS) -> None:
    wait_for(lambda: any(event["step"] >= step for event in of_kind(events(place), "step")), limit_seconds)


def wait_for_lines(place: RunDirectory, count: int) -> None:
    """Wait until the journal has `count` lines."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(events(place)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def events(place: RunDirectory) -> list[dict[str, Any]]:
    return list(read_events(place.events)) if place.events.exists() else []


def rank_process(place: RunDirectory, rank: int) -> psutil.Process:
    """The newest process that works on the run as this rank, not one that it has started itself."""
    for process in sorted(psutil.process_iter(), key=lambda each: -each.create_time()):
        if _is_rank(process, place, rank) and not _is_rank(process.parent(), place, rank):
            return process
    raise AssertionError(f"no process is rank {rank} of {place.name}")


def _is_rank(process: psutil.Process | None, place: RunDirectory, rank: int) -> bool:
    try:
        environment = process.environ() if process else {}
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
    return environment.get("TORCHELASTIC_RUN_ID") == place.name and environment.get("RANK") == str(rank)


def first_process(place: RunDirectory, rank: int) -> psutil.Process:
    """The process of this rank; waits until it exists."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        with suppress(AssertionError):
            return rank_process(place, rank)
        time.sleep(0.05)
    return rank_process(place, rank)


def with_ranks(
    folder: Path, ranks: int, timeout_seconds: float = 60.0, restarts: int = 3, sharing: str = "replicated"
) -> RunSpec:
    spec = spec_of(folder, ranks, {**TABLES, "parallel": SHARING[sharing]})
    changes = {
        "parallel": spec.profile.parallel.model_copy(update={"timeout_seconds": timeout_seconds}),
        "nodes": spec.profile.nodes.model_copy(update={"max_restarts": restarts}),
    }
    return spec.model_copy(update={"profile": spec.profile.model_copy(update=changes)})


def ask_to_stop(place: RunDirectory) -> None:
    """Send SIGTERM to the supervisor, as a scheduler does."""
    os.kill(rank_process(place, 0).ppid(), signal.SIGTERM)


def restarts(place: RunDirectory) -> list[str]:
    return [event["text"] for event in of_kind(events(place), "warning") if event["code"] == "rank_lost"]


def finish_alone(place: RunDirectory, folder: Path) -> dict[int, float]:
    """Resume the run on one process and train to the end; returns the losses of the whole run."""
    place.run_toml.write_text(dump_run_spec(with_ranks(folder, 1)))
    code, told = train(place, resume=True)
    assert code == 0
    return losses(told)
