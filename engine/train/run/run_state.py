"""The counters that a run carries from step to step, and how a checkpoint is filled and restored. Random state and the
order of samples are functions of the step (`engine.train.step.rollback`), so they are not saved."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from engine.config.changes import with_changes
from engine.config.schema.run import RunSpec
from engine.distributed.ranks import Ranks
from engine.journal.checkpoints_on_disk import PREFIX, Checkpoint, damage, find_checkpoints
from engine.journal.score_groups import lower_is_better
from engine.model.tensor_file import Hashes
from engine.train.run.checkpoint_files import mark_best, unmark_best
from engine.train.run.expert_utilisation import ExpertCounters
from engine.train.run.identity import Identity
from engine.train.step.context import LossScaler, StepContext
from engine.train.step.failures import ActiveRemedy
from engine.train.step.interface import CheckpointStorage
from engine.train.step.ladder import MemorySettings, adopt_memory, memory_as_json

LAYERS_KEY = "train.gradient_checkpointing"
BUFFERS = "buffers.safetensors"
"""Buffers that training changes (BatchNorm statistics, router biases): an adapter's weights do not hold them."""


@dataclass
class Best:
    """The best evaluation so far (step and metric's value), and the number of evaluations since."""

    step: int | None = None
    value: float | None = None
    since: int = 0


def is_better(value: float, best: float | None, metric: str, threshold: float) -> bool:
    """Whether `value` beats `best` by more than `threshold`: lower is better for loss and perplexity, higher for other
    metrics. Always true while there is no best value yet."""
    sign = -1.0 if lower_is_better(metric) else 1.0
    return best is None or sign * (value - best) > threshold


def damage_for_resume(checkpoint: Checkpoint) -> str | None:
    """What is wrong with a checkpoint, its state included; None if a run can go on from it."""
    found = damage(checkpoint)
    if found is not None:
        return found
    try:
        saved = checkpoint.state()
        state = RunState.from_json(saved["state"])
        TypeAdapter(RunState).validate_python(asdict(state))
        TypeAdapter(LossScaler).validate_python(saved["scaler"])
        TypeAdapter(dict[str, float | None]).validate_python(saved["budget"])
        _refuse_unknown(MemorySettings, saved["remedies"])
        for remedy in saved["standing"]:
            _refuse_unknown(ActiveRemedy, remedy)
        for name in ("identity", "settings"):
            TypeAdapter(dict[str, Any]).validate_python(saved[name])
    except KeyError as missing:
        return f"state.json has no {missing}"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"state.json cannot be used: {str(error).splitlines()[0]}"
    return None if state.step == checkpoint.step else f"state.json is of step {state.step}"


def _refuse_unknown(kind: type[MemorySettings | ActiveRemedy], saved: Any) -> None:
    """Raise ValueError for a table with other fields; those that an earlier version did not have may be missing."""
    if not isinstance(saved, dict) or saved.keys() - kind.__dataclass_fields__.keys():
        raise ValueError(f"not a {kind.__name__}")


def agree(folder: Path, best: Best, metric: str) -> str | None:
    """Write `best`, the run state's best evaluation by `metric`, into the record on disk of the best checkpoint: after
    a crash the two may differ. If that checkpoint is missing or damaged, clear `best`, so that the next evaluation
    counts as the best, and return a sentence for a warning."""
    complaint = None
    if best.step is not None:
        problem = damage(Checkpoint(best.step, folder / f"{PREFIX}{best.step:08d}"))
        if problem:
            complaint = f"the best checkpoint, of step {best.step}, cannot be used: {problem}"
            best.step, best.value, best.since = None, None, 0
    if best.step is None or best.value is None:
        unmark_best(folder)
    else:
        mark_best(folder, best.step, metric, best.value)
    return complaint


@dataclass
class RunState:
    """Counters of a run. `step` is the last finished optimizer step; 0 before the first."""

    step: int = 0
    tokens: int = 0
    samples_due: int = 0
    """Sequences that the steps so far should have consumed."""
    samples: int = 0
    """Sequences that the steps so far did consume: steps with an fp16 overflow lose theirs."""
    skipped_steps: int = 0
    overflows: int = 0
    last_evaluated: int | None = None
    """The step whose weights were scored last; None before the first evaluation."""
    best: Best = field(default_factory=Best)
    scored: dict[str, float] = field(default_factory=dict)
    """The values of checkpoint.best_metric of the best checkpoints, by their steps; checkpoint.keep_best at most."""
    experts: ExpertCounters = field(default_factory=ExpertCounters)
    """How often the experts of a mixture were chosen; empty for other models."""

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> RunState:
        best, experts = Best(**saved["best"]), ExpertCounters(**saved.get("experts", {}))
        return cls(**{**saved, "best": best, "experts": experts})

    def rank(self, value: float, metric: str, keep: int) -> bool:
        """Add this step to `scored` with its value, keep the best; returns whether it is one of them."""
        sign = 1.0 if lower_is_better(metric) else -1.0
        ranked = sorted({**self.scored, str(self.step): value}.items(), key=lambda item: sign * item[1])
        self.scored = dict(ranked[:keep])
        return str(self.step) in self.scored

    def become(self, other: RunState) -> None:
        """Copy all counters of `other` into this object, to which several other objects hold references."""
        vars(self).update(vars(other))


def settings(spec: RunSpec, total_steps: int) -> dict[str, Any]:
    """What the learned budget ("memory") and the schedule ("total_steps") depend on, compared on a resume."""
    keys = ("micro_batch", "gradient_checkpointing", "mlp_tiles", "activation_offload", "optimizer_offload", "loss")
    profile, chosen = spec.profile, {key: getattr(spec.recipe.train, key) for key in keys}
    hardware = {
        "device": profile.device.model_dump(),
        "nodes": profile.nodes.count,
        "parallel": profile.parallel.model_dump(exclude={"timeout_seconds"}),
    }
    return {"memory": {**hardware, **chosen}, "total_steps": total_steps}


def with_layers_of_checkpoint(spec: RunSpec, folder: Path, not_after: int | None, ranks: Ranks) -> RunSpec:
    """`spec` with the number of recomputing layers that the newest checkpoint in `folder` was made with, in place of
    "auto": a plan may come out otherwise since, and what the run has learned belongs to that number. Unchanged if
    other memory settings differ, so that a new plan is due."""
    if spec.recipe.train.gradient_checkpointing != "auto":
        return spec
    layers = ranks.run_on_rank0(lambda: _layers_of_checkpoint(spec, folder, not_after))
    return spec if layers is None else with_changes(spec, {LAYERS_KEY: layers})


def _layers_of_checkpoint(spec: RunSpec, folder: Path, not_after: int | None) -> bool | int | None:
    for checkpoint in find_checkpoints(folder):
        if not_after is not None and checkpoint.step > not_after:
            continue
        try:
            saved = checkpoint.state()["settings"]["memory"]
            layers: bool | int = saved["gradient_checkpointing"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, which a resume warns of
        return layers if settings(with_changes(spec, {LAYERS_KEY: layers}), 0)["memory"] == saved else None
    return None


def fill_checkpoint(
    path: Path,
    context: StepContext,
    storage: CheckpointStorage,
    state: RunState,
    identity: Identity,
    settings: dict[str, Any],
) -> Hashes:
    """Write all that a resume needs; returns hashes of files hashed while written. OSError: the disk is full."""
    hashes = storage.write_weights(path / "weights") | storage.write_optimizer(path)
    with context.device.host_region():
        buffers = {name: context.device.staged(tensor) for name, tensor in context.rollback.moving()}
        if buffers:
            save_file(buffers, path / BUFFERS)
    numbers = {
        "state": asdict(state),
        "identity": asdict(identity),
        **memory_as_json(context),
        "scaler": context.scaler.as_json(),
        "settings": settings,
        "torch": torch.__version__,
    }
    (path / "state.json").write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")
    return hashes


def restore(
    checkpoint: Checkpoint, context: StepContext, storage: CheckpointStorage, identity: Identity, *, same_memory: bool
) -> RunState:
    """Restore a checkpoint into `context`; returns the counters.

    Without `same_memory` (another profile, or other memory settings) the learned budget and active remedies stay out.
    UsageError: the checkpoint belongs to other data, tokenizer, seed or trainable parameters.
    """
    saved = checkpoint.state()
    identity.check(saved["identity"])
    context.loaded.load_weights(checkpoint.weights)
    storage.read_optimizer(checkpoint.path)
    context.guard.forget()
    _restore_buffers(checkpoint, context)
    context.scaler = LossScaler(**saved["scaler"])
    if same_memory:
        adopt_memory(context, saved)
        context.static_bytes = context.device.memory().allocated_bytes
    return RunState.from_json(saved["state"])


def _restore_buffers(checkpoint: Checkpoint, context: StepContext) -> None:
    path = checkpoint.path / BUFFERS
    if path.is_file():
        with context.device.host_region():
            saved = load_file(path)
        context.rollback.load(saved)
