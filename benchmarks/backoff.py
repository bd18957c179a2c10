"""What an out-of-memory costs, what being safe from it costs, and the same job under an automatic batch size.

Run: python -m benchmarks.backoff [--rounds 12]        (CPU, a few minutes; the device is simulated, see engine.device)

Times are CPU seconds of this process: others on the same cores move them little.
Capacity: a step whose dearest micro-batch finds no room, beside the same step already cut: the time lost, in times of
the micro-batch that failed. Transient: one allocation of a step is refused at random; the time lost, over the time of
the attempt that was thrown away. Bookkeeping: a step of the transaction beside a bare loop of the same model, batches
and optimizer, in turn; and what it adds to a step of as many batches that computes next to nothing. Neighbour: another
process takes memory and gives it back; tokens a second over those of the budget there was before it came, in turn.
Job: 16 steps of 32 short samples, two of them long instead, on a device that holds a step of short ones at once.
transformers' Trainer runs it with auto_find_batch_size, which calls accelerate.utils.find_executable_batch_size.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from benchmarks.job import BATCH, Job, padded, quietly, spec_of, write_job
from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import MicroBatch, plan_micro_batches
from engine.data.batch import collate
from engine.device.base import Device
from engine.device.catch_oom import frozen_gc
from engine.device.co_tenant import SharedByteCount
from engine.device.metered import MeteredDevice
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.train.monitor.journal import Journal
from engine.train.recovery.budget_growth import BudgetGrowth
from engine.train.recovery.oom_report import oom_reporter
from engine.train.setup import TrainingSetup, set_up
from engine.train.step.optimizer import set_learning_rates
from engine.train.step.transaction import StepTransaction

ROOMY_BYTES = 64 * 2**30


@dataclass(frozen=True)
class Size:
    """How much to compute."""

    hidden: int = 192
    length: int = 256
    short: int = 48
    """Tokens of the job's short samples; its long ones have `length`."""
    rounds: int = 12


class Shop:
    """A training set-up on a device whose room can be changed, and a step at a time."""

    def __init__(self, job: Job, folder: Path, *, kind: str = "metered", micro_batch: int | str = 8) -> None:
        self.count = SharedByteCount.create(folder / "neighbour")
        self.device: Device = _cpu() if kind == "cpu" else MeteredDevice(ROOMY_BYTES, self.count)
        spec = spec_of(job, kind)
        train = spec.recipe.train.model_copy(update={"micro_batch": micro_batch})
        self.spec = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"train": train})})
        self.folder, self.number = folder, 0

    @contextmanager
    def open(self) -> Iterator[TrainingSetup]:
        """Everything set up, the device in force."""
        with EventWriter(RunDirectory(self.folder)) as writer, self.device.activate():
            journal = Journal(writer)
            self.setup = set_up(self.spec, self.device, journal, oom_reporter(journal, self.device))
            self.transaction = StepTransaction(self.setup.context)
            self.growth = BudgetGrowth(self.setup.context, journal)
            self.start = self.setup.context.budget
            with frozen_gc():
                yield self.setup

    def step(self) -> float:
        """One step as the loop takes it; returns its seconds."""
        self.number += 1
        began = time.process_time()
        set_learning_rates(self.setup.context.optimizer, self.setup.schedule.factor(self.number))
        outcome = self.transaction.run(self.number, self.setup.order.step(self.number))
        self.growth.after_step(self.number, clean=outcome.applied and not self.transaction.failures)
        return time.process_time() - began

    def with_budget(self, budget: MicroBatchBudget) -> None:
        """Go on with a copy of what was learned at some time."""
        self.setup.context.budget = replace(budget)


def _cpu() -> Device:
    from engine.device.cpu import CpuDevice

    return CpuDevice(ROOMY_BYTES)


def capacity_cost(job: Job, folder: Path, rounds: int) -> list[float]:
    """Of each round: seconds that running out of memory added to a step, over those of the micro-batch that failed."""
    shop, costs = Shop(job, folder), []
    with shop.open() as setup:
        shop.transaction.work.peak_bytes = 0
        shop.step()
        static, peak = setup.context.static_bytes, shop.transaction.work.peak_bytes
        tight = ROOMY_BYTES - int(static + 0.6 * (peak - static))
        for _ in range(rounds):
            shop.count.hold(0)
            shop.with_budget(shop.start)
            began = time.process_time()
            shop.transaction.probe(shop.number, setup.order.step(shop.number))
            micro_batch = time.process_time() - began
            shop.count.hold(tight)
            shop.with_budget(shop.start)
            with_failure = shop.step()
            assert shop.transaction.failures == 1
            costs.append((with_failure - shop.step()) / micro_batch)
    return costs


class Stopwatch:
    """A metered device that notes when the engine begins to recover."""

    def __init__(self, device: Device) -> None:
        self._device, self.abandoned_at = device, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def release_cached(self) -> None:
        """Called once the failed attempt is over."""
        self.abandoned_at = time.process_time()
        self._device.release_cached()


def transient_cost(job: Job, folder: Path, rounds: int) -> float:
    """Seconds that refused allocations added to their steps, over the seconds of the attempts they ended."""
    shop, drawn, added, abandoned = Shop(job, folder), random.Random(0), 0.0, 0.0
    with shop.open() as setup:
        shop.step()
        before = shop.device.allocations  # type: ignore[attr-defined]
        shop.step()
        in_a_step = shop.device.allocations - before  # type: ignore[attr-defined]
        watch = Stopwatch(shop.device)
        setup.context.device = watch
        for _ in range(rounds):
            undisturbed = shop.step()
            shop.device.fail_at(drawn.randint(in_a_step // 10, in_a_step))  # type: ignore[attr-defined]
            began = time.process_time()
            added += shop.step() - undisturbed
            assert shop.transaction.failures == 1
            abandoned += watch.abandoned_at - began
    return added / abandoned


def around_a_neighbour(job: Job, folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second while a neighbour holds memory and once the run has taken it back, over those before it came;
    steps until it had; allocations that failed meanwhile."""
    shop, failures = Shop(job, folder), 0
    with shop.open() as setup:
        shop.transaction.work.peak_bytes = 0
        shop.step()
        before = replace(setup.context.budget)
        static, peak = setup.context.static_bytes, shop.transaction.work.peak_bytes

        def beside_before() -> float:
            """Of a step as it is now and one with the budget of before, taken while nobody else is there."""
            nonlocal failures
            now, ratios = setup.context.budget, []
            for _ in range(rounds):
                seconds = shop.step()
                failures += shop.transaction.failures
                shop.count.hold(0)
                shop.with_budget(before)
                ratios.append(shop.step() / seconds)
                setup.context.budget = now
                shop.count.hold(held)
            return statistics.median(ratios)

        held = ROOMY_BYTES - int(static + 0.6 * (peak - static))
        shop.count.hold(held)
        shop.step()
        failures += shop.transaction.failures
        squeezed, steps = beside_before(), 0
        held = 0
        shop.count.hold(held)
        while setup.context.budget.budget_bytes < before.budget_bytes:
            shop.step()
            failures += shop.transaction.failures
            steps += 1
        return {
            "squeezed": round(squeezed, 3), "recovered": round(beside_before(), 3),
            "steps to recover": steps, "failures": failures,
        }  # fmt: skip


def bare_step(setup: TrainingSetup, samples: Any, plan: list[MicroBatch]) -> float:
    """What a step is without us: forward and backward of each batch, clipping, the optimizer; returns its seconds."""
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


def beside_bare_loop(job: Job, folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of our steps and of the bare loop's, round by round. Who goes first changes every time."""
    shop, ours, bare = Shop(job, folder, kind="cpu"), [], []
    with shop.open() as setup:
        samples = setup.order.step(1)
        context = setup.context
        plan = plan_micro_batches(context.data.lengths[samples], context.cost, context.budget.budget_bytes)
        contestants: list[Callable[[], float]] = [shop.step, lambda: bare_step(setup, samples, plan)]
        for number in range(rounds + 1):
            shop.number = 0  # the same samples each time
            order = contestants[:: 1 if number % 2 else -1]
            seconds = {contestant: contestant() for contestant in order}
            if number:
                ours.append(seconds[contestants[0]])
                bare.append(seconds[contestants[1]])
    return ours, bare


@dataclass(frozen=True)
class Account:
    """What came of the job."""

    steps_executed: int
    samples_computed: int
    samples_repeated: int
    effective_batch: int
    final_loss: float


def stretched_job(folder: Path, size: Size) -> Job:
    """16 steps of short samples, of which the ninth and the tenth are long."""
    lengths = [size.length if 8 <= number // BATCH < 10 else size.short for number in range(16 * BATCH)]
    return write_job(folder, lengths, vocabulary=264, hidden=size.hidden, steps=16)


def counting(model: torch.nn.Module, seen: list[int]) -> Any:
    """Have the model add up the sequences that it is given."""

    def count(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen[0] += inputs[0].shape[0]

    return model.get_input_embeddings().register_forward_pre_hook(count)  # type: ignore[operator]


def mean_loss(model: torch.nn.Module, job: Job) -> float:
    """Over all samples of the job, per sample."""
    with torch.no_grad():
        rows = [torch.tensor([ids]) for ids in job.sequences]
        return statistics.fmean(float(model(input_ids=row, labels=row).loss) for row in rows)


def our_job(job: Job, folder: Path, capacity_bytes: int) -> Account:
    """The engine's step transaction, starting with a whole step at once."""
    shop, seen = Shop(job, folder, micro_batch=BATCH), [0]
    shop.count.hold(ROOMY_BYTES - capacity_bytes)
    with shop.open() as setup:
        hook = counting(setup.context.loaded.model, seen)
        for _ in range(job.steps):
            shop.step()
        hook.remove()
        shop.count.hold(0)
        loss = mean_loss(setup.context.loaded.model, job)
    return Account(job.steps, seen[0], seen[0] - len(job.sequences), BATCH, loss)


class CountSteps(TrainerCallback):
    """Optimizer steps, thrown away later or not."""

    steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """One more."""
        self.steps += 1


def their_job(job: Job, folder: Path, capacity_bytes: int) -> Account:
    """transformers' Trainer with auto_find_batch_size over one epoch."""
    device, seen, steps = MeteredDevice(capacity_bytes), [0], CountSteps()
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=1, per_device_train_batch_size=BATCH, auto_find_batch_size=True,
        learning_rate=1e-3, lr_scheduler_type="constant", optim="adamw_torch_fused", save_strategy="no", report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1000, remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    with device.activate():
        model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
        device.adopt(model.parameters())
        hook = counting(model, seen)
        rows = [{"input_ids": ids, "labels": ids} for ids in job.sequences]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=padded, callbacks=[steps])
        quietly(trainer)
        hook.remove()
    batch = trainer._train_batch_size
    return Account(steps.steps, seen[0], seen[0] - len(job.sequences), batch, mean_loss(model, job))


def peak_of_short_steps(size: Size, folder: Path) -> int:
    """Bytes that the Trainer needs for a step of short samples: the device of the job holds a little more."""
    job = write_job(folder / "short", [size.short] * BATCH, vocabulary=264, hidden=size.hidden, steps=1)
    device = MeteredDevice(ROOMY_BYTES)
    with device.activate():
        model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
        device.adopt(model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = padded([{"input_ids": ids, "labels": ids} for ids in job.sequences])
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return device.memory().peak_bytes


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """All figures; times as ratios with quartiles."""
    job = write_job(folder / "job", [size.length] * BATCH * 4, vocabulary=264, hidden=size.hidden, steps=10**6)
    small = write_job(folder / "small", [8] * BATCH * 4, vocabulary=264, hidden=32, steps=10**6)
    stretched = stretched_job(folder / "stretched", size)
    places = iter([folder / f"place-{number}" for number in range(7)])

    def place() -> Path:
        path = next(places)
        path.mkdir()
        return path

    ours, bare = beside_bare_loop(job, place(), 2 * size.rounds)
    ratios = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    # The scatter of a step of a second hides what is added to it; beside next to no work it can be seen.
    added = [mine - theirs for mine, theirs in zip(*beside_bare_loop(small, place(), 10 * size.rounds), strict=True)]
    capacity_bytes = int(1.1 * peak_of_short_steps(size, folder))
    return {
        "capacity OOM: micro-batches of time": spread(capacity_cost(job, place(), size.rounds)),
        "transient OOM: abandoned attempts of time": round(transient_cost(job, place(), size.rounds), 3),
        "neighbour: tokens/s over before": around_a_neighbour(job, place(), size.rounds),
        "step over bare loop": spread(ratios),
        "bookkeeping of a step, ms": [round(1000 * value, 3) for value in spread(added, digits=6)],
        "bookkeeping over bare step": round(statistics.median(added) / statistics.median(bare), 5),
        "job, tunedeck": vars(our_job(stretched, place(), capacity_bytes)),
        "job, Trainer": vars(their_job(stretched, place(), capacity_bytes)),
    }


def spread(values: list[float], digits: int = 3) -> list[float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(value, digits) for value in (middle, low, high)]


def main() -> None:
    """Print every figure on a line."""
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
