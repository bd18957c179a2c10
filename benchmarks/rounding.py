"""Compares the ways to round updates of bf16 weights with each other and with fp32: what is learned, time, memory.

Run: python -m benchmarks.rounding [--steps 20] [--learn]        (CPU; two minutes, with --learn about half an hour)

Time: processor seconds of an optimizer step and of the update in it, medians over steps in which the ways take turns.
On a CPU the forward pass in bf16 is emulated and slow; the update is the part to compare.
Memory: bytes per trained weight that the metered device counts between steps, and its peak in a step.
Learning (--learn): the built-in tiny model, first trained on dates in fp32, goes on with docstrings of Python's
standard library: 150 steps of 16 sequences at a constant learning rate of 2e-5. Trained weights are far larger than
such updates, so that rounding to nearest in bf16 loses many of them.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import Job, spec_of, write_job
from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.device.base import Device
from engine.device.open import open_device
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventTail, EventWriter, Journal
from engine.model.config import disable_progress_bars
from engine.train.run import main as engine_main
from engine.train.run.oom_report import oom_reporter
from engine.train.run.setup import set_up
from engine.train.step.transaction import StepTransaction


@dataclass(frozen=True)
class Way:
    """One way to train weights: their dtype, and keys of the recipe's table [train]."""

    name: str
    dtype: str
    train: dict[str, str]


WAYS = (
    Way("fp32", "float32", {}),
    Way("exact", "bfloat16", {"rounding": "exact"}),
    Way("stochastic", "bfloat16", {"rounding": "stochastic"}),
    Way("stochastic, bf16 state", "bfloat16", {"rounding": "stochastic", "state_dtype": "bfloat16"}),
    Way("nearest", "bfloat16", {"rounding": "nearest"}),
    Way("nearest, bf16 state", "bfloat16", {"rounding": "nearest", "state_dtype": "bfloat16"}),
)

MODULES = (
    "argparse", "ast", "asyncio", "collections", "configparser", "csv", "datetime", "decimal", "difflib",
    "email.message", "fractions", "functools", "heapq", "http.client", "inspect", "io", "itertools", "json", "logging",
    "mailbox", "math", "multiprocessing", "optparse", "os", "pathlib", "pickle", "queue", "random", "shutil", "smtplib",
    "socket", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
    "unittest", "urllib.request", "uuid", "xml.dom.minidom", "zipfile",
)  # fmt: skip
"""Modules whose docstrings are the data."""
HELD_OUT = 256
"""Docstrings to validate on."""


def with_way(spec: RunSpec, way: Way) -> RunSpec:
    """Return the run spec with the dtype of the weights and the rounding that `way` has."""
    recipe = spec.recipe
    model = recipe.model.model_copy(update={"dtype": way.dtype})
    train = recipe.train.model_copy(update=way.train)
    return spec.model_copy(update={"recipe": recipe.model_copy(update={"model": model, "train": train})})


class Steps:
    """A run that is set up for training and takes its optimizer steps one at a time, when `step` is called."""

    def __init__(self, job: Job, way: Way, kind: str, folder: Path, stack: ExitStack) -> None:
        spec = with_way(spec_of(job, kind), way)
        device: Device = open_device(spec)
        stack.enter_context(device.activate())
        journal = Journal(stack.enter_context(EventWriter(RunDirectory(folder))))
        self.setup = set_up(spec, device, journal, oom_reporter(journal, device))
        self.transaction = StepTransaction(self.setup.context)

    def step(self, number: int) -> float:
        """Take optimizer step `number` (from 1); returns its processor seconds."""
        began = time.process_time()
        self.transaction.run(number, self.setup.order.step(number))
        return time.process_time() - began

    def update(self, number: int) -> float:
        """Set all gradients to 0.001 and update the weights; returns the processor seconds of the update."""
        guard = self.setup.context.guard
        for _, parameter in self.setup.context.loaded.trainable():
            parameter.grad = torch.full_like(parameter, 1e-3)
        began = time.process_time()
        guard.prepare()
        guard.step(number)
        guard.accept()
        seconds = time.process_time() - began
        self.setup.context.strategy.drop_gradients()
        return seconds


def times(job: Job, folder: Path) -> dict[str, tuple[float, float]]:
    """Return {name of the way: (median processor seconds of a step, median processor seconds of an update)}."""
    with ExitStack() as stack:
        running = {}
        for number, way in enumerate(WAYS):
            (place := folder / f"time-{number}").mkdir()
            running[way.name] = Steps(job, way, "cpu", place, stack)
        taken: dict[str, list[tuple[float, float]]] = {way.name: [] for way in WAYS}
        for number in range(1, job.steps + 1):
            order = list(running.items())[:: 1 if number % 2 else -1]
            for name, steps in order:
                taken[name].append((steps.step(number), steps.update(number)))
    settled = {name: list(zip(*pairs[1:], strict=True)) for name, pairs in taken.items()}
    return {name: (statistics.median(step), statistics.median(update)) for name, (step, update) in settled.items()}


def memory(job: Job, way: Way, folder: Path) -> tuple[float, int]:
    """Bytes per trained weight between steps, and the peak bytes of a step, on the metered device."""
    folder.mkdir()
    with ExitStack() as stack:
        steps = Steps(job, way, "metered", folder, stack)
        steps.step(1)
        context = steps.setup.context
        count = sum(parameter.numel() for _, parameter in context.loaded.trainable())
        return context.device.memory().allocated_bytes / count, steps.transaction.work.peak_bytes


def docstrings() -> list[str]:
    """Return different docstrings of Python's standard library, as texts to train on; their order is fixed for each
    version of Python."""
    found: dict[str, None] = {}
    for name in MODULES:
        for _, value in sorted(vars(importlib.import_module(name)).items()):
            inner = [part for _, part in sorted(vars(value).items())] if inspect.isclass(value) else []
            for documented in (value, *inner):
                text = getattr(documented, "__doc__", None)
                if isinstance(text, str) and len(text) > 60:
                    found[text[:127]] = None
    texts = list(found)
    random.Random(0).shuffle(texts)
    return texts


def run_spec(model: dict[str, Any], data: dict[str, Any], train: dict[str, Any], **tables: Any) -> RunSpec:
    """Return a run spec for full fine-tuning on the CPU; `model`, `data`, `train` and `tables` are tables of its
    recipe."""
    recipe = {
        "name": "rounding",
        "model": {"tokenizer": "builtin:bytes", "dtype": "float32", **model},
        "method": {"kind": "full"},
        "data": {"max_length": 128, **data},
        "train": {"gradient_checkpointing": False, **train},
        "checkpoint": {"every_minutes": 0},
        **tables,
    }
    profile = {"name": "cpu", "device": {"kind": "cpu", "memory_gib": 64.0}}
    return RunSpec.model_validate({"name": "rounding", "profile": profile, "recipe": recipe})


def trained(spec: RunSpec, runs: Path) -> RunDirectory:
    """Create the run of `spec` in the folder `runs` and train it in this process; returns its run directory. Raises
    RuntimeError if the run fails."""
    place = create_run_directory(runs, spec.name, dump_run_spec(spec), {})
    if engine_main.run(place.path) != 0:
        raise RuntimeError(f"the run failed: see {place.log}")
    return place


def held_out_losses(folder: Path) -> Iterator[tuple[Way, float, float]]:
    """Yield, for each way, the held-out loss before and after training on docstrings."""
    texts = docstrings()
    files = {"validation": texts[:HELD_OUT], "train": texts[HELD_OUT:]}
    for name, part in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    dates = {"sources": [{"name": "dates", "path": "builtin:dates"}]}
    first = {"max_steps": 300, "batch_size": 64, "micro_batch": 64, "learning_rate": 3e-3, "warmup_steps": 20}
    start = trained(run_spec({"id": "builtin:tiny", "init": "random"}, dates, first), folder / "runs")
    data = {
        "sources": [{"name": "train", "path": str(folder / "train.jsonl")}],
        "validation": [{"name": "held-out", "path": str(folder / "validation.jsonl")}],
    }
    then = {"max_steps": 150, "batch_size": 16, "micro_batch": 16, "learning_rate": 2e-5, "scheduler": "constant"}
    for way in WAYS:
        spec = run_spec({"id": str(start.model)}, data, then, eval={"at_start": True})
        place = trained(with_way(spec, way), folder / "runs")
        losses = [event["metrics"]["loss"] for event in EventTail(place.events).poll() if event["kind"] == "eval"]
        yield way, losses[0], losses[-1]


def main() -> int:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learn", action="store_true", help="also train, and print held-out losses")
    parser.add_argument("--hidden", type=int, default=256)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bars()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = [64] * (asked.steps * 32)
        job = write_job(folder / "job", lengths, vocabulary=4000, hidden=asked.hidden, steps=asked.steps)
        taken = times(job, folder)
        sys.stdout.write(f"{'way':<24} {'step':>9} {'update':>9} {'bytes/weight':>13} {'peak':>10}\n")
        for number, way in enumerate(WAYS):
            step, update = taken[way.name]
            held, peak = memory(job, way, folder / f"memory-{number}")
            sys.stdout.write(
                f"{way.name:<24} {step:>7.3f} s {1000 * update:>6.1f} ms {held:>13.2f} {peak / 2**20:>6.1f} MiB\n"
            )
        for way, before, after in held_out_losses(folder) if asked.learn else ():
            sys.stdout.write(f"{way.name:<24} held-out loss {before:.4f} -> {after:.4f}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
