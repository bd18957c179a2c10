"""Compares a step of LoRA as the engine computes it with the same step as peft computes it.

Run: python -m benchmarks.adapters [--rounds 12] [--dtype float32]        (CPU, about two minutes)

bf16 needs a processor that multiplies it; others take minutes for a step, nearly all of it in the base's products.

The engine multiplies fp32 adapters in the base's dtype (`engine.model.adapted_linear`); peft copies the input of every
adapter to fp32 and multiplies in fp32. "alone" is the engine without shared products: each layer computes its own.
Everything else is the engine's: model, loss, checkpointing and optimizer. Both
sides are loaded from the same seed and take turns step by step on the same samples, so that every ratio compares two
steps that ran within a few seconds. Peaks are those of the metered device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.job import Job, write_job
from engine.config.schema.run import RunSpec
from engine.data.batch import Batch
from engine.device.open import open_device
from engine.model.adapted_linear import SHARED
from engine.model.config import silence_libraries
from engine.model.load import load_model
from engine.model.loss import make_loss
from engine.model.tokenizer import load_tokenizer
from engine.train.step.optimizer import guarded_optimizer

ROWS, LENGTH, HIDDEN, RANK = 8, 256, 512, 16
SIDES = ("engine", "alone", "peft")


def lora_spec(job: Job, device: str, dtype: str) -> RunSpec:
    """Return a run spec that trains fp32 adapters on every linear layer of a base in `dtype`, with checkpointing, on a
    device of the kind `device`."""
    recipe = {
        "name": "adapters",
        "model": {"id": str(job.folder), "dtype": dtype, "tokenizer": str(job.folder)},
        "method": {"rank": RANK},
        "data": {"sources": [{"name": "main", "path": str(job.folder / "samples.jsonl")}]},
        "train": {"batch_size": ROWS, "gradient_checkpointing": True},
    }
    profile = {"name": "adapters", "device": {"kind": device, "memory_gib": 16.0}}
    return RunSpec.model_validate({"name": "adapters", "profile": profile, "recipe": recipe})


class Side:
    """One side of the comparison, one of SIDES: a model with its loss and optimizer."""

    def __init__(self, spec: RunSpec, device: Any, name: str) -> None:
        self.device = device
        with device.host_region():
            tokenizer = load_tokenizer(spec.recipe.model)
        self.loaded = load_model(spec, device, tokenizer)
        if name != "engine":
            leave_to_peft(self.loaded.model) if name == "peft" else share_nothing(self.loaded.model)
        train = spec.recipe.train
        self.loss = make_loss(
            self.loaded, implementation=train.loss, label_smoothing=0.0, chunk_tokens=None, device=device
        )
        self.optimizer = guarded_optimizer(train, self.loaded, device).optimizer

    def step(self, job: Job, number: int) -> float:
        """Take an optimizer step on the samples of step `number` (from 0) of the job; returns its mean loss."""
        rows = torch.tensor(job.sequences[number * ROWS : (number + 1) * ROWS])
        targets = ROWS * (rows.shape[1] - 1)
        batch = Batch(self.device.upload(rows), self.device.upload(rows), None, None, tuple(range(ROWS)), targets)
        loss = self.loss(batch) / targets
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def leave_to_peft(model: nn.Module) -> None:
    """Make every LoRA layer use peft's forward method, by removing the engine's."""
    for module in model.modules():
        vars(module).pop("forward", None)


def share_nothing(model: nn.Module) -> None:
    """Make every LoRA layer compute its product with A alone."""
    for module in model.modules():
        vars(module).pop(SHARED, None)


def compare_time(job: Job, rounds: int, dtype: str) -> dict[str, Any]:
    """Run `rounds` steps on all sides in turn. Returns the median CPU seconds of a step on each; the engine's seconds
    divided by each other's, as [median, lower quartile, upper quartile]; and the loss of the last step on each."""
    spec = lora_spec(job, "cpu", dtype)
    device = open_device(spec)
    sides = {name: Side(spec, device, name) for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 2):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            began = time.process_time()
            losses[name].append(sides[name].step(job, number))
            seconds[name].append(time.process_time() - began)
    found: dict[str, Any] = {
        "CPU seconds of a step": {name: round(statistics.median(own[2:]), 3) for name, own in seconds.items()},
        "last loss": {name: round(own[-1], 5) for name, own in losses.items()},
    }
    for name in SIDES[1:]:
        ratios = [ours / theirs for ours, theirs in zip(seconds["engine"][2:], seconds[name][2:], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[f"engine / {name}"] = [round(ratio, 3) for ratio in (middle, low, high)]
    return found


@contextmanager
def metered(job: Job, name: str, dtype: str) -> Iterator[Side]:
    """Yield a side on a new metered device, which is active inside the block."""
    spec = lora_spec(job, "metered", dtype)
    device = open_device(spec)
    with device.activate():
        yield Side(spec, device, name)


def compare_memory(job: Job, dtype: str) -> dict[str, float]:
    """By side: MiB that a step takes at its peak beyond weights, adapters and optimizer state."""
    found = {}
    for name in SIDES:
        with metered(job, name, dtype) as side:
            before = side.device.memory().allocated_bytes
            side.device.reset_peak()
            side.step(job, 0)
            found[name] = round((side.device.memory().peak_bytes - before) / 2**20, 1)
    return found


def main() -> None:
    """Run all comparisons and print their figures."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = arguments.parse_args()
    rounds, dtype = given.rounds, given.dtype
    silence_libraries()
    with tempfile.TemporaryDirectory() as folder:
        lengths = [LENGTH] * (ROWS * (rounds + 2))
        job = write_job(Path(folder, "job"), lengths, vocabulary=264, hidden=HIDDEN, steps=rounds)
        print("MiB of a step beyond what stays:", json.dumps(compare_memory(job, dtype)), flush=True)
        print("time:", json.dumps(compare_time(job, rounds, dtype)))


if __name__ == "__main__":
    main()
