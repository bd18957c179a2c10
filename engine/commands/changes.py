"""What `resume` may change about a run. Data and pure functions; reading and writing specs is elsewhere.

A resumed run is the same run: its steps so far must be steps the new spec would have taken. What reaches back into
them (model, data, seed, batch size, optimizer) is refused; memory, cadence and length are free; what only shapes the
steps to come is allowed and said aloud.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

FREE = (
    "name",
    "limits.*",
    "provenance.*",
    "profile.*",
    "recipe.name",
    "recipe.title",
    "recipe.notes",
    "recipe.train.epochs",
    "recipe.train.max_steps",
    "recipe.train.micro_batch",
    "recipe.train.gradient_checkpointing",
    "recipe.train.activation_offload",
    "recipe.train.optimizer_offload",
    "recipe.train.loss",
    "recipe.train.compile",
    "recipe.train.deterministic",
    "recipe.train.log_every_steps",
    "recipe.model.attention",
    "recipe.data.workers",
    "recipe.checkpoint.*",
    "recipe.eval.*",
    "recipe.evaluate.*",
    "recipe.generate.*",
    "recipe.backoff.*",
    "recipe.trackers.*",
    "recipe.finish.*",
)
"""May change: none of it alters what a step learns, beyond the rounding of another kernel."""

ALOUD = (
    "recipe.train.learning_rate",
    "recipe.train.min_learning_rate",
    "recipe.train.scheduler",
    "recipe.train.restarts",
    "recipe.train.warmup_*",
    "recipe.train.weight_decay",
    "recipe.train.betas*",
    "recipe.train.eps",
    "recipe.train.momentum",
    "recipe.train.max_grad_norm",
    "recipe.train.label_smoothing",
    "recipe.moe.aux_loss_weight",
    "recipe.moe.watch_experts",
)
"""May change, but what is learned changes from here on, so the user is told."""


def changed(before: Any, after: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key = (before, after) for every leaf that differs; lists are leaves."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in {**before, **after}:
            found |= changed(before.get(name), after.get(name), f"{key}.{name}" if key else name)
        return found
    return {} if before == after else {key: (before, after)}


def refused(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    """One line for each change that `resume` cannot make."""
    return [
        f"{key.removeprefix('recipe.')}: {old!r} -> {new!r}; a run keeps its model, data, seed and batch"
        for key, (old, new) in changes.items()
        if not _matches(key, FREE) and not _matches(key, ALOUD)
    ]


def aloud(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    """One sentence for each change that alters what is learned from here on."""
    return [
        f"{key.removeprefix('recipe.')} changes from {old!r} to {new!r}: the steps to come learn differently"
        for key, (old, new) in changes.items()
        if _matches(key, ALOUD)
    ]


def is_longer(changes: dict[str, tuple[Any, Any]]) -> bool:
    """Whether the run would go on for longer than before; no limit at all is longer than any."""
    for key in ("recipe.train.epochs", "recipe.train.max_steps"):
        old, new = changes.get(key, (None, None))
        if old is not None and (new is None or new > old):
            return True
        if old is None and new is not None and key.endswith("epochs") and new > 1:
            return True
    return False


def _matches(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)
