"""Runs single steps of the engine on a device whose free memory can be changed between the steps.

Used by `benchmarks.backoff` and `benchmarks.batch_size_search`. Try: `python -m benchmarks.backoff --rounds 2`
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.job import Job, spec_of
from engine.batching.budget import MicroBatchBudget
from engine.device.base import Device
from engine.device.co_tenant import SharedByteCount
from engine.device.cpu import CpuDevice
from engine.device.metered import MeteredDevice
from engine.device.oom import frozen_gc
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, Journal
from engine.train.run.oom_report import oom_reporter
from engine.train.run.setup import set_up
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.budget_growth import BudgetGrowth
from engine.train.step.optimizer import set_learning_rates
from engine.train.step.transaction import StepTransaction

CAPACITY_BYTES = 64 * 2**30
"""Capacity of the device, far more than any benchmark needs; a simulated co-tenant reduces it to the wanted size."""


class StepRunner:
    """A training set-up that runs one step at a time. Bytes counted in the attribute `co_tenant`, a simulated other
    process on the device, are not available to the steps."""

    def __init__(self, job: Job, folder: Path, *, kind: str = "metered", micro_batch: int | str = 8) -> None:
        self.co_tenant = SharedByteCount.create(folder / "co-tenant")
        self.metered = MeteredDevice(CAPACITY_BYTES, self.co_tenant)
        self.device: Device = CpuDevice(CAPACITY_BYTES) if kind == "cpu" else self.metered
        spec = spec_of(job, kind)
        train = spec.recipe.train.model_copy(update={"micro_batch": micro_batch})
        self.spec = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"train": train})})
        self.folder, self.number = folder, 0

    @contextmanager
    def open(self) -> Iterator[TrainingSetup]:
        """A context manager that sets up training; the device is active inside the block."""
        with EventWriter(RunDirectory(self.folder)) as writer, self.device.activate():
            journal = Journal(writer)
            self.setup = set_up(self.spec, self.device, journal, oom_reporter(journal, self.device))
            self.transaction = StepTransaction(self.setup.context)
            self.growth = BudgetGrowth(self.setup.context, journal)
            self.start = self.setup.context.budget
            with frozen_gc():
                yield self.setup

    def step(self) -> float:
        """Run the next step as the training loop does; returns its CPU seconds."""
        self.number += 1
        began = time.process_time()
        set_learning_rates(self.setup.context.optimizer, self.setup.schedule.factor(self.number))
        outcome = self.transaction.run(self.number, self.setup.order.step(self.number))
        self.growth.after_step(self.number, clean=outcome.applied and not self.transaction.failures)
        return time.process_time() - began

    def use_budget(self, budget: MicroBatchBudget) -> None:
        """Continue with a copy of `budget`, a micro-batch budget that was learned earlier."""
        self.setup.context.budget = replace(budget)
