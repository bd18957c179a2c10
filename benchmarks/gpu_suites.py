"""The measurements of `benchmarks.gpu`: what each trains, and what it reads from the run's journal afterwards.

Models have their published configs and random weights, since memory does not depend on the weights' values. On the
metered device a small model replaces each of them, with less memory.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.budget.advise.fit import with_changes
from engine.budget.advise.plan import make_plan
from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventTail
from engine.launch.process import start_engine
from engine.spec.load import dump_run_spec
from engine.spec.schema.run import RunSpec

Result = dict[str, Any]
STEPS = 4
SMALL_CONFIG = {
    "model_type": "qwen2", "vocab_size": 1200, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class SuiteDevice:
    """The device on which a suite runs: this machine's GPU or a metered device."""

    kind: str
    name: str
    memory_gib: float
    compute_capability: float | None

    @classmethod
    def of(cls, kind: str) -> SuiteDevice:
        """The GPU of this machine, or a metered device, depending on `kind`. Raises EnvironmentProblem if there is no
        GPU."""
        if kind == "metered":
            return cls(kind, "metered", 2.0, None)
        import torch

        if not torch.cuda.is_available():
            raise EnvironmentProblem("no CUDA card is visible", fix="run the suites small with --device metered")
        card = torch.cuda.get_device_properties(0)
        return cls(kind, card.name, card.total_memory / 2**30, float(f"{card.major}.{card.minor}"))

    @property
    def is_small(self) -> bool:
        """Whether small models are trained instead of models of real size."""
        return self.kind == "metered"

    def profile(self, memory_gib: float | None = None) -> dict[str, Any]:
        """A profile of this device, as a dict; `memory_gib` replaces the amount of memory."""
        table = {"kind": self.kind, "memory_gib": memory_gib or self.memory_gib}
        if self.compute_capability:
            table |= {"compute_capability": self.compute_capability, "allocator": "expandable_segments:True"}
        return {"name": "suite", "device": table}


@dataclass(frozen=True)
class Measurement:
    """One measurement of a suite. `run` is called with the device and an empty folder, and returns a dict that contains
    at least `ok` and the summary `said`."""

    name: str
    run: Callable[[SuiteDevice, Path], Result]


@dataclass(frozen=True)
class TrainingCase:
    """A model with a training method, the size of a micro-batch, and other settings of a recipe."""

    model: str
    method: dict[str, Any]
    rows: int
    length: int
    train: dict[str, Any]
    dtype: str = "bfloat16"
    quantize: str = "none"
    padded: bool = False
    """Whether sequences have different lengths, so that micro-batches are padded."""

    def spec(self, device: SuiteDevice, folder: Path, memory_gib: float | None = None, **train: Any) -> RunSpec:
        """Write random text for two micro-batches per step into `folder`, and return the run spec of the case."""
        folder.mkdir(parents=True, exist_ok=True)
        length = min(self.length, 256) if device.is_small else self.length
        rows = train.get("micro_batch", self.rows)
        batch = 2 * (rows if isinstance(rows, int) else self.rows)
        samples = folder / "samples.jsonl"
        drawn = random.Random(0)
        with samples.open("w") as file:
            for number in range(STEPS * batch):
                own = drawn.randint(length // 4, length) if self.padded and number % batch else length
                # The last token of each sequence is end-of-sequence, so the text has one letter less.
                file.write(json.dumps({"text": "".join(drawn.choices("abcdefgh ", k=own - 1))}) + "\n")
        recipe = {
            "name": "cell",
            "model": {
                "id": _small_model(folder) if device.is_small else self.model, "tokenizer": "builtin:bytes",
                "init": "random", "dtype": self.dtype, "quantize": self.quantize,
            },
            "method": self.method,
            "data": {"sources": [{"name": "main", "path": str(samples)}], "max_length": length, "shuffle": False},
            "train": {"max_steps": STEPS, "batch_size": batch, "micro_batch": self.rows, **self.train, **train},
            "checkpoint": {"every_minutes": 0},
        }  # fmt: skip
        return RunSpec.model_validate({"name": "cell", "profile": device.profile(memory_gib), "recipe": recipe})


def _small_model(folder: Path) -> str:
    path = folder / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(SMALL_CONFIG), "utf-8")
    return str(path)


@dataclass(frozen=True)
class Run:
    """A finished run: its directory, the engine's exit code, and the events of its journal."""

    place: RunDirectory
    code: int
    events: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The run's events of one kind."""
        return [event for event in self.events if event["kind"] == kind]

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step, by step number; for a step that was repeated, the loss of the last repetition."""
        return {event["step"]: event["loss"] for event in self.of_kind("step")}

    @property
    def measured(self) -> dict[str, Any]:
        """The measured memory from the run's last event; empty if the run did not finish."""
        ends = self.of_kind("run_finished")
        return ends[-1].get("measured") or {} if ends else {}


def trained(spec: RunSpec, folder: Path) -> Run:
    """Train in a new engine process, wait until it ends, and return the finished run."""
    place = create_run_directory(folder, spec.name, dump_run_spec(spec), {})
    return _ended(place, start_engine(place))


def _ended(place: RunDirectory, process: subprocess.Popen[bytes]) -> Run:
    code = process.wait()
    return Run(place, code, EventTail(place.events).poll())


def _until_step(place: RunDirectory, step: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        if any(event["kind"] == "step" and event["step"] >= step for event in EventTail(place.events).poll()):
            return
        time.sleep(0.05)


# smoke: does the engine work on this device?

SMALL_MODEL = "Qwen/Qwen2.5-0.5B"
METHODS: dict[str, dict[str, Any]] = {"lora": {"rank": 8}, "full": {"kind": "full"}}


def smoke(device: SuiteDevice) -> Iterator[Measurement]:
    """Yield measurements that check that the engine works: LoRA and full fine-tuning in two dtypes, SIGTERM and resume,
    and an OOM."""
    for method in METHODS:
        for dtype in ("bfloat16", "float16"):
            case = TrainingCase(SMALL_MODEL, METHODS[method], 2, 256, {}, dtype)
            yield Measurement(f"{method}-{dtype}", partial(_trains, case))
    case = TrainingCase(SMALL_MODEL, METHODS["lora"], 2, 256, {})
    yield Measurement("sigterm-and-resume", partial(_sigterm, case))
    yield Measurement("out-of-memory", partial(_survives, case))


def _trains(case: TrainingCase, device: SuiteDevice, folder: Path) -> Result:
    run = trained(case.spec(device, folder), folder)
    losses = list(run.losses.values())
    falls = len(losses) == STEPS and losses[-1] < losses[0]
    return {"ok": run.code == 0 and falls, "said": f"exit {run.code}, losses {losses[:1]} -> {losses[-1:]}"}


def _sigterm(case: TrainingCase, device: SuiteDevice, folder: Path) -> Result:
    spec = case.spec(device, folder, max_steps=12)
    whole = trained(spec, folder / "whole")
    place = create_run_directory(folder / "broken", spec.name, dump_run_spec(spec), {})
    process = start_engine(place)
    _until_step(place, 3, process)
    process.send_signal(signal.SIGTERM)
    stopped = process.wait()
    resumed = _ended(place, start_engine(place, resume=True))
    worst = max((abs(loss - resumed.losses.get(step, 9e9)) for step, loss in whole.losses.items()), default=9e9)
    ok = stopped == 130 and resumed.code == 0 and worst <= 1e-3
    return {"ok": ok, "said": f"exit {stopped}, then {resumed.code}; losses differ by at most {worst:.1e}"}


def _survives(case: TrainingCase, device: SuiteDevice, folder: Path) -> Result:
    roomy = trained(case.spec(device, folder, micro_batch=8), folder / "roomy")
    capped_gib = 0.8 * roomy.measured["peak_bytes"] / 2**30
    run = trained(case.spec(device, folder, capped_gib, micro_batch=8), folder / "capped")
    return _compared(run, roomy)


def _compared(run: Run, roomy: Run) -> Result:
    """Compare `run`, which ran out of memory, with `roomy`, which had enough memory."""
    failures = run.of_kind("backoff")
    steps = [event["step_seconds"] for event in run.of_kind("step")]
    worst = max((abs(loss - run.losses.get(step, 9e9)) for step, loss in roomy.losses.items()), default=9e9)
    lost = run.of_kind("run_finished")[-1].get("samples_lost") if run.of_kind("run_finished") else None
    causes = sorted({f"{event['cause']} in {event['phase']}: {event['remedy']}" for event in failures})
    return {
        "ok": run.code == 0 and bool(failures) and lost == 0 and worst <= 0.02,
        "failures": causes,
        "samples_lost": lost,
        "largest_loss_difference": worst,
        "step_seconds": steps,
        "said": f"exit {run.code}, {len(failures)} failures, {lost} samples lost, losses within {worst:.1e}",
    }


# budget: is the prediction right?

LORA, FULL, KEEPING = {"rank": 16}, {"kind": "full"}, {"gradient_checkpointing": False}
PLAIN, ATTENTION = {"loss": "plain"}, {"rank": 16, "targets": "attention"}
BUDGET: dict[str, TrainingCase] = {
    "qwen2.5-0.5b-lora-1x512": TrainingCase("Qwen/Qwen2.5-0.5B", LORA, 1, 512, {}),
    "qwen2.5-0.5b-full-4x2048": TrainingCase("Qwen/Qwen2.5-0.5B", FULL, 4, 2048, {}),
    "qwen2.5-7b-r128-1x512": TrainingCase("Qwen/Qwen2.5-7B", {"rank": 128}, 1, 512, PLAIN),
    "qwen2.5-7b-r128-8x512": TrainingCase("Qwen/Qwen2.5-7B", {"rank": 128}, 8, 512, {}),
    "qwen2.5-7b-r128-1x8192": TrainingCase("Qwen/Qwen2.5-7B", {"rank": 128}, 1, 8192, {}),
    "qwen2.5-7b-bf16-2x2048": TrainingCase("Qwen/Qwen2.5-7B", {"rank": 128, "adapter_dtype": "bfloat16"}, 2, 2048, {}),
    "qwen2.5-7b-padded-4x1024": TrainingCase("Qwen/Qwen2.5-7B", {"rank": 128}, 4, 1024, {}, padded=True),
    "qwen2.5-7b-nf4-1x2048": TrainingCase("Qwen/Qwen2.5-7B", LORA, 1, 2048, {}, quantize="nf4"),
    "qwen3-4b-lora-1x512": TrainingCase("Qwen/Qwen3-4B", LORA, 1, 512, {}),
    "qwen3-4b-lora-1x8192": TrainingCase("Qwen/Qwen3-4B", LORA, 1, 8192, {}),
    "qwen3-4b-kept-1x2048": TrainingCase("Qwen/Qwen3-4B", LORA, 1, 2048, KEEPING),
    "qwen3-4b-full-1x2048": TrainingCase("Qwen/Qwen3-4B", FULL, 1, 2048, {}),
    "llama-3.1-8b-lora-2x4096": TrainingCase("meta-llama/Llama-3.1-8B", LORA, 2, 4096, {}),
    "llama-3.1-8b-full-1x1024": TrainingCase("meta-llama/Llama-3.1-8B", FULL, 1, 1024, {}),
    "llama-3.1-8b-full-8x4096": TrainingCase("meta-llama/Llama-3.1-8B", FULL, 8, 4096, {}),
    "qwen3-8b-lora-1x1024": TrainingCase("Qwen/Qwen3-8B", LORA, 1, 1024, PLAIN),
    "qwen3-8b-lora-1x256": TrainingCase("Qwen/Qwen3-8B", LORA, 1, 256, {}),
    "mixtral-8x7b-attention-1x512": TrainingCase("mistralai/Mixtral-8x7B-v0.1", ATTENTION, 1, 512, {}),
    "qwen2-vl-7b-lora-text-1x2048": TrainingCase("Qwen/Qwen2-VL-7B-Instruct", LORA, 1, 2048, {}),
}
SMALL_BUDGET = ("qwen2.5-0.5b-lora-1x512", "qwen3-4b-kept-1x2048", "qwen2.5-7b-padded-4x1024")
WORST_PERCENT = 2.0
PADDED_PERCENT = 10.0
"""Most percent by which the prediction for padded rows may be too high: it counts padding as targets."""


def budget(device: SuiteDevice) -> Iterator[Measurement]:
    """Yield measurements that compare predicted bytes with allocated bytes, reserved bytes and the bytes that the
    driver reports. Each run calibrates later plans."""
    for name, case in BUDGET.items():
        if not device.is_small or name in SMALL_BUDGET:
            yield Measurement(name, partial(_predicted, case))


def _predicted(case: TrainingCase, device: SuiteDevice, folder: Path) -> Result:
    spec = case.spec(device, folder)
    before = make_plan(spec)
    run = trained(spec, folder)
    if run.code:
        return {"ok": False, "error": f"exit {run.code}: {run.place.log.read_text('utf-8')[-1500:]}"}
    measured = run.measured
    predicted = measured["predicted"]
    off = 100 * (predicted["peak_bytes"] / measured["peak_bytes"] - 1)
    used = max((event["used_bytes"] for event in run.of_kind("gpu")), default=None)
    device_off = 100 * (before.prediction.device_bytes / used - 1) if used else None
    return {
        "ok": -WORST_PERCENT <= off <= (PADDED_PERCENT if case.padded else WORST_PERCENT),
        "predicted": predicted,
        "measured": {key: measured[key] for key in ("peak_bytes", "components", "sequences", "length")},
        "reserved_bytes": max(event["reserved_bytes"] for event in run.of_kind("step")),
        "device_predicted_bytes": before.prediction.device_bytes,
        "device_used_bytes": used,
        "deciding_phase": before.prediction.deciding_phase,
        "error_percent": round(off, 3),
        "device_error_percent": device_off and round(device_off, 3),
        "said": f"{measured['peak_bytes'] / 2**30:.3f} GiB, predicted {off:+.2f} %"
        + (f"; the device {device_off:+.2f} %" if device_off is not None else ""),
    }


# backoff: what does an OOM cost?

CAPS_GIB = (24.0, 48.0, 79.0)
SHIPPED: dict[str, TrainingCase] = {
    "lora": TrainingCase("Qwen/Qwen2.5-7B", LORA, 1, 2048, {}),
    "attention-lora": TrainingCase("Qwen/Qwen2.5-7B", ATTENTION, 1, 2048, {}),
    "full": TrainingCase("Qwen/Qwen2.5-0.5B", FULL, 1, 2048, {}),
}


def _caps(device: SuiteDevice) -> list[float]:
    return [0.05] if device.is_small else [cap for cap in CAPS_GIB if cap < device.memory_gib]


def backoff(device: SuiteDevice) -> Iterator[Measurement]:
    """Yield measurements of the backoff: each trains with twice the micro-batch that fits by the plan, under a memory
    cap."""
    for name, case in SHIPPED.items():
        for cap_gib in _caps(device):
            yield Measurement(f"{name}-{cap_gib:g}gb", partial(_doubled, case, cap_gib))


def _doubled(case: TrainingCase, cap_gib: float, device: SuiteDevice, folder: Path) -> Result:
    fitting = make_plan(case.spec(device, folder / "plan", cap_gib, micro_batch="auto", batch_size=4096)).micro_batch
    tight = trained(case.spec(device, folder / "data", cap_gib, micro_batch=2 * fitting), folder / "tight")
    # Train on the same samples with the same batch size, in micro-batches that fit, without a memory cap.
    whole = case.spec(device, folder / "data", micro_batch=2 * fitting)
    roomy = trained(with_changes(whole, {"train.micro_batch": fitting}), folder / "roomy")
    return {"fitting_sequences": fitting, **_compared(tight, roomy)}


# edge: is the planned micro-batch the largest that fits?


def edge(device: SuiteDevice) -> Iterator[Measurement]:
    """Yield measurements that search the largest micro-batch that trains without an OOM, and compare it with the
    planned one."""
    for name, case in SHIPPED.items():
        for cap_gib in _caps(device):
            yield Measurement(f"{name}-{cap_gib:g}gb", partial(_largest, case, cap_gib))


def _largest(case: TrainingCase, cap_gib: float, device: SuiteDevice, folder: Path) -> Result:
    planned = make_plan(case.spec(device, folder / "plan", cap_gib, micro_batch="auto", batch_size=4096)).micro_batch

    def fits(rows: int) -> bool:
        run = trained(case.spec(device, folder / f"{rows}", cap_gib, micro_batch=rows, max_steps=2), folder / f"{rows}")
        return run.code == 0 and not run.of_kind("backoff")

    low, high = 0, 2 * planned
    asked = iter((planned, planned + 1))  # two runs suffice where the plan is right
    while low < high:
        rows = next(asked, (low + high + 1) // 2)
        low, high = (rows, high) if fits(rows) else (low, rows - 1)
    share = planned / low if low else float("inf")
    return {
        "ok": planned <= low and (share >= 0.9 or low - planned <= 1),
        "planned_sequences": planned,
        "largest_sequences": low,
        "said": f"planned {planned}, really {low}",
    }


SUITES: dict[str, Callable[[SuiteDevice], Iterator[Measurement]]] = {
    "smoke": smoke, "budget": budget, "backoff": backoff, "edge": edge
}  # fmt: skip
