"""Our training loop beside transformers' Trainer and TRL's SFTTrainer: same small model, same samples, same updates.

Run: python -m benchmarks.loop [--rounds 8] [--steps 6]        (needs tunedeck[bench]; CPU, about five minutes)

Speed: tokens/s of real (unpadded) tokens, contestants in turn (A B C C B A ...) in one process; the first step of each
round and the whole first round are left out; medians, and the ratio round by round. Lengths once all equal, once mixed
as chat data is (log-normal). Everybody gets the same effective batch and the same largest micro-batch.
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
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging
from trl import SFTConfig, SFTTrainer

from engine.device import open_device
from engine.device.base import Device
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.model.tokenizer import load_tokenizer
from engine.spec.recipe import Model
from engine.spec.run import RunSpec
from engine.train.journal import Journal
from engine.train.loop import reporter
from engine.train.optimizer import set_learning_rates
from engine.train.setup import set_up
from engine.train.transaction import StepTransaction

RECIPE_MODEL = Model(id="builtin:tiny", tokenizer="builtin:bytes", init="random")
BATCH, MICRO = 32, 8
RATE = 1e-3


@dataclass
class Job:
    """A model folder, token sequences, and the number of steps."""

    folder: Path
    sequences: list[list[int]]
    steps: int

    @property
    def tokens_per_step(self) -> list[int]:
        """Real tokens of each step, in order."""
        lengths = [len(sequence) for sequence in self.sequences]
        return [sum(lengths[start : start + BATCH]) for start in range(0, self.steps * BATCH, BATCH)]


def make_job(folder: Path, *, mixed: bool, vocabulary: int, steps: int, hidden: int = 192) -> Job:
    """A random Qwen2 of about 2 M parameters beside its embedding, and data: 256 tokens each, or log-normal lengths."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(RECIPE_MODEL)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    drawn = random.Random(1)
    lengths = [
        max(8, min(512, int(drawn.lognormvariate(4.2, 0.9)))) if mixed else 256 for _ in range(steps * BATCH)
    ]
    letters = "abcdefghijklmnopqrstuvwxyz     "
    texts = ["".join(drawn.choices(letters, k=length - 1)) for length in lengths]
    with (folder / "samples.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return Job(folder, [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts], steps)


def spec_of(job: Job, device: str) -> RunSpec:
    """The engine's settings for a job."""
    recipe = {
        "name": "bench",
        "model": {"id": str(job.folder), "dtype": "float32", "tokenizer": str(job.folder)},
        "method": {"kind": "full"},
        "data": {
            "sources": [{"name": "main", "path": str(job.folder / "samples.jsonl")}],
            "shuffle": False,
            "max_length": 513,
        },
        "train": {
            "max_steps": job.steps,
            "batch_size": BATCH,
            "micro_batch": MICRO,
            "learning_rate": RATE,
            "scheduler": "constant",
            "gradient_checkpointing": False,
        },
    }
    profile = {"name": "bench", "device": {"kind": device, "memory_gib": 64.0}}
    return RunSpec.model_validate({"name": "bench", "profile": profile, "recipe": recipe})


def ours(job: Job, device: Device) -> list[float]:
    """Seconds of each step of the engine's own step transaction."""
    with tempfile.TemporaryDirectory() as folder:
        place = RunDirectory(Path(folder))
        with EventWriter(place) as writer:
            journal = Journal(writer)
            bench = set_up(spec_of(job, device.kind), device, journal, reporter(journal, device.capacity_bytes))
            transaction = StepTransaction(bench.parts)
            seconds = []
            for step in range(1, job.steps + 1):
                began = time.perf_counter()
                set_learning_rates(bench.parts.optimizer, bench.schedule.factor(step))
                transaction.run(step, bench.order.step(step))
                seconds.append(time.perf_counter() - began)
            return seconds


class Clock(TrainerCallback):
    """Seconds from the end of one optimizer step of a Trainer to the end of the next, batches fetched in between."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


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


def trainer(job: Job, _device: Device) -> list[float]:
    """Seconds of each step of transformers' Trainer."""
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    rows = [{"input_ids": ids, "labels": ids} for ids in job.sequences]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**their_arguments(job, folder), remove_unused_columns=False)
        quietly(Trainer(model=model, args=arguments, train_dataset=rows, data_collator=padded, callbacks=[clock]))
    return clock.seconds


def sft(job: Job, _device: Device) -> list[float]:
    """Seconds of each step of TRL's SFTTrainer."""
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        prepared = {"skip_prepare_dataset": True}
        arguments = SFTConfig(**their_arguments(job, folder), max_length=None, dataset_kwargs=prepared)
        rows = Dataset.from_list([{"input_ids": ids} for ids in job.sequences])
        tokenizer = load_tokenizer(RECIPE_MODEL)
        quietly(
            SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[clock])
        )
    return clock.seconds


def quietly(trainer: Trainer) -> None:
    """Train without a printed line per step."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """What DataCollatorWithPadding does, for rows that carry labels."""
    width = max(len(row["input_ids"]) for row in rows)
    ids, labels, mask = (torch.full((len(rows), width), filler) for filler in (0, -100, 0))
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[number, :length] = torch.tensor(row["input_ids"])
        labels[number, :length] = torch.tensor(row["labels"])
        mask[number, :length] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


CONTESTANTS: dict[str, Callable[[Job, Device], list[float]]] = {"tunedeck": ours, "Trainer": trainer, "SFTTrainer": sft}


def compare_speed(job: Job, rounds: int) -> dict[str, Any]:
    """Tokens/s of everybody, in turn, and our ratio to each of the others round by round."""
    device = open_device(spec_of(job, "cpu"))
    tokens = sum(job.tokens_per_step[1:])
    speeds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds + 1):
        # Every other round in reverse: nobody always runs on the heap that the same neighbour left behind.
        for name, contestant in list(CONTESTANTS.items())[:: 1 if number % 2 else -1]:
            speed = tokens / sum(contestant(job, device)[1:])
            # The first round pays for the process: pages of the heap, kernels, caches.
            if number:
                speeds[name].append(speed)
            gc.collect()
    table: dict[str, Any] = {name: round(statistics.median(values)) for name, values in speeds.items()}
    for name in list(CONTESTANTS)[1:]:
        ratios = [mine / other for mine, other in zip(speeds["tunedeck"], speeds[name], strict=True)]
        table[f"ratio to {name}"] = [round(statistics.median(ratios), 2), round(min(ratios), 2), round(max(ratios), 2)]
    return table


def compare_memory(job: Job) -> dict[str, float]:
    """MiB of tensors at the peak, model and optimizer included."""
    peaks = {}
    for name, contestant in CONTESTANTS.items():
        device = open_device(spec_of(job, "metered"))
        peak = PeakOfRun(device)
        with device.activate():
            contestant(job, peak)  # type: ignore[arg-type]
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
    arguments.add_argument("--rounds", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=5)
    asked = arguments.parse_args()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        for name, mixed in (("fixed", False), ("mixed", True)):
            job = make_job(Path(folder, name), mixed=mixed, vocabulary=264, steps=asked.steps)
            print(f"{name} lengths, tokens/s (ratios: median, min, max):", json.dumps(compare_speed(job, asked.rounds)))
        job = make_job(Path(folder, "memory"), mixed=False, vocabulary=32768, steps=2, hidden=128)
        print("peak MiB of tensors at a vocabulary of 32768:", json.dumps(compare_memory(job)))


if __name__ == "__main__":
    main()
