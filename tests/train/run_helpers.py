"""Small real runs for the tests of the training room: a tiny model, ragged random text, the engine in this process.

Not a test module. Nothing here stands in for the engine; it only writes specs and folders.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from engine.batching.budget import MicroBatchBudget
from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.device.open import open_device
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventWriter, Journal
from engine.train.run import main
from engine.train.run.oom_report import oom_reporter
from engine.train.run.setup import set_up
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.transaction import StepTransaction
from tests.events import read_events

ROOMY_GIB = 8.0

Event = dict[str, Any]
"""A line of the journal."""


def write_samples(path: Path, *, count: int = 48, seed: int = 0, longest: int = 60) -> Path:
    """A jsonl file of prompts and completions of ragged length, in bytes."""
    drawn = random.Random(seed)
    letters = "abcdefghij klmnop"
    with path.open("w") as file:
        for _ in range(count):
            prompt = "".join(drawn.choices(letters, k=drawn.randint(2, longest // 2)))
            answer = "".join(drawn.choices(letters, k=drawn.randint(1, longest // 2 - 2)))
            file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")
    return path


def make_spec(samples: Path, *, memory_gib: float = ROOMY_GIB, device: str = "metered", **tables: Any) -> RunSpec:
    """A run spec of the tiny model on the file `samples`; keyword arguments are recipe tables laid over it."""
    recipe: dict[str, Any] = {
        "name": "small",
        "model": {"id": "builtin:tiny", "tokenizer": "builtin:bytes", "init": "random", "dtype": "float32"},
        "method": {"kind": "full"},
        "data": {"sources": [{"name": "main", "path": str(samples), "template": "none"}], "max_length": 64},
        "train": {"max_steps": 6, "batch_size": 8, "learning_rate": 1e-3, "seed": 3},
        "checkpoint": {"every_minutes": 0},
    }
    for name, table in tables.items():
        recipe[name] = {**recipe.get(name, {}), **table}
    return RunSpec.model_validate(
        {
            "name": "small",
            "profile": {"name": "here", "device": {"kind": device, "memory_gib": memory_gib}},
            "recipe": recipe,
        }
    )


def new_run(runs: Path, spec: RunSpec) -> RunDirectory:
    """A run directory, ready for an engine."""
    return create_run_directory(runs, spec.name, dump_run_spec(spec), {})


def train(place: RunDirectory, *, resume: bool = False) -> tuple[int, list[Event]]:
    """Run the engine on `place` in this process; returns its exit code and all events so far."""
    code = main.run(place.path, resume=resume)
    return code, list(read_events(place.events))


def of_kind(events: list[Event], kind: str) -> list[Event]:
    """The events of one kind."""
    return [event for event in events if event["kind"] == kind]


def losses(events: list[Event]) -> dict[int, float]:
    """Losses by step; if a step has several events, the last one counts."""
    return {event["step"]: event["loss"] for event in of_kind(events, "step")}


class Workshop:
    """A training setup without the training loop, for tests of single steps. A context manager that returns the
    setup."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.place = RunDirectory(folder)
        self.spec = spec

    def __enter__(self) -> TrainingSetup:
        self.device = open_device(self.spec)
        self._active = self.device.activate()
        self._active.__enter__()
        self._writer = EventWriter(self.place)
        journal = Journal(self._writer)
        return set_up(self.spec, self.device, journal, oom_reporter(journal, self.device))

    def __exit__(self, *raised: Any) -> None:
        self._writer.close()
        self._active.__exit__(*raised)

    def events(self) -> list[Event]:
        """The events written so far."""
        return list(read_events(self.place.events))


def change_of_a_step(spec: RunSpec, folder: Path, rows: int) -> tuple[int, float, torch.Tensor]:
    """Take the first step of `spec` in micro-batches of at most `rows` of the longest sequence; returns (number of
    micro-batches, loss, change of all weights that learn)."""
    with Workshop(spec, folder) as setup:
        context = setup.context
        budget = context.cost(rows, int(context.data.lengths.max()))
        context.budget = MicroBatchBudget(budget, top_bytes=budget)
        before = [parameter.detach().clone() for _, parameter in context.loaded.trainable()]
        outcome = StepTransaction(context).run(1, setup.order.step(1))
        pairs = zip(context.loaded.trainable(), before, strict=True)
        moved = [parameter.detach() - old for (_, parameter), old in pairs]
        return outcome.micro_batches, outcome.loss, torch.cat([change.flatten() for change in moved])
