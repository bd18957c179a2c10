"""Our training loop beside transformers' Trainer and TRL's SFTTrainer: same small model, same samples, same updates.

Run: python -m benchmarks.loop [--steps 30]        (needs tunedeck[bench]; CPU, about five minutes)

Speed: tokens/s of real (unpadded) tokens. The three train side by side in one process, in turn step by step (A B C C B
A ...), each stopped while another steps, so that every ratio compares the same samples within a few seconds; the first
steps are left out. Lengths once all equal, once mixed as chat data is (log-normal). Everybody gets the same effective
batch and the same largest micro-batch.
Memory: bytes of tensors at the peak of a step, counted by the metered device around each contestant, at a vocabulary
of 32k. Workspace inside single operations is not counted, for nobody.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging
from trl import SFTConfig, SFTTrainer

from benchmarks.job import BATCH, MICRO, RATE, RECIPE_MODEL, Job, padded, quietly, spec_of, write_job
from engine.device import open_device
from engine.device.base import Device
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.model.tokenizer import load_tokenizer
from engine.train.journal import Journal
from engine.train.optimizer import set_learning_rates
from engine.train.report import reporter
from engine.train.setup import set_up
from engine.train.transaction import StepTransaction

WARM_UP_STEPS = 3
"""Left out: they pay for the process, its heap and its kernels."""

StepDone = Callable[[], None]
"""Called by a contestant after each optimizer step; returns when it may go on."""


def make_job(folder: Path, *, mixed: bool, vocabulary: int, steps: int, hidden: int = 192) -> Job:
    """256 tokens each, or log-normal lengths."""
    drawn = random.Random(1)
    lengths = [
        max(8, min(512, int(drawn.lognormvariate(4.2, 0.9)))) if mixed else 256 for _ in range(steps * BATCH)
    ]
    return write_job(folder, lengths, vocabulary=vocabulary, hidden=hidden, steps=steps)


def ours(job: Job, device: Device, step_done: StepDone) -> None:
    """The engine's own step transaction."""
    with tempfile.TemporaryDirectory() as folder:
        place = RunDirectory(Path(folder))
        with EventWriter(place) as writer:
            journal = Journal(writer)
            bench = set_up(spec_of(job, device.kind), device, journal, reporter(journal, device))
            transaction = StepTransaction(bench.parts)
            for step in range(1, job.steps + 1):
                set_learning_rates(bench.parts.optimizer, bench.schedule.factor(step))
                transaction.run(step, bench.order.step(step))
                step_done()


class StepEnd(TrainerCallback):
    """Reports the end of each optimizer step of a Trainer; fetching the next batches belongs to the next step."""

    def __init__(self, step_done: StepDone) -> None:
        self._step_done = step_done

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._step_done()


class InTurn:
    """A contestant in a thread of its own, at rest between its steps until `step` lets it do one more."""

    def __init__(self, contestant: Contestant, job: Job, device: Device) -> None:
        self.seconds: list[float] = []
        """Of each step so far; the first includes getting ready."""
        self._error: BaseException | None = None
        self._go, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, args=(contestant, job, device), daemon=True).start()

    def step(self) -> None:
        """Let it do one step and wait for the end of it."""
        self._go.release()
        self._rests.acquire()
        if self._error:
            raise self._error

    def _run(self, contestant: Contestant, job: Job, device: Device) -> None:
        self._go.acquire()
        self._began = time.perf_counter()
        try:
            contestant(job, device, self._step_done)
        except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
            self._error = error
        self._rests.release()

    def _step_done(self) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self._rests.release()
        self._go.acquire()
        self._began = time.perf_counter()


def their_arguments(job: Job, folder: str) -> dict[str, Any]:
    """Settings that make the two trainers do the engine's work."""
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
    """transformers' Trainer."""
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    rows = [{"input_ids": ids, "labels": ids} for ids in job.sequences]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**their_arguments(job, folder), remove_unused_columns=False)
        callbacks = [StepEnd(step_done)]
        quietly(Trainer(model=model, args=arguments, train_dataset=rows, data_collator=padded, callbacks=callbacks))


def sft(job: Job, _device: Device, step_done: StepDone) -> None:
    """TRL's SFTTrainer."""
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        prepared = {"skip_prepare_dataset": True}
        arguments = SFTConfig(**their_arguments(job, folder), max_length=None, dataset_kwargs=prepared)
        rows = Dataset.from_list([{"input_ids": ids} for ids in job.sequences])
        tokenizer = load_tokenizer(RECIPE_MODEL)
        callbacks = [StepEnd(step_done)]
        quietly(
            SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks)
        )


Contestant = Callable[[Job, Device, StepDone], None]
CONTESTANTS: dict[str, Contestant] = {"tunedeck": ours, "Trainer": trainer, "SFTTrainer": sft}


def compare_speed(job: Job) -> dict[str, Any]:
    """Tokens/s of everybody, and our ratio to each of the others step by step: median and quartiles."""
    device = open_device(spec_of(job, "cpu"))
    running = {name: InTurn(contestant, job, device) for name, contestant in CONTESTANTS.items()}
    for number in range(job.steps):
        # Every other time in reverse: nobody always follows the same neighbour.
        for contestant in list(running.values())[:: 1 if number % 2 else -1]:
            contestant.step()
    tokens = job.tokens_per_step[WARM_UP_STEPS:]
    seconds = {name: contestant.seconds[WARM_UP_STEPS:] for name, contestant in running.items()}
    table: dict[str, Any] = {name: round(sum(tokens) / sum(spent)) for name, spent in seconds.items()}
    for name in list(CONTESTANTS)[1:]:
        ratios = [theirs / mine for mine, theirs in zip(seconds["tunedeck"], seconds[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        table[f"ratio to {name}"] = [round(middle, 3), round(low, 3), round(high, 3)]
    return table


def compare_memory(job: Job) -> dict[str, float]:
    """MiB of tensors at the peak, model and optimizer included."""
    peaks = {}
    for name, contestant in CONTESTANTS.items():
        device = open_device(spec_of(job, "metered"))
        peak = PeakOfRun(device)
        with device.activate():
            contestant(job, peak, lambda: None)  # type: ignore[arg-type]
        peaks[name] = round(device.memory().peak_bytes / 2**20, 1)
        gc.collect()
    return peaks


class PeakOfRun:
    """A metered device whose peak is never reset, so that the figure covers the whole run."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def reset_peak(self) -> None:
        """Kept: the run's peak is wanted."""


def main() -> None:
    """Print the three tables."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=30)
    asked = arguments.parse_args()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        for name, mixed in (("fixed", False), ("mixed", True)):
            job = make_job(Path(folder, name), mixed=mixed, vocabulary=264, steps=asked.steps)
            figures = json.dumps(compare_speed(job))
            print(f"{name} lengths, tokens/s (ratios of a step: median, quartiles):", figures, flush=True)
        job = make_job(Path(folder, "memory"), mixed=False, vocabulary=32768, steps=2, hidden=128)
        print("peak MiB of tensors at a vocabulary of 32768:", json.dumps(compare_memory(job)))


if __name__ == "__main__":
    main()
