"""The objects that a step works on, and all that a run needs for its first step; loss scaling for fp16 (mixed
precision)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import UsageError
from engine.launch.changed_keys import find_changes, refused_changes

if TYPE_CHECKING:
    from engine.batching.budget import MicroBatchBudget
    from engine.batching.micro_batches import Cost
    from engine.config.files.caches import SequenceBounds
    from engine.config.schema.recipe import Recipe
    from engine.config.schema.run import RunSpec
    from engine.data.order import SampleOrder
    from engine.data.prepare import PreparedData
    from engine.data.tokens import TokenData
    from engine.device.base import Device
    from engine.distributed.ranks import Ranks
    from engine.evaluate.context import Reference
    from engine.model.cudnn_attention import CudnnAttention
    from engine.model.flops import StepFlops
    from engine.model.load import LoadedModel
    from engine.model.loss import LossFunction
    from engine.train.step.failures import ActiveRemedy, LocalRecoveries, RankOom, RecoveredOom
    from engine.train.step.interface import Strategy
    from engine.train.step.objective import SequenceObjective
    from engine.train.step.optimizer import Schedule, StepGuard
    from engine.train.step.rollback import Rollback

GROWTH_INTERVAL = 2000
SMALLEST_SCALE = 1.0
"""Below it the data or weights are broken: nothing was scaled up, and torch's scaler would halve for ever."""


@dataclass
class LossScaler:
    """`scale` multiplies the loss before backward; it is always 1.0 if `enabled` is false. The rule of
    torch.amp.GradScaler without its tensors on the device: the gradient norm, computed for clipping anyway, says
    whether a gradient overflowed."""

    enabled: bool
    scale: float = 1.0
    clean_steps: int = 0

    @classmethod
    def start(cls, enabled: bool) -> LossScaler:
        return cls(enabled, 2.0**16 if enabled else 1.0)

    @property
    def can_back_off(self) -> bool:
        """Whether lowering the scale may make the gradients finite."""
        return self.enabled and self.scale > SMALLEST_SCALE

    def overflowed(self) -> None:
        """After a step that was skipped because a gradient was not finite."""
        self.scale, self.clean_steps = self.scale / 2, 0

    def succeeded(self) -> None:
        """After a step that was applied; doubles the scale after 2000 of them without an overflow."""
        self.clean_steps += 1
        if self.enabled and self.clean_steps >= GROWTH_INTERVAL:
            self.scale, self.clean_steps = self.scale * 2, 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class StepContext:
    device: Device
    ranks: Ranks
    strategy: Strategy
    loaded: LoadedModel
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    guard: StepGuard
    rollback: Rollback
    scaler: LossScaler
    data: TokenData
    bounds: SequenceBounds
    """Of the data that plan and cost are for."""
    cost: Cost
    budget: MicroBatchBudget
    ladder: list[str]
    pad_id: int
    seed: int
    max_grad_norm: float
    may_grow: bool
    measures: bool
    """Whether the device's readings are exact (CUDA, metered), so that the budget may learn from them."""
    report: Callable[[RecoveredOom], None]
    """Records a failure that all ranks know of."""
    local_recoveries: LocalRecoveries
    """Records failures that only this rank knows of."""
    suggest_fixes: Callable[[RankOom], str]
    """Changes of the recipe that would have avoided a failure, as a sentence; empty where nothing can be predicted."""
    cost_recomputing: Callable[[int], Cost] | None = None
    """`cost` if so many layers recompute their activations; None where this cannot be predicted."""
    objective: SequenceObjective | None = None
    """None: the loss of target tokens."""
    cudnn: CudnnAttention | None = None
    """Which micro-batches cuDNN's attention computes; None: none of this run."""
    references: Callable[[TokenData], Reference | None] = lambda data: None
    """In preference learning: what computes the reference's log-probabilities of these data."""
    static_bytes: int = 0
    """Allocated between steps, by weights and optimizer state."""
    active_remedies: list[ActiveRemedy] = field(default_factory=list)
    """In the order in which they were applied."""


@dataclass(frozen=True)
class Identity:
    """What a step learns from, which must be unchanged on a resume: a run must not silently train something else."""

    data_fingerprint: str
    tokenizer_hash: str
    seed: int
    recipe: dict[str, Any]
    """The recipe as JSON."""

    @classmethod
    def of(cls, recipe: Recipe, data_fingerprint: str, tokenizer_hash: str) -> Identity:
        return cls(data_fingerprint, tokenizer_hash, recipe.train.seed, recipe.model_dump(mode="json", by_alias=True))

    def check(self, saved: dict[str, Any]) -> None:
        """Raise UsageError if the checkpoint was made from other data, another tokenizer or seed, or with a recipe that
        differs in a key that a resume may not change."""
        # A key that is newer than the checkpoint counts as unchanged.
        learned_from = _with_newer_keys(saved.get("recipe", {}), self.recipe)
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
                fix='put the files back as they were, or start a new run with model.id = "run:..."',
            )


def _with_newer_keys(saved: Any, now: Any) -> Any:
    """`saved` with the keys that only `now` has, also in the tables of lists, such as sources."""
    if isinstance(saved, dict) and isinstance(now, dict):
        return {
            **now,
            **{key: _with_newer_keys(value, now[key]) if key in now else value for key, value in saved.items()},
        }
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        return [_with_newer_keys(*pair) for pair in zip(saved, now, strict=True)]
    return saved


@dataclass
class TrainingSetup:
    """Everything that a run needs for its first step."""

    spec: RunSpec
    context: StepContext
    prepared: PreparedData
    order: SampleOrder
    schedule: Schedule
    total_steps: int
    identity: Identity
    flops: StepFlops | None
    """Model FLOPs of steps; None where they are not known."""
