"""Measures what `train.gradient_checkpointing = "auto"` chooses, by running every other choice.

`caps`: small models on metered devices, from one on which everything fits to one that only holds the recomputing model:
the peak under the cap, and the plan with one layer fewer, which must not fit; the loss against recomputing all and
nothing; and the step time against the best number of layers that fits. `times`: the model of time against random
settings on this CPU. Processor time, in one process.

Run: python -m benchmarks.checkpointing caps | times
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import Job, spec_of, write_job
from engine.budget.advise.plan import find_predictor, make_plan
from engine.budget.predict.prediction import Predictor
from engine.budget.predict.step_time import StepTime
from engine.config.changes import with_changes
from engine.config.files.caches import SequenceBounds
from engine.config.schema.run import RunSpec
from engine.device.open import open_device
from engine.journal.events import Journal
from engine.model.config import disable_progress_bars
from engine.train.run.setup import set_up
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.transaction import StepTransaction

MODELS = [("lora", 12, 192), ("lora", 16, 128), ("lora", 24, 96), ("full", 12, 128), ("full", 16, 96), ("full", 20, 64)]
"""Method, layers, and hidden size."""
SHARES = (0.05, 0.3, 0.6, 0.9, 1.1)
"""Caps, as shares of the way from what recomputing all layers needs to what keeping all needs."""
ROWS, LENGTH, REPEATS = 4, 256, 9
KEY = "train.gradient_checkpointing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("caps", "times"))
    parser.add_argument("--settings", type=int, default=30)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.what == "caps":
            measure_caps(Path(folder))
        else:
            measure_times(Path(folder), chosen.settings)


def measure_caps(folder: Path) -> None:
    print("method  layers  hidden  cap MiB  recompute  peak/cap  one fewer  equal losses  time/best", flush=True)
    for method, layers, hidden in MODELS:
        job = write_job(
            folder / f"{method}{layers}", [LENGTH] * 64, vocabulary=400, hidden=hidden, steps=9, layers=layers
        )
        spec = _spec(job, method, ROWS, LENGTH, "metered")
        seconds, losses = _of_every_number(spec, layers)
        lowest, highest = (_plan_bytes(spec, value) for value in (True, False))
        for share in SHARES:
            cap = 1.015 * (lowest + share * (highest - lowest))
            capped = with_changes(spec, {"device.memory_gib": cap / 2**30})
            plan = make_plan(with_changes(capped, {KEY: "auto"}))
            chosen = plan.recomputed_layers
            assert chosen is not None
            peak, loss = _auto_run(with_changes(capped, {KEY: "auto"}))
            fewer = f"{_plan_bytes(spec, chosen - 1 or False) / cap:.3f}" if chosen else "-"
            equal = "yes" if {*losses, loss} == {loss} else "no"
            best = min(seconds[number] for number in range(layers + 1) if number >= chosen)
            print(
                f"{method:6}  {layers:6}  {hidden:6}  {cap / 2**20:7.2f}  {chosen:3} of {layers:2}  {peak / cap:8.3f}  "
                f"{fewer:>9}  {equal:>12}  {seconds[chosen] / best:9.3f}",
                flush=True,
            )


def _of_every_number(spec: RunSpec, layers: int) -> tuple[list[float], list[float]]:
    """Processor seconds of a step by the number of layers that recompute, and the losses of the first step with none
    and all of them."""
    losses = []
    for value in (False, True):
        with _prepared(with_changes(spec, {KEY: value})) as (setup, transaction):
            losses.append(transaction.run(1, setup.order.step(1)).loss)
    found: list[list[float]] = [[] for _ in range(layers + 1)]
    with _prepared(with_changes(spec, {KEY: False})) as (setup, transaction):
        for _ in range(REPEATS):
            for number in range(layers + 1):
                setup.context.loaded.set_checkpointing(number)
                found[number].append(_seconds(setup, transaction))
    return [min(each) for each in found], losses


def _auto_run(spec: RunSpec) -> tuple[int, float]:
    """The peak in bytes, and the loss of the first step."""
    with _prepared(spec) as (setup, transaction):
        outcome = transaction.run(1, setup.order.step(1))
        assert not transaction.failures
        return transaction.work.peak_bytes, outcome.loss


def measure_times(folder: Path, count: int) -> None:
    drawn, predicted, measured = random.Random(5), [], []
    print("method  layers  hidden  rows  length  recompute  tiles  predicted  measured", flush=True)
    for number in range(count):
        method, layers = drawn.choice(("lora", "full")), drawn.choice((4, 8, 12))
        hidden, rows, length = (
            drawn.choice((64, 128, 192, 256)),
            drawn.choice((1, 2, 4, 8)),
            drawn.choice((64, 128, 256, 512)),
        )
        again, tiles = drawn.randint(0, layers), drawn.choice((1, 1, 4))
        job = write_job(folder / f"t{number}", [length] * 32, vocabulary=400, hidden=hidden, steps=9, layers=layers)
        spec = with_changes(_spec(job, method, rows, length, "cpu"), {KEY: again or False, "train.mlp_tiles": tiles})
        predictor = find_predictor(spec)
        assert isinstance(predictor, Predictor)
        predicted.append(StepTime.of(predictor).step(rows, length, again))
        with _prepared(spec) as (setup, transaction):
            measured.append(min(_seconds(setup, transaction) for _ in range(REPEATS)))
        print(
            f"{method:6}  {layers:6}  {hidden:6}  {rows:4}  {length:6}  {again:9}  {tiles:5}  "
            f"{predicted[-1]:9.4f}  {measured[-1]:8.4f}",
            flush=True,
        )
    ratios = [real / told for real, told in zip(measured, predicted, strict=True)]
    print(f"rank correlation {statistics.correlation(_ranks(measured), _ranks(predicted)):.3f}")
    print(f"measured / predicted: {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")


def _ranks(values: list[float]) -> list[float]:
    places = sorted(range(len(values)), key=values.__getitem__)
    return [float(places.index(number)) for number in range(len(values))]


def _spec(job: Job, method: str, rows: int, length: int, device: str) -> RunSpec:
    tables: dict[str, Any] = spec_of(job, device).model_dump(by_alias=True)
    tables["recipe"]["method"] = {"kind": method} | ({"rank": 8} if method == "lora" else {})
    tables["recipe"]["train"] |= {"batch_size": rows, "micro_batch": rows}
    tables["recipe"]["data"]["max_length"] = length + 1
    return RunSpec.model_validate(tables)


def _plan_bytes(spec: RunSpec, value: bool | int) -> int:
    return make_plan(with_changes(spec, {KEY: value}), known=SequenceBounds(LENGTH)).prediction.device_bytes


@contextmanager
def _prepared(spec: RunSpec) -> Iterator[tuple[TrainingSetup, StepTransaction]]:
    device = open_device(spec)
    with device.activate():
        setup = set_up(spec, device, Journal(None), lambda _backoff: None)
        yield setup, StepTransaction(setup.context)


def _seconds(setup: TrainingSetup, transaction: StepTransaction) -> float:
    began = time.process_time()
    transaction.run(1, setup.order.step(1))
    return time.process_time() - began


if __name__ == "__main__":
    main()
