"""The counters that a run carries from step to step, and how a checkpoint is filled and restored.

Numbers live in `RunState`; weights and optimizer state are tensors and go through safetensors. Random state is not
here: it is a function of the step (see `engine.train.step.rollback`), as is the order of the samples.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.errors import UsageError
from engine.journal.checkpoints_on_disk import Checkpoint
from engine.launch.resume_changes import find_changes, refused_changes
from engine.model.tensor_file import Hashes
from engine.spec.files.document import merge_tables
from engine.spec.schema.recipe import Recipe
from engine.spec.schema.run import RunSpec
from engine.train.monitor.expert_utilisation import ExpertCounters
from engine.train.recovery.memory_settings import adopt_memory, memory_as_json
from engine.train.step.context import StepContext
from engine.train.step.loss_scaler import LossScaler
from engine.train.strategy.checkpoint_storage import CheckpointStorage

BUFFERS = "buffers.safetensors"
"""Buffers that training changes (BatchNorm statistics, router biases): an adapter's weights do not hold them."""


@dataclass
class Best:
    """The best evaluation so far (its step and its value of the metric), and the number of evaluations since."""

    step: int | None = None
    value: float | None = None
    since: int = 0


@dataclass
class RunState:
    """Counters of a run. `step` is the last finished optimizer step; 0 before the first."""

    step: int = 0
    tokens: int = 0
    samples_due: int = 0
    """Sequences that the steps so far should have consumed."""
    samples: int = 0
    """Sequences that the steps so far did consume. The difference to `samples_due` is lost: steps with an fp16 overflow
    skip theirs."""
    skipped_steps: int = 0
    overflows: int = 0
    last_evaluated: int | None = None
    """The step whose weights were scored last; None before the first evaluation."""
    best: Best = field(default_factory=Best)
    experts: ExpertCounters = field(default_factory=ExpertCounters)
    """How often the experts of a mixture-of-experts model were chosen; empty for other models."""

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> RunState:
        """Rebuild the state from the dict of its fields that a checkpoint saved."""
        best, experts = Best(**saved["best"]), ExpertCounters(**saved.get("experts", {}))
        return cls(**{**saved, "best": best, "experts": experts})

    def become(self, other: RunState) -> None:
        """Copy all counters of `other` into this object, to which several other objects hold references."""
        vars(self).update(vars(other))


@dataclass(frozen=True)
class Identity:
    """Data, tokenizer, seed and recipe of a run. What a step learns from must be unchanged on a resume, so that a run
    does not silently train something else."""

    data_fingerprint: str
    tokenizer_hash: str
    seed: int
    recipe: dict[str, Any]
    """The recipe as JSON."""

    @classmethod
    def of(cls, recipe: Recipe, data_fingerprint: str, tokenizer_hash: str) -> Identity:
        """The identity of a run with this recipe, data and tokenizer."""
        return cls(data_fingerprint, tokenizer_hash, recipe.train.seed, recipe.model_dump(mode="json", by_alias=True))

    def check(self, saved: dict[str, Any]) -> None:
        """Raise UsageError when the checkpoint whose identity `saved` holds was made from other data, another tokenizer
        or another seed, or with a recipe that differs in a key that a resume may not change."""
        # A key that is newer than the checkpoint counts as unchanged.
        learned_from = merge_tables(self.recipe, saved.get("recipe", {}))
        changes = find_changes(learned_from, self.recipe, "recipe")
        if refused := refused_changes(changes):
            raise UsageError(
                "run.toml differs from what the checkpoint has learned from:\n  " + "\n  ".join(refused),
                fix="put these keys of run.toml back, or start a new run with: tunedeck train --run-spec run.toml",
            )
        names = {"data_fingerprint": "data", "tokenizer_hash": "tokenizer", "seed": "train.seed"}
        changed = [name for key, name in names.items() if saved.get(key) != getattr(self, key)]
        if changed:
            raise UsageError(
                f"the checkpoint was made with another {' and another '.join(changed)}",
                expected="the same data, tokenizer and seed as when the run started",
                fix="put the files back as they were, or start a new run with model.id = \"run:...\"",
            )


def settings(spec: RunSpec, total_steps: int) -> dict[str, Any]:
    """The settings that the learned micro-batch budget ("memory") and the schedule ("total_steps") depend on, as JSON,
    to be compared on a resume."""
    keys = ("micro_batch", "gradient_checkpointing", "activation_offload", "optimizer_offload", "loss")
    profile, chosen = spec.profile, {key: getattr(spec.recipe.train, key) for key in keys}
    hardware = {
        "device": profile.device.model_dump(),
        "nodes": profile.nodes.count,
        "parallel": profile.parallel.model_dump(exclude={"timeout_seconds"}),
    }
    return {"memory": {**hardware, **chosen}, "total_steps": total_steps}


def fill_checkpoint(
    path: Path,
    context: StepContext,
    storage: CheckpointStorage,
    state: RunState,
    identity: Identity,
    settings: dict[str, Any],
) -> Hashes:
    """Write everything that a resume needs into the folder `path`, with `settings` in its `state.json`; returns the
    hashes of the files that were hashed while they were written. Raises OSError if the disk is full."""
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

    With `same_memory` false (another profile, or other memory settings in the recipe) the learned budget and the active
    remedies are not restored, because they were learned under other conditions.

    Raises:
        UsageError: the checkpoint belongs to other data, another tokenizer or seed, or other trainable parameters.
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
