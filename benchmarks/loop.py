"""Compares the engine's training loop with transformers' Trainer and TRL's SFTTrainer on the same model and samples.

Run: python -m benchmarks.loop [--steps 30]        (needs tunedeck[bench]; CPU, about five minutes)

Speed: tokens/s without padding. Each trainer runs in its own process; they take turns step by step (A B C C B A
...) while the others are idle, so that every ratio compares the same samples within a few seconds. The first steps are
left out. Ratios are given of wall-clock time and of processor time, which other work on the machine disturbs less. One
job has samples of equal length, the other of mixed (log-normal) lengths, as in chat data. All trainers get the same
effective batch and the same largest micro-batch.
Memory: peak bytes of tensors, counted by the metered device for each trainer, with a vocabulary of 32k. Workspace that
operations allocate internally is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from benchmarks.in_turn import StepDone, StepEnd, be_quiet, quartiles, take_turns
from benchmarks.job import BATCH, MICRO, RATE, RECIPE_MODEL, Job, padded, quietly, spec_of, write_job
from engine.device.base import Device
from engine.device.open import open_device
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, Journal
from engine.model.tokenizer import load_tokenizer
from engine.train.run.oom_report import oom_reporter
from engine.train.run.setup import set_up
from engine.train.step.optimizer import set_learning_rates
from engine.train.step.transaction import StepTransaction

WARM_UP_STEPS = 3
"""First steps, left out of the figures: they include the start-up of process, heap and kernels."""


def make_job(folder: Path, *, mixed: bool, vocabulary: int, steps: int, hidden: int = 192) -> Job:
    """Write a job of `steps` steps into `folder` and return it; for `vocabulary` and `hidden` see `write_job`. Its
    texts have 256 tokens each, or with `mixed` log-normal lengths."""
    drawn = random.Random(1)
    lengths = [max(8, min(512, int(drawn.lognormvariate(4.2, 0.9)))) if mixed else 256 for _ in range(steps * BATCH)]
    return write_job(folder, lengths, vocabulary=vocabulary, hidden=hidden, steps=steps)


def ours(job: Job, device: Device, step_done: StepDone) -> None:
    """Train the job with the engine's step transaction. `step_done` is called after each optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        place = RunDirectory(Path(folder))
        with EventWriter(place) as writer:
            journal = Journal(writer)
            setup = set_up(spec_of(job, device.kind), device, journal, oom_reporter(journal, device))
            transaction = StepTransaction(setup.context)
            for step in range(1, job.steps + 1):
                set_learning_rates(setup.context.optimizer, setup.schedule.factor(step))
                transaction.run(step, setup.order.step(step))
                step_done()


def their_arguments(job: Job, folder: str) -> dict[str, Any]:
    """Arguments with which Trainer and SFTTrainer make the same weight updates as the engine."""
    return {
        "output_dir": folder,
        "max_steps": job.steps,
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": BATCH // MICRO,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
    }


def trainer(job: Job, _device: Device, step_done: StepDone) -> None:
    """Train the job with transformers' Trainer. `step_done` is called after each optimizer step."""
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    rows = [{"input_ids": ids, "labels": ids} for ids in job.sequences]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**their_arguments(job, folder), remove_unused_columns=False)
        callbacks: list[TrainerCallback] = [StepEnd(step_done)]
        quietly(Trainer(model=model, args=arguments, train_dataset=rows, data_collator=padded, callbacks=callbacks))


def sft(job: Job, _device: Device, step_done: StepDone, *, padding_free: bool = False) -> None:
    """Train the job with TRL's SFTTrainer; `step_done` is called after each optimizer step. With `padding_free`, the
    sequences of a micro-batch are concatenated to one row without padding. This is meant for flash attention; on a CPU
    torch's sdpa gets a mask that separates them."""
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        prepared = {"skip_prepare_dataset": True}
        arguments = SFTConfig(
            **their_arguments(job, folder), max_length=None, dataset_kwargs=prepared, padding_free=padding_free
        )
        rows = Dataset.from_list([{"input_ids": ids} for ids in job.sequences])
        tokenizer = load_tokenizer(RECIPE_MODEL)
        callbacks: list[TrainerCallback] = [StepEnd(step_done)]
        quietly(
            SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks)
        )


CONTESTANTS: dict[str, Callable[[Job, Device, StepDone], None]] = {
    "tunedeck": ours,
    "Trainer": trainer,
    "SFTTrainer": sft,
    "SFTTrainer padding_free": partial(sft, padding_free=True),
}
"""TRL 1.16 always computes the loss in chunks: its `loss_type` "chunked_nll" is another name of the default."""


def _on_the_cpu(name: str, job: Job, step_done: StepDone) -> None:
    CONTESTANTS[name](job, open_device(spec_of(job, "cpu")), step_done)


def compare_speed(job: Job) -> dict[str, Any]:
    """Tokens/s of each trainer, and the ratio of the engine's speed to each other trainer's: median and quartiles over
    steps."""
    every = take_turns({name: partial(_on_the_cpu, name, job) for name in CONTESTANTS}, job.steps)
    tokens = job.tokens_per_step[WARM_UP_STEPS:]
    steps = {name: own[WARM_UP_STEPS:] for name, own in every.items()}
    table: dict[str, Any] = {name: round(sum(tokens) / sum(step.clock for step in own)) for name, own in steps.items()}
    for name in list(CONTESTANTS)[1:]:
        pairs = list(zip(steps["tunedeck"], steps[name], strict=True))
        table[f"ratio to {name}"] = quartiles(theirs.clock / mine.clock for mine, theirs in pairs)
        table[f"of processor time to {name}"] = quartiles(theirs.processor / mine.processor for mine, theirs in pairs)
    return table


def compare_memory(job: Job) -> dict[str, float]:
    """Peak MiB of tensors for each trainer, including model and optimizer."""
    peaks = {}
    for name, contestant in CONTESTANTS.items():
        device = open_device(spec_of(job, "metered"))
        peak = PeakOfRun(device)
        with device.activate():
            contestant(job, peak, lambda: None)
        peaks[name] = round(device.memory().peak_bytes / 2**20, 1)
        gc.collect()
    return peaks


class PeakOfRun:
    """A metered device whose peak is never reset, so that its peak in bytes is that of the whole run."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def reset_peak(self) -> None:
        """Do nothing, so that the peak is that of the whole run."""


def main() -> None:
    """Run all comparisons and print their tables."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=30)
    asked = arguments.parse_args()
    be_quiet()
    with tempfile.TemporaryDirectory() as folder:
        for name, mixed in (("fixed", False), ("mixed", True)):
            job = make_job(Path(folder, name), mixed=mixed, vocabulary=264, steps=asked.steps)
            figures = json.dumps(compare_speed(job))
            print(f"{name} lengths, tokens/s (ratios of a step: median, quartiles):", figures, flush=True)
        job = make_job(Path(folder, "memory"), mixed=False, vocabulary=32768, steps=2, hidden=128)
        print("peak MiB of tensors at a vocabulary of 32768:", json.dumps(compare_memory(job)))


if __name__ == "__main__":
    main()
