"""Measures the cost of an OOM, the overhead of the step transaction, and a job with an automatic batch size search.

Run: python -m benchmarks.backoff [--rounds 12]        (CPU, a few minutes; the device is simulated, see engine.device)

Times are CPU seconds of this process, which other processes on the same cores hardly change.

- Capacity: the costliest micro-batch of a step does not fit. Extra time of this step over the step after the backoff,
  as a multiple of that micro-batch's time.
- Transient: one randomly drawn allocation of a step is refused. Extra time of this step over an undisturbed one, as a
  multiple of the abandoned attempt's time.
- Bookkeeping: the time of a step transaction, relative to a bare loop with the same model, micro-batches and optimizer
  that runs alternately with it; also for a model so small that its computation takes almost no time.
- Co-tenant: another process allocates memory and frees it again. Tokens per second meanwhile and afterwards, relative
  to the speed with the micro-batch budget that was learned before.
- Job: see `benchmarks.batch_size_search`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from benchmarks.batch_size_search import Size, our_job, peak_of_short_steps, stretched_job, their_job
from benchmarks.job import BATCH, Job, write_job
from benchmarks.step_runner import CAPACITY_BYTES, StepRunner
from engine.batching.micro_batches import MicroBatch, plan_micro_batches
from engine.data.batch import collate
from engine.device.base import Device
from engine.train.run.training_setup import TrainingSetup


def capacity_cost(job: Job, folder: Path, rounds: int) -> list[float]:
    """For each round, the seconds that an OOM added to a step, as a multiple of the time of the micro-batch that
    failed."""
    runner, costs = StepRunner(job, folder), []
    with runner.open() as setup:
        runner.transaction.work.peak_bytes = 0
        runner.step()
        static, peak = setup.context.static_bytes, runner.transaction.work.peak_bytes
        tight = CAPACITY_BYTES - int(static + 0.6 * (peak - static))
        for _ in range(rounds):
            runner.co_tenant.hold(0)
            runner.use_budget(runner.start)
            began = time.process_time()
            runner.transaction.probe(runner.number, setup.order.step(runner.number))
            micro_batch = time.process_time() - began
            runner.co_tenant.hold(tight)
            runner.use_budget(runner.start)
            with_failure = runner.step()
            assert runner.transaction.failures == 1
            costs.append((with_failure - runner.step()) / micro_batch)
    return costs


class Stopwatch:
    """A metered device that records the process time, in seconds, at which an attempt ended with an OOM
    (`abandoned_at`). Everything else is passed on to `device`."""

    def __init__(self, device: Device) -> None:
        self._device, self.abandoned_at = device, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def release_cached(self) -> None:
        """Record the time: the engine calls this at the end of a failed attempt."""
        self.abandoned_at = time.process_time()
        self._device.release_cached()


def transient_cost(job: Job, folder: Path, rounds: int) -> float:
    """Refuse one random allocation in each of `rounds` steps. Returns the total seconds that this added to the steps,
    as a multiple of the total time of the abandoned attempts."""
    runner, drawn, added, abandoned = StepRunner(job, folder), random.Random(0), 0.0, 0.0
    with runner.open() as setup:
        runner.step()
        before = runner.metered.allocations
        runner.step()
        in_a_step = runner.metered.allocations - before
        watch = Stopwatch(runner.device)
        setup.context.device = watch
        for _ in range(rounds):
            undisturbed = runner.step()
            runner.metered.fail_at(drawn.randint(in_a_step // 10, in_a_step))
            began = time.process_time()
            added += runner.step() - undisturbed
            assert runner.transaction.failures == 1
            abandoned += watch.abandoned_at - began
    return added / abandoned


def with_co_tenant(job: Job, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure a run during and after the presence of a co-tenant.

    Returns the speed while the co-tenant uses memory and after it has freed that memory, both relative to the speed
    before it came, as medians over `rounds` steps; the number of steps until the micro-batch budget has recovered; and
    the number of failed allocations.
    """
    runner, failures = StepRunner(job, folder), 0
    with runner.open() as setup:
        runner.transaction.work.peak_bytes = 0
        runner.step()
        before = replace(setup.context.budget)
        static, peak = setup.context.static_bytes, runner.transaction.work.peak_bytes

        def speed_ratio() -> float:
            """Speed of steps now, relative to steps without the co-tenant and with the micro-batch budget from before
            it came."""
            nonlocal failures
            now, ratios = setup.context.budget, []
            for _ in range(rounds):
                seconds = runner.step()
                failures += runner.transaction.failures
                runner.co_tenant.hold(0)
                runner.use_budget(before)
                ratios.append(runner.step() / seconds)
                setup.context.budget = now
                runner.co_tenant.hold(held)
            return statistics.median(ratios)

        held = CAPACITY_BYTES - int(static + 0.6 * (peak - static))
        runner.co_tenant.hold(held)
        runner.step()
        failures += runner.transaction.failures
        squeezed, steps = speed_ratio(), 0
        held = 0
        runner.co_tenant.hold(held)
        while setup.context.budget.budget_bytes < before.budget_bytes:
            runner.step()
            failures += runner.transaction.failures
            steps += 1
        return {
            "squeezed": round(squeezed, 3), "recovered": round(speed_ratio(), 3),
            "steps to recover": steps, "failures": failures,
        }  # fmt: skip


def bare_step(setup: TrainingSetup, samples: NDArray[np.int64], plan: list[MicroBatch]) -> float:
    """Run a step without the step transaction: forward and backward of each micro-batch of `plan`, clipping, optimizer
    step.

    Returns the CPU seconds of the step.
    """
    context, began = setup.context, time.process_time()
    parameters = [parameter for _, parameter in context.loaded.trainable()]
    targets = int(context.data.target_counts[samples].sum())
    total = torch.zeros(())
    for group in plan:
        loss = context.loss(collate(context.data, samples[list(group.members)], pad_id=context.pad_id)) / targets
        loss.backward()
        total += loss.detach()
    float(torch.nn.utils.clip_grad_norm_(parameters, context.max_grad_norm))
    float(total)
    context.optimizer.step()
    context.optimizer.zero_grad(set_to_none=True)
    return time.process_time() - began


def compare_with_bare_loop(job: Job, folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Run the same step in each round with the step transaction and with the bare loop, which take turns in going
    first. Returns the CPU seconds of each round's step with the transaction, and those with the bare loop."""
    runner, ours, bare = StepRunner(job, folder, kind="cpu"), [], []
    with runner.open() as setup:
        samples = setup.order.step(1)
        context = setup.context
        plan = plan_micro_batches(context.data.lengths[samples], context.cost, context.budget.budget_bytes)
        contestants: list[Callable[[], float]] = [runner.step, lambda: bare_step(setup, samples, plan)]
        for number in range(rounds + 1):
            runner.number = 0  # the same samples each time
            order = contestants[:: 1 if number % 2 else -1]
            seconds = {contestant: contestant() for contestant in order}
            if number:
                ours.append(seconds[contestants[0]])
                bare.append(seconds[contestants[1]])
    return ours, bare


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """Run all measurements. Returns the figures by name; a list of three is [median, lower quartile, upper
    quartile]."""
    job = write_job(folder / "job", [size.length] * BATCH * 4, vocabulary=264, hidden=size.hidden, steps=10**6)
    small = write_job(folder / "small", [8] * BATCH * 4, vocabulary=264, hidden=32, steps=10**6)
    stretched = stretched_job(folder / "stretched", size)
    places = iter([folder / f"place-{number}" for number in range(7)])

    def place() -> Path:
        path = next(places)
        path.mkdir()
        return path

    ours, bare = compare_with_bare_loop(job, place(), 2 * size.rounds)
    ratios = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    # The time of a one-second step varies by more than the overhead; a tiny model's steps show the overhead.
    small_steps = zip(*compare_with_bare_loop(small, place(), 10 * size.rounds), strict=True)
    added = [mine - theirs for mine, theirs in small_steps]
    capacity_bytes = int(1.1 * peak_of_short_steps(size, folder))
    return {
        "capacity OOM: micro-batches of time": spread(capacity_cost(job, place(), size.rounds)),
        "transient OOM: abandoned attempts of time": round(transient_cost(job, place(), size.rounds), 3),
        "co-tenant: tokens/s over before": with_co_tenant(job, place(), size.rounds),
        "step over bare loop": spread(ratios),
        "bookkeeping of a step, ms": [round(1000 * value, 3) for value in spread(added, digits=6)],
        "bookkeeping over bare step": round(statistics.median(added) / statistics.median(bare), 5),
        "job, tunedeck": vars(our_job(stretched, place(), capacity_bytes)),
        "job, Trainer": vars(their_job(stretched, place(), capacity_bytes)),
    }


def spread(values: list[float], digits: int = 3) -> list[float]:
    """Returns [median, lower quartile, upper quartile] of the values, rounded to `digits`."""
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(value, digits) for value in (middle, low, high)]


def main() -> None:
    """Run all measurements and print each figure on a line of its own."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=Size.rounds)
    asked = arguments.parse_args()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        for name, figure in measure(Size(rounds=asked.rounds), Path(folder)).items():
            print(f"{name}:", json.dumps(figure))


if __name__ == "__main__":
    main()
