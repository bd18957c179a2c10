"""Runs the same job in the engine and in transformers' Trainer with auto_find_batch_size, on a device too small for it.

The job has 16 steps of 32 samples. In two of the steps the samples are long; only a step of short samples fits on the
device in one micro-batch. The Trainer calls accelerate.utils.find_executable_batch_size.

Run: `python -m benchmarks.backoff`, which prints both outcomes
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from benchmarks.job import BATCH, Job, padded, quietly, write_job
from benchmarks.step_runner import CAPACITY_BYTES, StepRunner
from engine.device.metered import MeteredDevice


@dataclass(frozen=True)
class Size:
    """The sizes of the benchmark: model, samples, and number of rounds."""

    hidden: int = 192
    length: int = 256
    short: int = 48
    """Tokens of the job's short samples; the long ones have `length` tokens."""
    rounds: int = 12


@dataclass(frozen=True)
class JobOutcome:
    """The numbers of steps and samples that a trainer executed for the job, and the final loss of the trained model."""

    steps_executed: int
    samples_computed: int
    samples_repeated: int
    effective_batch: int
    final_loss: float


def stretched_job(folder: Path, size: Size) -> Job:
    """Write a job of 16 steps into `folder` and return it. The ninth and the tenth step have long samples, all others
    short ones."""
    lengths = [size.length if 8 <= number // BATCH < 10 else size.short for number in range(16 * BATCH)]
    return write_job(folder, lengths, vocabulary=264, hidden=size.hidden, steps=16)


def counting(model: torch.nn.Module, seen: list[int]) -> RemovableHandle:
    """Register a hook on `model` that adds the number of sequences of every forward pass to `seen[0]`; returns the
    hook's handle."""

    def count(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen[0] += inputs[0].shape[0]

    return cast(PreTrainedModel, model).get_input_embeddings().register_forward_pre_hook(count)


def mean_loss(model: torch.nn.Module, job: Job) -> float:
    """The model's mean loss per sample over all samples of the job."""
    with torch.no_grad():
        rows = [torch.tensor([ids]) for ids in job.sequences]
        return statistics.fmean(float(model(input_ids=row, labels=row).loss) for row in rows)


def our_job(job: Job, folder: Path, capacity_bytes: int) -> JobOutcome:
    """Run the job with the engine's step transaction on a metered device of `capacity_bytes`, starting with all samples
    of a step in one micro-batch."""
    runner, seen = StepRunner(job, folder, micro_batch=BATCH), [0]
    runner.co_tenant.hold(CAPACITY_BYTES - capacity_bytes)
    with runner.open() as setup:
        hook = counting(setup.context.loaded.model, seen)
        for _ in range(job.steps):
            runner.step()
        hook.remove()
        runner.co_tenant.hold(0)
        loss = mean_loss(setup.context.loaded.model, job)
    return JobOutcome(job.steps, seen[0], seen[0] - len(job.sequences), BATCH, loss)


class CountSteps(TrainerCallback):
    """A Trainer callback that counts optimizer steps, including those discarded when the Trainer restarts with a
    smaller batch."""

    steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count one optimizer step; called by the Trainer."""
        self.steps += 1


def their_job(job: Job, folder: Path, capacity_bytes: int) -> JobOutcome:
    """Run the job for one epoch with transformers' Trainer and auto_find_batch_size, on a metered device of
    `capacity_bytes`."""
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
    return JobOutcome(steps.steps, seen[0], seen[0] - len(job.sequences), batch, mean_loss(model, job))


def peak_of_short_steps(size: Size, folder: Path) -> int:
    """Peak bytes of a training step of short samples in one micro-batch, measured on a metered device. The
    job's device gets 10 % more capacity."""
    job = write_job(folder / "short", [size.short] * BATCH, vocabulary=264, hidden=size.hidden, steps=1)
    device = MeteredDevice(CAPACITY_BYTES)
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
