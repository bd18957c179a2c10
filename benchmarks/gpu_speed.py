"""The suite `speed` of `benchmarks.gpu`: tokens/s of the engine beside transformers' Trainer and TRL's SFTTrainer, and
where the time of a step goes.

All train the same LoRA on the same samples with the same batch size and the same largest micro-batch: first samples of
equal length, then of mixed (log-normal) lengths, as in chat data. Each is a process of its own, and they take turns
step by step, three at a time, which fit on a card of 80 GB together. Peers with Liger use all of its kernels for the
family.

Try: `python -m benchmarks.gpu speed --out /tmp/gpu --device metered`
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.gpu_runs import EXPERTS, MIXTURE, Result, SuiteDevice, TrainingCase, measured_run
from engine.config.changes import with_changes
from engine.config.schema.run import RunSpec
from engine.device.oom import frozen_gc
from engine.device.open import open_device
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, Journal
from engine.train.run.oom_report import oom_reporter
from engine.train.run.setup import set_up
from engine.train.step.optimizer import set_learning_rates
from engine.train.step.transaction import StepTransaction
from engine.verify.verify import prove

if TYPE_CHECKING:  # torch is imported where it is used: the process of a suite holds no CUDA context
    from benchmarks.in_turn import StepDone

MODEL, RANK = "meta-llama/Llama-3.1-8B", 16
LENGTH, MICRO, ROWS = 4096, 2, 4
SMALL_LENGTH = 64
OURS, FUSED = "tunedeck", "tunedeck with fused kernels"
TRAINER, TRL, WITH_LIGER = "Trainer", "SFTTrainer", " with Liger"
WARM_UP, FIXED, MIXED = 2, 3, 4
"""Steps that are not counted, then steps with samples of equal length; then again one step that is not counted, and
steps with samples of mixed lengths."""
STEPS = WARM_UP + FIXED + 1 + MIXED
FIXED_STEPS, MIXED_STEPS = slice(WARM_UP, WARM_UP + FIXED), slice(WARM_UP + FIXED + 1, None)


@dataclass(frozen=True)
class SpeedJob:
    """What all trainers train: the model's folder, samples, and whether activations are recomputed."""

    folder: Path
    kind: str
    """The device: "cuda" or "metered"."""
    checkpointing: bool

    def sequences(self) -> list[list[int]]:
        """The token ids of all samples, in order."""
        from benchmarks.job import RECIPE_MODEL
        from engine.model.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(RECIPE_MODEL)
        texts = [json.loads(line)["text"] for line in (self.folder / "samples.jsonl").open(encoding="utf-8")]
        return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]


def write_speed_job(device: SuiteDevice, folder: Path, *, checkpointing: bool) -> tuple[SpeedJob, RunSpec, list[int]]:
    """Write model and samples into `folder`. Returns the job, the engine's run spec of it, and the tokens of each
    step."""
    train = {"gradient_checkpointing": checkpointing, "learning_rate": 1e-4, "scheduler": "constant"}
    case = TrainingCase(MODEL, {"rank": RANK}, MICRO, LENGTH, train)
    spec = case.spec(device, folder, max_steps=STEPS, batch_size=ROWS)
    longest, drawn = SMALL_LENGTH if device.is_small else LENGTH, random.Random(1)
    middle = 0.2 * longest  # of log-normal lengths: most are short, a few are cut at the longest
    fixed = [longest] * (ROWS * (WARM_UP + FIXED))
    mixed = [max(8, min(longest, int(middle * drawn.lognormvariate(0.0, 0.9)))) for _ in range(ROWS * (1 + MIXED))]
    with (folder / "samples.jsonl").open("w") as file:
        for length in fixed + mixed:
            file.write(json.dumps({"text": "".join(drawn.choices("abcdefgh ", k=length - 1))}) + "\n")
    lengths = fixed + mixed
    tokens = [sum(lengths[start : start + ROWS]) for start in range(0, len(lengths), ROWS)]
    return SpeedJob(folder, device.kind, checkpointing), spec, tokens


def ours(spec: RunSpec, step_done: StepDone) -> None:
    """Train with the engine's set-up, proofs and step transaction. `step_done` is called after each optimizer step."""
    with engine_steps(spec) as one_step:
        for step in range(1, STEPS + 1):
            one_step(step)
            step_done()


@contextmanager
def engine_steps(spec: RunSpec) -> Iterator[Callable[[int], int]]:
    """Set up the engine, and yield the function that runs the step of the given number, counted from 1, and returns the
    largest number of bytes that it allocated."""
    with tempfile.TemporaryDirectory() as folder, EventWriter(RunDirectory(Path(folder))) as writer:
        journal = Journal(writer)
        device = open_device(spec, beside=True)
        with device.activate():
            setup = set_up(spec, device, journal, oom_reporter(journal, device))
            prove(setup, journal)
            transaction = StepTransaction(setup.context)

            def one_step(step: int) -> int:
                set_learning_rates(setup.context.optimizer, setup.schedule.factor(step))
                transaction.run(step, setup.order.step(step))
                device.synchronize()
                return transaction.work.peak_bytes

            with frozen_gc():
                yield one_step


def peer(job: SpeedJob, name: str, liger: bool, step_done: StepDone) -> None:
    """Train with peft in transformers' Trainer (`name` "Trainer") or TRL's SFTTrainer ("SFTTrainer"). `step_done` is
    called after each optimizer step."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer

    from benchmarks.in_turn import StepEnd
    from benchmarks.job import RECIPE_MODEL, padded, quietly
    from engine.model.tokenizer import load_tokenizer

    cuda = job.kind == "cuda"
    config = AutoConfig.from_pretrained(job.folder / "model")
    with torch.device("cuda" if cuda else "cpu"):
        dtype = torch.bfloat16 if cuda else torch.float32
        loading: Any = AutoModelForCausalLM
        base = loading.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    arguments: dict[str, Any] = {
        "output_dir": str(job.folder / "peer"), "max_steps": STEPS, "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ROWS // MICRO, "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused", "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": not cuda,
        "bf16": cuda, "disable_tqdm": True, "gradient_checkpointing": job.checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "use_liger_kernel": liger,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip

    def synchronized() -> None:
        if cuda:
            torch.cuda.synchronize()
        step_done()

    callbacks: Any = [StepEnd(synchronized)]
    if name == "Trainer":
        rows = [{"input_ids": ids, "labels": ids} for ids in job.sequences()]
        own = TrainingArguments(**arguments, remove_unused_columns=False)
        quietly(Trainer(model=model, args=own, train_dataset=rows, data_collator=padded, callbacks=callbacks))
        return
    prepared = SFTConfig(**arguments, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
    data = Dataset.from_list([{"input_ids": ids} for ids in job.sequences()])
    tokenizer = load_tokenizer(RECIPE_MODEL)
    quietly(SFTTrainer(model=model, args=prepared, train_dataset=data, processing_class=tokenizer, callbacks=callbacks))


def compared(device: SuiteDevice, folder: Path, *, contestants: tuple[str, ...]) -> Result:
    """Let the engine and its peers train the same job in turns, with all layers recomputed. `ok` if the fastest of
    ours is at least as fast as each peer."""
    from benchmarks.in_turn import take_turns

    job, spec, tokens = write_speed_job(device, folder, checkpointing=True)
    ready = {
        OURS: partial(ours, with_changes(spec, {"model.kernels": "torch"})),
        FUSED: partial(ours, with_changes(spec, {"model.kernels": "auto"})),
        **{
            name + liger: partial(peer, job, name, bool(liger)) for name in (TRAINER, TRL) for liger in ("", WITH_LIGER)
        },
    }
    own = [name for name in contestants if name in (OURS, FUSED)]
    peers = [name for name in contestants if name not in own]
    steps = take_turns({name: ready[name] for name in contestants}, STEPS)
    parts = {"fixed": FIXED_STEPS, "mixed": MIXED_STEPS}
    speeds = {
        part: {
            label: round(sum(tokens[chosen]) / sum(step.clock for step in taken[chosen]), 1)
            for label, taken in steps.items()
        }
        for part, chosen in parts.items()
    }
    ratios = {
        part: round(max(found[name] for name in own) / max(found[name] for name in peers), 3)
        for part, found in speeds.items()
    }
    said = "; ".join(f"{part} lengths {ratios[part]:.2f} of the fastest peer" for part in speeds)
    return {
        "ok": device.is_small or min(ratios.values()) >= 1.0,
        "tokens_per_second": speeds,
        "step_seconds": {label: [round(step.clock, 3) for step in taken] for label, taken in steps.items()},
        "to_the_fastest_peer": ratios,
        "said": f"{max(speeds['fixed'][name] for name in own):.0f} tokens/s; {said}",
    }


def profiled(device: SuiteDevice, folder: Path, *, checkpointing: bool, kernels: str = "torch") -> Result:
    """Run one step of the engine under torch's profiler, after two others. Tells the time of each kernel, and the
    seconds of the steps before."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    _, spec, tokens = write_speed_job(device, folder, checkpointing=checkpointing)
    activities = [ProfilerActivity.CPU] if device.is_small else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    seconds = []
    with engine_steps(with_changes(spec, {"model.kernels": kernels})) as one_step:
        for step in range(1, WARM_UP + FIXED):
            began = time.perf_counter()
            one_step(step)
            seconds.append(round(time.perf_counter() - began, 4))
        with profile(activities=activities) as found:
            one_step(WARM_UP + FIXED)
        if device.kind == "cuda":
            torch.cuda.synchronize()
    speed = tokens[0] / statistics.median(seconds[WARM_UP:])
    found_kernels = [
        {"name": each.key[:160], "count": each.count, "milliseconds": round(_microseconds(each, device) / 1000, 3)}
        for each in found.key_averages()
        if device.is_small or str(each.device_type).endswith("CUDA")
    ]
    found_kernels.sort(key=lambda each: -each["milliseconds"])
    whole, longest = sum(each["milliseconds"] for each in found_kernels), found_kernels[0]
    return {
        "ok": True,
        "tokens_per_second": round(speed, 1),
        "step_seconds": seconds,
        "milliseconds": round(whole, 1),
        "kernels": found_kernels[:80],
        "said": f"{speed:.0f} tokens/s; {whole:.0f} ms in kernels, the longest {longest['name'][:40]}: "
        f"{longest['milliseconds']:.0f} ms",
    }


Choices = dict[str, dict[str, Any]]
"""Changes to a recipe, by a name for them."""
FLASH: Choices = {"cuDNN": {}, "flash": {"model.attention": "sdpa"}}
OFFLOADED: Choices = {
    "kept": {"train.gradient_checkpointing": False},
    "recomputed": {"train.gradient_checkpointing": True},
    "offloaded": {"train.gradient_checkpointing": False, "train.activation_offload": True},
}
COMPILED: Choices = {"compiled": {"train.compile": True}, "fused": {}, "torch": {"model.kernels": "torch"}}
ON_HOST: Choices = {"on the GPU": {}, "on the host": {"train.optimizer_offload": True}}
SETTINGS: dict[str, tuple[TrainingCase, Choices]] = {
    "compiled": (TrainingCase(MODEL, {"rank": RANK}, MICRO, LENGTH, {"gradient_checkpointing": False}), COMPILED),
    "activation-offload": (TrainingCase(MODEL, {"rank": RANK}, 1, LENGTH, {}), OFFLOADED),
    "optimizer-offload": (TrainingCase("Qwen/Qwen2.5-1.5B", {"kind": "full"}, 2, 2048, {}), ON_HOST),
}
"""What is trained with each of several settings."""


def settings(case: TrainingCase, choices: Choices, device: SuiteDevice, folder: Path) -> Result:
    """Train `case` with each of `choices`: seconds of a step, and the largest number of bytes allocated in one beside
    the plan's."""
    found = _each(case.spec(device, folder, max_steps=WARM_UP + 2 * FIXED), choices, device, folder)
    said = []
    for name, each in found.items():
        seconds = statistics.median(each["step_seconds"][WARM_UP:])
        said.append(f"{name} {1000 * seconds:.0f} ms, {each['peak_bytes'] / 2**30:.2f} GiB")
    return {"ok": True, "settings": found, "said": "; ".join(said)}


def attention(device: SuiteDevice, folder: Path) -> Result:
    """Train with cuDNN's attention where the engine takes it, then with torch's flash kernel alone, with nothing
    recomputed: tokens per second for rows of equal and of mixed lengths, and the largest number of bytes allocated."""
    _, spec, tokens = write_speed_job(device, folder, checkpointing=False)
    found = _each(spec, FLASH, device, folder)
    for each in found.values():
        each["tokens_per_second"] = {
            part: round(sum(tokens[chosen]) / sum(each["step_seconds"][chosen]), 1)
            for part, chosen in {"fixed": FIXED_STEPS, "mixed": MIXED_STEPS}.items()
        }
    said = (f"{name} {each['tokens_per_second']} tokens/s" for name, each in found.items())
    return {"ok": True, "settings": found, "said": "; ".join(said)}


def _each(spec: RunSpec, choices: Choices, device: SuiteDevice, folder: Path) -> dict[str, dict[str, Any]]:
    """Train with each of `choices` in a process of its own, one after the other."""
    found: dict[str, dict[str, Any]] = {}
    for name, changes in choices.items():
        run = measured_run(with_changes(spec, changes), folder / name, device).expect()
        found[name] = {
            "step_seconds": [round(event["step_seconds"], 4) for event in run.of_kind("step")],
            "peak_bytes": run.peak_bytes,
            "predicted_peak_bytes": run.finished["measured"]["predicted"]["peak_bytes"],
            "proofs": {event["name"]: event["detail"] for event in run.of_kind("proof")},
        }
    return found


def experts(device: SuiteDevice, folder: Path) -> Result:
    """Train adapters on the experts of a mixture as the engine computes them, then as peft does: seconds of a step,
    and the largest number of bytes allocated in one."""
    from engine.model.adapted_experts import AdaptersInGroups

    method = {"rank": RANK} if device.is_small else EXPERTS  # the small model has no experts
    spec = TrainingCase(MIXTURE, method, 2, 2048, {"learning_rate": 1e-4}, layers=8).spec(device, folder)
    found: dict[str, Any] = {}
    said = []
    for name, choice in (("engine", AdaptersInGroups), ("peft", lambda model: None)):
        with patch("engine.model.load.AdaptersInGroups", choice):
            seconds, peak_bytes = _timed_steps(spec, WARM_UP + FIXED)
        found[name] = {"step_seconds": seconds, "peak_bytes": peak_bytes}
        said.append(f"{name} {1000 * statistics.median(seconds[WARM_UP:]):.0f} ms, {peak_bytes / 2**30:.2f} GiB")
    return {"ok": True, **found, "said": "; ".join(said)}


def _timed_steps(spec: RunSpec, count: int) -> tuple[list[float], int]:
    """Run so many steps of the engine. Returns the seconds of each, and the largest number of bytes allocated in one;
    nothing is left on the device."""
    import torch

    seconds, peak_bytes = [], 0
    with engine_steps(spec) as one_step:
        for step in range(1, count + 1):
            began = time.perf_counter()
            peak_bytes = max(peak_bytes, one_step(step))
            seconds.append(round(time.perf_counter() - began, 4))
    del one_step
    gc.collect()
    torch.cuda.empty_cache()
    return seconds, peak_bytes


def _microseconds(each: Any, device: SuiteDevice) -> float:
    return float(each.self_cpu_time_total if device.is_small else each.self_device_time_total)
