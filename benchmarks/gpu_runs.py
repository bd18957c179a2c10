"""Devices, training cases and runs for the measurements of `benchmarks.gpu_suites`. A run trains in a new process,
whose device memory is read from the driver meanwhile.

Try: `python -m benchmarks.gpu smoke --out /tmp/gpu --device metered`
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu_models import write_model
from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.device.base import GpuReading
from engine.device.nvml import read_gpus
from engine.errors import EnvironmentProblem, TunedeckError
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventTail
from engine.launch.environment import device_environment
from engine.launch.process import engine_environment, log_tail, start_engine

Result = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
STEPS = 4
MIXTURE = "Qwen/Qwen3-30B-A3B"
EXPERTS = {"rank": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"]}
RECOMPUTING = {"gradient_checkpointing": True}
"""Keys of [train] of measurements that search a limit: by default, layers are recomputed until the plan fits."""
POLL_SECONDS = 0.1
SMALL_LENGTH = 256
"""Most tokens of a sequence on the metered device."""

ASK_TORCH = """
import json, sys, torch
from engine.device.cuda import _nvml_uuid
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    print(json.dumps([card.name, card.total_memory / 2**30, float(f"{card.major}.{card.minor}"),
                      _nvml_uuid(str(card.uuid))]))
"""


@dataclass(frozen=True)
class SuiteDevice:
    """The device on which a suite runs: this machine's first GPU or a metered device."""

    kind: str
    name: str
    memory_gib: float
    compute_capability: float | None = None
    uuid: str | None = None
    """NVML's name of the GPU."""

    @classmethod
    def of(cls, kind: str) -> SuiteDevice:
        """Return the first GPU of this machine (`kind` "cuda") or a metered device ("metered"). Raises
        EnvironmentProblem if there is no GPU.

        torch is asked in a process of its own: this process must hold no CUDA context while others are measured.
        """
        if kind == "metered":
            return cls(kind, "metered", 2.0)
        asked = subprocess.run([sys.executable, "-c", ASK_TORCH], cwd=ROOT, capture_output=True, text=True, check=True)
        if not asked.stdout.strip():
            raise EnvironmentProblem("no CUDA card is visible", fix="run the suites small with --device metered")
        return cls(kind, *json.loads(asked.stdout))

    def as_json(self) -> str:
        """The device as JSON, for the process of a measurement."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SuiteDevice:
        """Return the device whose `as_json` is `text`."""
        return cls(**json.loads(text))

    @property
    def is_small(self) -> bool:
        """Whether this is the metered device, on which small models replace the models of real size."""
        return self.kind == "metered"

    def profile(self, memory_gib: float | None = None) -> dict[str, Any]:
        """A profile of this device, as a dict; `memory_gib` replaces the amount of memory."""
        table = {"kind": self.kind, "memory_gib": memory_gib or self.memory_gib}
        if self.compute_capability:
            table |= {"compute_capability": self.compute_capability, "allocator": "expandable_segments:True"}
        return {"name": "suite", "device": table}


@dataclass(frozen=True)
class TrainingCase:
    """A model with a training method, the size of a micro-batch, and other settings of a recipe."""

    model: str
    method: dict[str, Any]
    rows: int
    length: int
    train: dict[str, Any]
    dtype: str | None = None
    """The model's dtype. None: bfloat16 on a GPU and float32 on the metered device, because some CPUs multiply bfloat16
    thirty times more slowly."""
    quantize: str = "none"
    layers: int | None = None
    """Decoder layers; None: as many as the published model has."""
    padded: bool = False
    """Whether sequences have different lengths, so that micro-batches are padded."""

    packing: bool = False

    def spec(self, device: SuiteDevice, folder: Path, memory_gib: float | None = None, **train: Any) -> RunSpec:
        """Write the model and random text for two micro-batches per step into `folder`, and return the run spec of the
        case. `memory_gib` replaces the device's memory; `train` are further keys of [train]. The run starts as it is
        written, even where the plan says that it does not fit."""
        folder.mkdir(parents=True, exist_ok=True)
        length = min(self.length, SMALL_LENGTH) if device.is_small else self.length
        rows = train.get("micro_batch", self.rows)
        batch = train.get("batch_size", 2 * (rows if isinstance(rows, int) else self.rows))
        samples = self._write_samples(folder, STEPS * 2 * self.rows if rows == "auto" else STEPS * batch, length)
        sources = [{"name": "main", "path": str(samples)}]
        recipe = {
            "name": "cell",
            "model": self._model(device, folder),
            "method": self.method,
            "data": {"sources": sources, "max_length": length, "shuffle": False, "packing": self.packing},
            "train": {"max_steps": STEPS, "batch_size": batch, "micro_batch": self.rows, **self.train, **train},
            "checkpoint": {"every_minutes": 0},
        }
        document = {"name": "cell", "profile": device.profile(memory_gib), "recipe": recipe}
        return RunSpec.model_validate({**document, "limits": {"as_written": True}})

    def _model(self, device: SuiteDevice, folder: Path) -> dict[str, Any]:
        """Write the model into `folder` and return the recipe's [model] table. A quantised base gets random weights in
        files, because weights are quantised while they are read; any other gets random weights when the run starts."""
        quantized = self.quantize != "none"
        dtype = self.dtype or ("float32" if device.is_small else "bfloat16")
        published = None if device.is_small else self.model
        layers = None if device.is_small else self.layers
        weights = dtype if quantized else None
        path = write_model(folder / "model", published, layers=layers, weights=weights)
        start = "pretrained" if quantized else "random"
        return {
            "id": path, "tokenizer": "builtin:bytes", "init": start, "dtype": dtype, "quantize": self.quantize,
        }  # fmt: skip

    def _write_samples(self, folder: Path, count: int, length: int) -> Path:
        path, drawn = folder / "samples.jsonl", random.Random(0)
        with path.open("w") as file:
            for number in range(count):
                own = drawn.randint(length // 4, length) if self.padded and number % (2 * self.rows) else length
                # The last token of each sequence is end-of-sequence, so the text has one letter less.
                file.write(json.dumps({"text": "".join(drawn.choices("abcdefgh ", k=own - 1))}) + "\n")
        return path


class DriverMemory:
    """Records the largest number of bytes that the driver reports for one process on a GPU."""

    def __init__(self, uuid: str | None, read: Callable[[list[str] | None], list[GpuReading]] = read_gpus) -> None:
        """Read how many bytes the GPU `uuid` (NVML's name) holds now, before the measured process starts. If `uuid` is
        None, nothing is ever read. `read` returns the readings of the GPUs with these names."""
        self._uuids, self._read = [uuid] if uuid else [], read
        self._before_bytes = sum(reading.used_bytes for reading in self._readings())
        self.used_bytes: int | None = None
        """The largest number of bytes of the process so far. If the driver does not tell what a process holds
        (containers hide process ids): how much more the whole card held than before."""

    def look(self, pid: int) -> None:
        """Read from the driver how many bytes the process `pid` holds now, and raise `used_bytes` to that if it is
        more."""
        for reading in self._readings():
            own = [each.used_bytes for each in reading.processes if each.pid == pid and each.used_bytes is not None]
            now_bytes = own[0] if own else reading.used_bytes - self._before_bytes
            self.used_bytes = max(now_bytes, self.used_bytes or 0)

    def _readings(self) -> list[GpuReading]:
        return self._read(self._uuids) if self._uuids else []


@dataclass(frozen=True)
class Measurement:
    """One measurement of a suite. `run` is called with the device and an empty folder, and returns a dict that contains
    at least `ok` and the summary `said`."""

    name: str
    run: Callable[[SuiteDevice, Path], Result]


@dataclass(frozen=True)
class Run:
    """A finished run: its directory, the exit code, and the events of its journal."""

    place: RunDirectory
    code: int
    events: list[dict[str, Any]] = field(repr=False)
    device_used_bytes: int | None = None
    """The most that the driver counted for the run's process; None without a driver."""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of the run's journal that have this kind, in order."""
        return [event for event in self.events if event["kind"] == kind]

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step, by step number; for a step that was repeated, the loss of the last repetition."""
        return {event["step"]: event["loss"] for event in self.of_kind("step")}

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes allocated in any step."""
        return int(max(event["peak_bytes"] for event in self.of_kind("step")))

    @property
    def finished(self) -> dict[str, Any]:
        """The run's last event; empty if its process was killed."""
        ends = self.of_kind("run_finished")
        return ends[-1] if ends else {}

    def expect(self, code: int = 0) -> Run:
        """Return this run if its exit code is `code`; otherwise raise TunedeckError with the end of its log."""
        if self.code != code:
            end = "\n".join(log_tail(self.place, lines=25))
            raise TunedeckError(f"the run in {self.place.path} ended with {self.code}, expected {code}\n{end}")
        return self


def measured_run(spec: RunSpec, folder: Path, device: SuiteDevice) -> Run:
    """Train without writing checkpoints (`benchmarks.measured_run`) in a new process; returns the finished run."""
    place = create_run_directory(folder, spec.name, dump_run_spec(spec), {})
    driver = DriverMemory(device.uuid)
    environment = {**engine_environment(), **device_environment(spec, os.environ)}
    del environment["PYTHONSAFEPATH"]  # `-m benchmarks.measured_run` is found in the checkout, its working directory
    with place.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.measured_run", str(place.path)],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    tail, trains = EventTail(place.events), False
    while process.poll() is None:
        # Not before the first step: the proofs at start ask for more than the device has.
        trains = trains or any(event["kind"] == "step" for event in tail.poll())
        if trains:
            driver.look(process.pid)
        time.sleep(POLL_SECONDS)
    return Run(place, process.returncode, EventTail(place.events).poll(), driver.used_bytes)


def new_run(spec: RunSpec, folder: Path) -> RunDirectory:
    """Create the directory of a run of the engine in `folder`."""
    return create_run_directory(folder, spec.name, dump_run_spec(spec), {})


def engine_run(place: RunDirectory, *, resume: bool = False) -> Run:
    """Train in a new engine process, or with `resume` continue the run, wait until the process ends, and return the
    finished run."""
    return ended(place, start_engine(place, resume=resume))


def ended(place: RunDirectory, process: subprocess.Popen[bytes]) -> Run:
    """Wait for the engine `process` of the run in `place` to end, and return the finished run."""
    return Run(place, process.wait(), EventTail(place.events).poll())


def until_step(place: RunDirectory, step: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the run's journal has step `step` or a later one, or until the engine's process has ended."""
    while process.poll() is None:
        if any(event["kind"] == "step" and event["step"] >= step for event in EventTail(place.events).poll()):
            return
        time.sleep(POLL_SECONDS)


ENGINE_WORDS = ("_engine", "benchmarks.measured_run")
"""Words in the command line of a process that trains."""


def engines_in(folder: Path) -> Iterator[psutil.Process]:
    """Yield the processes that train a run inside `folder`, by their command lines. An engine runs in a session of its
    own, so it is not found among the children of the process that started it."""
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
        except psutil.Error:
            continue  # it has ended, or belongs to another user
        inside = any(argument.startswith(f"{folder}/") for argument in arguments)
        if inside and any(word in arguments for word in ENGINE_WORDS):
            yield process


def kill_engines_in(folder: Path) -> None:
    """Kill every process that trains a run inside `folder`, and wait until none is left."""
    while found := list(engines_in(folder)):
        for process in found:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=30)
