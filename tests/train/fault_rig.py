"""A small model in a real training loop whose state can be restored, so that one unit of work can be repeated.

Not a test module; `tests.train.torture` disturbs what is performed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.budget.calibration import round_to_blocks
from engine.config.schema.run import RunSpec
from engine.device.metered import MeteredDevice
from engine.journal.control import ControlInbox, RunRequests
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, Journal
from engine.journal.files import write_atomically
from engine.train.run.checkpoints import EmergencyHostMemory
from engine.train.run.loop import Ending, Training
from engine.train.run.oom_report import oom_reporter
from engine.train.run.preferences import learn_preferences
from engine.train.run.run_context import RunContext, Watchdog
from engine.train.run.run_state import RunState
from engine.train.run.setup import set_up
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.context import LossScaler
from engine.train.step.ladder import adopt_memory, memory_as_json
from engine.train.step.optimizer import StepGuard
from engine.train.step.optimizer_state import Rounding, allocate_state, state_tensors
from engine.train.step.piecewise_update import PiecewiseUpdate
from tests.present import metered
from tests.train.preference_rows import write_pairs
from tests.train.run_helpers import make_spec, write_samples


@dataclass(frozen=True)
class Case:
    """A small model, and how it is trained."""

    name: str
    method: str
    checkpointing: bool = False
    layers: int = 2
    width: int = 16
    optimizer: str = "adamw"
    batch: int = 4
    rows: int = 2
    """Sequences of the longest kind in a micro-batch."""
    dtype: str = "float32"
    train: dict[str, Any] = field(default_factory=dict)
    """Further keys of the recipe's table [train]."""
    ladder: tuple[str, ...] = ("retry", "defragment", "cut", "checkpointing", "chunk_loss")
    torch_optimizer: dict[str, Any] | None = None
    """An optimizer of torch that no recipe can choose: its `kind` and its keyword arguments."""
    preference: str = ""
    """A loss of [preference]: the case learns from pairs."""

    def spec(self, folder: Path) -> RunSpec:
        """A run of this case with its files in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        write, longest = (write_pairs, 12) if self.preference else (write_samples, 24)
        method = {"kind": self.method} | ({"rank": 4} if self.method == "lora" else {})
        answers: dict[str, Any] = {"metrics": ["loss", "exact_match"], "samples": 2}
        return make_spec(
            write(folder / "samples.jsonl", count=24, longest=longest),
            model={"id": str(write_model(folder / "model", self.layers, self.width)), "dtype": self.dtype},
            method={**method, "objective": "dpo"} if self.preference else method,
            preference={"loss": self.preference} if self.preference else {},
            data={"valid_fraction": 0.25, "max_length": 32},
            train={
                "batch_size": self.batch,
                "micro_batch": self.rows,
                "optimizer": self.optimizer,
                "gradient_checkpointing": self.checkpointing,
                "max_steps": 2,
                "warmup_steps": 0,
                **self.train,
            },
            eval={} if self.preference else answers,
            generate={"max_new_tokens": 3},
            # Rungs that move memory to the host change the level that "not a byte more" is measured from.
            backoff={"ladder": list(self.ladder)},
        )


def write_model(folder: Path, layers: int, width: int, *, tied: bool = True, heads: int = 2) -> Path:
    """A model folder with a config and no weights, for `model.init = "random"`."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 264,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 1024,
    }
    # Ranks write it at the same time, and read it.
    write_atomically(folder / "config.json", json.dumps(config))
    return folder


class Witness(Journal):
    """A journal that writes events and also records, for each event, the bytes on the device and the number of
    allocations so far."""

    def __init__(self, writer: EventWriter, device: MeteredDevice) -> None:
        super().__init__(writer)
        self.device = device
        self.events: list[dict[str, Any]] = []

    def write(self, kind: str, **fields: Any) -> None:
        """Write the event, and remember it."""
        held_bytes = self.device.memory().allocated_bytes
        counts = (self.device.allocations, self.device.host_allocations)
        self.events.append({"kind": kind, "held_bytes": held_bytes, "counts": counts, **fields})
        super().write(kind, **fields)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The backoff events so far."""
        return [event for event in self.events if event["kind"] == "backoff"]


@dataclass
class Result:
    """State, results and allocation failures of a unit of work."""

    tensors: dict[str, torch.Tensor]
    """Weights, optimizer state and buffers."""
    facts: dict[str, Any]
    """Counters, scores, hashes: whatever else must be the same."""
    failures: list[dict[str, Any]]
    held_bytes: int
    """Bytes allocated on the device at the end of the unit."""
    allocations: int
    host_allocations: int


@dataclass(frozen=True)
class Unit:
    """A piece of work (`act`) that allocation failures disturb, and the work that follows without failures (`then`), so
    that the effects of `act` show."""

    name: str
    act: Callable[[Training], None]
    then: Callable[[Training], None] = lambda training: None


def _step(training: Training) -> None:
    while training.state.step < 1:  # a step that had to go back to a checkpoint is done again by the loop
        training.one_step()


def _must_end(ending: Ending) -> None:
    assert ending.status == "done", ending


STEP = Unit("step", _step)
UNITS = (
    STEP,
    Unit("probe", Training.probe, then=_step),
    Unit("evaluation", Training.evaluate),
    Unit("checkpoint", lambda training: training.checkpoints.save("torture")),
    Unit("whole run", lambda training: _must_end(training.run())),
)


class Rig:
    """A training loop whose state can be restored, to repeat one unit of work."""

    def __init__(self, setup: TrainingSetup, place: RunDirectory, journal: Witness, writer: EventWriter) -> None:
        self.context, self.place, self.journal = setup.context, place, journal
        self.device = metered(setup.context.device)
        requests = RunRequests(ControlInbox(place), writer, None)
        run = RunContext(place, journal, requests, Watchdog(journal, setup.spec.profile.parallel.timeout_seconds))
        self.training = Training(setup, run, EmergencyHostMemory())
        self.training.probe()
        self.training.checkpoints.save("where every unit starts")
        self.set_up_allocations = 0
        self.set_up_failures: list[dict[str, Any]] = []
        self._remember()

    def _remember(self) -> None:
        self._tensors = self._copies()
        self._memory, self._scaler = memory_as_json(self.context), self.context.scaler.as_json()

    def _live(self) -> Iterator[tuple[str, torch.Tensor]]:
        trainable = self.context.loaded.trainable()
        yield from trainable
        yield from state_tensors(self.context.optimizer, trainable)
        yield from self.context.loaded.model.named_buffers()

    def _copies(self) -> dict[str, torch.Tensor]:
        with self.device.host_region():
            return {name: tensor.detach().clone() for name, tensor in self._live()}

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state on the device."""
        state = state_tensors(self.context.optimizer, self.context.loaded.trainable())
        return sum(round_to_blocks(tensor.untyped_storage().nbytes()) for _, tensor in state)

    def reset(self) -> None:
        """Restore all state as it was after the probe."""
        context, training = self.context, self.training
        with torch.no_grad():
            for name, tensor in self._live():
                tensor.copy_(self._tensors[name])
        adopt_memory(context, self._memory)
        context.scaler = LossScaler(**self._scaler)
        context.guard.forget()
        training.state.become(RunState())
        training.checkpoints.last_saved = None
        self.journal.events.clear()

    def perform(self, unit: Unit, disturb: Callable[[MeteredDevice], None] = lambda device: None) -> Result:
        """Restore the state and run `unit`; `disturb` is called with the device before, to make allocations fail."""
        device = self.device
        self.reset()
        before = device.allocations, device.host_allocations
        disturb(device)
        try:
            unit.act(self.training)
        finally:
            device.fail_at(None)
            device.fail_host_at(None)
        after = device.allocations, device.host_allocations
        failures = self.journal.failures
        held_bytes = device.memory().allocated_bytes
        unit.then(self.training)
        return Result(self._copies(), self._facts(), failures, held_bytes, after[0] - before[0], after[1] - before[1])

    def _facts(self) -> dict[str, Any]:
        state = self.training.state
        facts: dict[str, Any] = {"step": state.step, "due": state.samples_due, "samples": state.samples}
        for event in self.journal.events:
            if event["kind"] == "eval":
                facts |= {**event["metrics"], "texts": event["samples"], "count": event["count"]}
            if event["kind"] == "step":
                facts |= {"loss": event["loss"], "grad_norm": event["grad_norm"]}
            if event["kind"] == "checkpoint_saved":
                manifest = json.loads((self.place.path / event["path"] / "manifest.json").read_text())
                facts["files"] = {k: v for k, v in manifest["files"].items() if k.endswith(".safetensors")}
        return facts


@contextmanager
def rigged(case: Case, folder: Path, disturb: Callable[[MeteredDevice], None] = lambda device: None) -> Iterator[Rig]:
    """Set up a rig for `case`, whose device is active inside the block. `disturb` is called with the device before the
    set-up, to make allocations fail."""
    spec = case.spec(folder)
    place = RunDirectory(folder / "run")
    place.path.mkdir(exist_ok=True)
    device = MeteredDevice(spec.profile.device.capacity_bytes)
    with device.activate(), EventWriter(place) as writer:
        journal = Witness(writer, device)
        disturb(device)
        setup = set_up(spec, device, journal, oom_reporter(journal, device))
        device.fail_at(None)
        set_up_allocations, set_up_failures = device.allocations, journal.failures
        learn_preferences(setup, place, journal)
        if case.torch_optimizer:
            replace_optimizer(setup, case.torch_optimizer)
        rig = Rig(setup, place, journal, writer)
        rig.set_up_allocations, rig.set_up_failures = set_up_allocations, set_up_failures
        yield rig


def replace_optimizer(setup: TrainingSetup, options: dict[str, Any]) -> None:
    """Replace the optimizer by one that no recipe can choose, to test failures inside it: torch's `options["kind"]`."""
    context = setup.context
    options = dict(options)
    kind = options.pop("kind")
    groups = [{"params": g["params"], "peak_lr": g["peak_lr"]} for g in context.optimizer.param_groups]
    context.optimizer = getattr(torch.optim, kind)(groups, lr=1e-3, **options)
    rounding = Rounding.of(setup.spec.recipe.train)
    allocate_state(context.optimizer, rounding)
    trainable = context.loaded.trainable()
    context.guard = StepGuard(PiecewiseUpdate(context.optimizer, trainable, rounding), trainable, context.device)
    context.device.release_cached()
    context.static_bytes = context.device.memory().allocated_bytes
