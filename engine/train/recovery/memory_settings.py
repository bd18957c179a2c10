"""The settings that decide how much memory a step takes, as one value, and the one place that applies it.

A remedy is a change of one of these settings. It is undone by applying the settings as they were. All ranks of a run
have the same settings at every moment between two attempts at a step.

Try: `pytest tests/train/recovery/test_memory_settings.py`
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.budget.advise.changes import with_changes
from engine.spec.schema.run import RunSpec
from engine.train.recovery.records import ActiveRemedy
from engine.train.step.context import StepContext

SETTING_OF_REMEDY = {
    "cut": "micro_batch_budget",
    "checkpointing": "checkpointing",
    "chunk_loss": "chunk_tokens",
    "activation_offload": "activation_offload",
    "optimizer_offload": "optimizer_offload",
    "max_length": "max_length",
}
"""The setting that each remedy changes. Remedies that are not named here change none."""


@dataclass(frozen=True)
class MemorySettings:
    """The settings that decide how much memory a step needs for given data and a given model."""

    micro_batch_budget: int
    """Predicted bytes that a micro-batch may cost."""
    checkpointing: bool
    """Whether activations are recomputed in backward."""
    chunk_tokens: int | None
    """Tokens that the loss is computed over at a time; None where its implementation has no such setting."""
    activation_offload: bool
    """Whether activations are kept in host memory until backward."""
    optimizer_offload: bool
    """Whether optimizer state lies in host memory between steps."""
    max_length: int | None
    """Tokens after which every sequence ends; None leaves sequences whole."""

    def value_of(self, remedy: str) -> Any:
        """The value of the setting that `remedy` changes; None for a remedy that changes none."""
        return getattr(self, SETTING_OF_REMEDY[remedy]) if remedy in SETTING_OF_REMEDY else None

    def with_value(self, remedy: str, value: Any) -> MemorySettings:
        """A copy of these settings in which the setting that `remedy` changes is `value`."""
        return replace(self, **{SETTING_OF_REMEDY[remedy]: value})

    def recipe_values(self) -> dict[str, Any]:
        """These settings as values of recipe keys; settings that have no recipe key are left out."""
        return {
            "train.gradient_checkpointing": self.checkpointing,
            "train.activation_offload": self.activation_offload,
            "train.optimizer_offload": self.optimizer_offload,
        }


def current_settings(context: StepContext) -> MemorySettings:
    """The memory settings in force on this rank."""
    return MemorySettings(
        micro_batch_budget=context.budget.budget_bytes,
        checkpointing=context.loaded.checkpointing,
        chunk_tokens=context.loss.chunks,
        activation_offload=context.loss.offload.on,
        optimizer_offload=context.guard.host_state.on,
        max_length=context.data.limit,
    )


def apply_settings(context: StepContext, settings: MemorySettings) -> None:
    """Put `settings` in force on this rank.

    Raises torch.OutOfMemoryError if optimizer state does not fit back on the device; all other settings are applied
    then, and the state is still on the host.
    """
    context.budget.budget_bytes = settings.micro_batch_budget
    if context.loaded.checkpointing != settings.checkpointing:
        context.loaded.set_checkpointing(settings.checkpointing)
    context.loss.set_chunks(settings.chunk_tokens)
    context.loss.offload.on = settings.activation_offload
    if context.data.limit != settings.max_length:
        context.data = context.data.shortened(settings.max_length)
    if context.guard.host_state.on != settings.optimizer_offload:
        context.guard.host_state.move(to_host=settings.optimizer_offload)
        context.device.release_cached()
        context.static_bytes = context.device.memory().allocated_bytes


def effective_spec(spec: RunSpec, context: StepContext) -> RunSpec:
    """`spec` with the memory settings in force, so that advice does not suggest what is already done."""
    return with_changes(spec, current_settings(context).recipe_values())


def memory_as_json(context: StepContext) -> dict[str, Any]:
    """The settings, the learned micro-batch budget and the active remedies as JSON, for checkpoints and other ranks."""
    settings = asdict(current_settings(context))
    del settings["micro_batch_budget"]  # the budget has it already
    return {
        "budget": context.budget.as_json(),
        "remedies": settings,
        "standing": [asdict(remedy) for remedy in context.active_remedies],
    }


def adopt_memory(context: StepContext, saved: dict[str, Any]) -> None:
    """Apply what `memory_as_json` returned on another rank, or what a checkpoint saved of it."""
    vars(context.budget).update(saved["budget"])
    apply_settings(context, MemorySettings(saved["budget"]["budget_bytes"], **saved["remedies"]))
    context.active_remedies[:] = [ActiveRemedy(**remedy) for remedy in saved["standing"]]
