"""What the look-alikes of tensorboard, wandb and trackio were given, and journals to forward. Not a test module."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import dump_run_spec, resolve
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventWriter

PACKAGES = Path(__file__).resolve().parents[1] / "look_alikes" / "trackers"

TRACKERS = ("tensorboard", "wandb", "trackio")


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this process and those that it starts import the look-alikes; trackio's database is in `folder`."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES), prepend=":")
    monkeypatch.setenv("TRACKIO_DIR", str(folder))


def new_run(folder: Path, *overrides: str) -> RunDirectory:
    """The directory of a run of the recipe demo, with an empty journal."""
    spec = resolve("demo", "demo", overrides).spec
    return create_run_directory(folder, spec.name, dump_run_spec(spec), {})


def write_step(writer: EventWriter, step: int, **more: Any) -> None:
    """Write a step event whose loss is its step number."""
    unknown = "epoch learning_rate grad_norm tokens_per_second data_wait_seconds mfu allocated_bytes reserved_bytes"
    counts = dict.fromkeys(("tokens", "target_tokens", "step_seconds", "micro_batches"), 1)
    values = {**dict.fromkeys(f"{unknown} peak_bytes".split()), **counts, **more}
    writer.write("step", step=step, loss=float(step), **values)


def write_eval(writer: EventWriter, step: int) -> None:
    """Write an evaluation whose loss is its step number."""
    writer.write("eval", step=step, metrics={"loss": float(step)})


Points = list[tuple[int, str]]
"""Step and name of each loss, in the order in which the tracker got them."""


def points_of(directory: RunDirectory, name: str) -> Points:
    """The losses that tracker `name` has of a run."""
    return [
        (step, metric)
        for step, metrics in POINTS[name](directory)
        for metric in ("train/loss", "eval/loss")
        if metric in metrics
    ]


def records_of_tensorboard(directory: RunDirectory) -> Iterator[dict[str, Any]]:
    """All records in the event files of a run, in the order in which TensorBoard reads them."""
    for path in sorted((directory.trackers / "tensorboard").glob("events.out.tfevents.*")):
        yield from map(json.loads, path.read_text().splitlines())


def calls_of_wandb(directory: RunDirectory) -> list[dict[str, Any]]:
    """All calls that wandb got for a run."""
    files = sorted((directory.trackers / "wandb").glob("wandb/offline-run-*/wandb.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def _tensorboard(directory: RunDirectory) -> Iterator[tuple[int, dict[str, Any]]]:
    for record in records_of_tensorboard(directory):
        values = record.get("summary", {}).get("value", [])
        yield record["step"], {value["tag"]: value.get("simple_value") for value in values}


def _wandb(directory: RunDirectory) -> Iterator[tuple[int, dict[str, Any]]]:
    data = [call["data"] for call in calls_of_wandb(directory) if "data" in call]
    yield from ((metrics["train/global_step"], metrics) for metrics in data)


def _trackio(directory: RunDirectory) -> Iterator[tuple[int, dict[str, Any]]]:
    from trackio import database

    rows = map(json.loads, database("tunedeck").read_text().splitlines())
    yield from ((row["step"], row["metrics"]) for row in rows if row["run"] == directory.name)


POINTS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
