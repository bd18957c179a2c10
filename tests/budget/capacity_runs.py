"""The metered device as the judge of the budget: real runs with one per cent more memory than predicted, and one less.

Each cell is a small model of a family with dimensions drawn at random, a way to train it and a shape. The whole engine
trains it for two steps of two micro-batches: with the predicted peak + 1 % nothing may run out of memory, with - 1 %
something must. A dozen cells are part of `make test`; all of them: `python -m benchmarks.capacity_runs`.

Not a test module.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.budget.architecture.lookup import find_architecture
from engine.budget.predict.prediction import predict
from engine.spec.schema.run import RunSpec
from tests.budget.budget_cases import FAMILIES, WAYS, applies
from tests.budget.metered_step import folder_of
from tests.train.run_helpers import new_run, of_kind, train

CELLS = 40
SEED = 4
MARGIN = 0.01
STEPS, MICRO_BATCHES = 2, 2
LAYERS, WIDTHS = ("num_hidden_layers", "n_layer"), ("intermediate_size", "moe_intermediate_size")


@dataclass(frozen=True)
class Cell:
    """One judgement."""

    family: str
    way: str
    rows: int
    length: int
    config: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.family}, {self.way}, {self.rows} x {self.length}"


@dataclass(frozen=True)
class Verdict:
    """Allocation failures in each of the two runs, whether both ended well, and the prediction beside the peak of the
    roomier run."""

    with_more: int
    with_less: int
    finished: bool
    misses: int
    """Warnings that the prediction was off, which here it is not, also for smaller micro-batches after a failure."""
    predicted_bytes: int
    measured_bytes: int

    @property
    def right(self) -> bool:
        """Nothing failed with one per cent more, something did with one less, no run died of it, none complained."""
        return self.finished and not self.with_more and self.with_less > 0 and not self.misses


def cells(count: int = CELLS, seed: int = SEED) -> Iterator[Cell]:
    """Cells at random: each family and each way about equally often."""
    drawn = random.Random(seed)
    families, ways = list(FAMILIES), list(WAYS)
    for number in range(count):
        if number % len(families) == 0:
            drawn.shuffle(families)
        if number % len(ways) == 0:
            drawn.shuffle(ways)
        family, way = families[number % len(families)], ways[number % len(ways)]
        while not applies(family, way):
            way = drawn.choice(ways)
        yield Cell(family, way, drawn.randint(1, 4), drawn.randrange(64, 385), _resized(FAMILIES[family], drawn))


def judge(cell: Cell, folder: Path) -> Verdict:
    """Both runs of a cell."""
    peak_bytes = _predicted_bytes(cell, folder)
    code, events = _run(cell, folder / "more", (1 + MARGIN) * peak_bytes)
    code_less, events_less = _run(cell, folder / "less", (1 - MARGIN) * peak_bytes)
    return Verdict(
        with_more=len(of_kind(events, "backoff")),
        with_less=len(of_kind(events_less, "backoff")),
        finished=code == code_less == 0,
        misses=sum(event["code"] == "prediction_missed" for event in of_kind([*events, *events_less], "warning")),
        predicted_bytes=peak_bytes,
        measured_bytes=max((event["peak_bytes"] for event in of_kind(events, "step")), default=0),
    )


def _predicted_bytes(cell: Cell, folder: Path) -> int:
    spec = _spec(cell, folder / "predicted", 2.0**33)
    return predict(find_architecture(spec), spec, rows=cell.rows, length=cell.length).peak_bytes


def _run(cell: Cell, folder: Path, capacity_bytes: float) -> tuple[int, list[dict[str, Any]]]:
    return train(new_run(folder / "runs", _spec(cell, folder, capacity_bytes)))


def _resized(config: dict[str, Any], drawn: random.Random) -> dict[str, Any]:
    """Other depth, vocabulary and width of the feed-forward part."""
    changed = {"vocab_size": drawn.randrange(300, 4000)}
    for key in config:
        if key in LAYERS:
            changed[key] = drawn.randint(2, 5)
        if key in WIDTHS:
            changed[key] = 8 * drawn.randint(12, 64)
    return {**config, **changed}


def _spec(cell: Cell, folder: Path, capacity_bytes: float) -> RunSpec:
    """Texts of exactly the cell's length; packed, two documents to a row."""
    way = WAYS[cell.way]
    folder.mkdir(parents=True, exist_ok=True)
    batch = cell.rows * MICRO_BATCHES
    packed = bool(way.data.get("packing"))
    length = cell.length // 2 if packed else cell.length
    samples = texts(folder, STEPS * batch * (1 + packed), length)
    recipe = {
        "name": "cell",
        "model": {
            "id": str(folder_of(cell.config, folder / "model")), "tokenizer": "builtin:bytes", "init": "random",
            "dtype": way.dtype, **way.model,
        },
        "method": way.method,
        "data": {
            "sources": [{"name": "main", "path": str(samples)}], "max_length": 2 * length if packed else length,
            **way.data,
        },
        "train": {"max_steps": STEPS, "batch_size": batch, "micro_batch": cell.rows, **way.train},
        "checkpoint": {"every_minutes": 0},
    }  # fmt: skip
    device = {"kind": "metered", "memory_gib": capacity_bytes / 2**30}
    return RunSpec.model_validate({"name": "cell", "profile": {"name": "cell", "device": device}, "recipe": recipe})


def texts(folder: Path, count: int, length: int) -> Path:
    """A file of samples of exactly `length` tokens for the byte tokenizer, all of them to be learned."""
    drawn = random.Random(0)
    path = folder / "samples.jsonl"
    # One token is the end of the text.
    lines = ({"text": "".join(drawn.choices("abcdefgh ", k=length - 1))} for _ in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path
