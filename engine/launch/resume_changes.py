"""Lists the keys of a run spec that `tunedeck resume` may change. Data and pure functions; nothing is read or written
here.

A resumed run is still the same run: the new spec must lead to the same steps as those already taken. So a change of
model, data, seed, batch size or optimizer is refused; memory, intervals and length may change freely; what only affects
the steps to come may change with a notice.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

FREELY_CHANGEABLE = (
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
"""Keys that do not alter what a step learns, beyond the rounding of another kernel."""

CHANGEABLE_WITH_NOTICE = (
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
"""Keys that alter what is learned from the resumed step on, so the user is told."""


Changes = dict[str, tuple[Any, Any]]
"""Maps a dotted key to (value before, value after)."""


def find_changes(before: Any, after: Any, key: str = "") -> Changes:
    """Compare two specs; returns every key whose value differs. A list counts as one value."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: Changes = {}
        for name in {**before, **after}:
            found |= find_changes(before.get(name), after.get(name), f"{key}.{name}" if key else name)
        return found
    return {} if before == after else {key: (before, after)}


def refused_changes(changes: Changes) -> list[str]:
    """Return one line for each change that is not allowed when a run is resumed."""
    return [
        f"{key.removeprefix('recipe.')}: {old!r} -> {new!r}; a run keeps its model, data, seed and batch"
        for key, (old, new) in changes.items()
        if not _matches(key, FREELY_CHANGEABLE) and not _matches(key, CHANGEABLE_WITH_NOTICE)
    ]


def notices_of(changes: Changes) -> list[str]:
    """Return one sentence for each change that alters what is learned from the resumed step on."""
    return [
        f"{key.removeprefix('recipe.')} changes from {old!r} to {new!r}: the steps to come learn differently"
        for key, (old, new) in changes.items()
        if _matches(key, CHANGEABLE_WITH_NOTICE)
    ]


def makes_longer(changes: Changes) -> bool:
    """Whether the changes give the run more steps than before; having no limit counts as more than any limit."""
    for key in ("recipe.train.epochs", "recipe.train.max_steps"):
        old, new = changes.get(key, (None, None))
        if old is not None and (new is None or new > old):
            return True
        if old is None and new is not None and key.endswith("epochs") and new > 1:
            return True
    return False


def _matches(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)
