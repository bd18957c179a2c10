"""Which keys of a run may change when it is resumed, and what a change of them means."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from engine.config.schema.recipe import Recipe, Stage, Train
from engine.config.schema.run import RunSpec
from engine.config.stages import stage_recipe

FREELY_CHANGEABLE = (
    "name",
    "limits.*",
    "provenance.*",
    "profile.*",
    "recipe.name",
    "recipe.title",
    "recipe.notes",
    "recipe.profile",
    "recipe.parallel.*",
    "recipe.train.epochs",
    "recipe.train.max_steps",
    "recipe.train.micro_batch",
    "recipe.train.gradient_checkpointing",
    "recipe.train.mlp_tiles",
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
    "recipe.moe.watch_experts",
    "recipe.trackers.*",
    "recipe.finish.*",
    "recipe.stages.*.enabled",
)
"""Keys that do not alter what a step learns, beyond the rounding of another kernel: a resumed run must lead
to the same steps as those already taken."""

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
)
"""Keys that alter the training result from the resumed step on, so the user is told."""


STAGES_KEY = "recipe.stages"
STAGE_OF_KEY = re.compile(r"^recipe\.stages\.[a-z0-9][a-z0-9._-]*?\.(?=(?:" + "|".join(Recipe.model_fields) + r")\b)")
"""A stage's name may contain dots."""

UNFELT_KEYS = ("enabled", "name", "title", "notes")
"""Keys of a stage that is done which may change: they have no effect on what it trained."""

Changes = dict[str, tuple[Any, Any]]
"""Dotted key = (value before, value after)."""


def comparable(spec: RunSpec) -> dict[str, Any]:
    """As nested dicts for `find_changes`. A staged run's recipe is replaced by the complete recipe of each stage, so
    that a change counts only for the stages that it affects."""
    data = spec.model_dump(by_alias=True)
    if spec.recipe.stages:
        data["recipe"] = {"stages": {stage.name: _comparable_stage(spec, stage) for stage in spec.recipe.stages}}
    return data


def _comparable_stage(spec: RunSpec, stage: Stage) -> dict[str, Any]:
    own = stage.model_dump(by_alias=True, include={"enabled", "from_", "experts_per_token", "shared", "router"})
    return {**stage_recipe(spec.recipe, stage).model_dump(by_alias=True), **own, "stage_kind": stage.kind}


def find_changes(before: Any, after: Any, key: str = "") -> Changes:
    """Every key whose value differs; a list counts as one value. `key` is the prefix of the keys."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: Changes = {}
        for name in {**before, **after}:
            found |= find_changes(before.get(name), after.get(name), f"{key}.{name}" if key else name)
        return found
    return {} if before == after else {key: (before, after)}


def refused_changes(changes: Changes) -> list[str]:
    """A line for each change that is not allowed when a run is resumed."""
    return [
        (f"{key.removeprefix('recipe.')}: {old!r} -> {new!r}; model, data, seed and batch cannot change within a run")
        for key, (old, new) in changes.items()
        if not _matches(key, FREELY_CHANGEABLE) and not _matches(key, CHANGEABLE_WITH_NOTICE)
    ]


def notices_of(changes: Changes) -> list[str]:
    """A sentence for each change that alters the training result from the resumed step on."""
    return [
        f"{key.removeprefix('recipe.')} changes from {old!r} to {new!r}; the following steps train differently"
        for key, (old, new) in changes.items()
        if _matches(key, CHANGEABLE_WITH_NOTICE)
    ]


AT_THE_START = ("recipe.eval.at_start",)
"""Keys that act before the first step alone."""


def notes_on_start(changes: Changes, steps: int) -> list[str]:
    """A sentence for each change that comes too late for a run which has taken `steps` steps."""
    late = [key.removeprefix("recipe.") for key in changes if _matches(key, AT_THE_START) and steps]
    return [f"{key} has no effect on a run that has begun: it is past its first step" for key in late]


def enables_stage(changes: Changes) -> bool:
    """Whether a stage that was disabled is enabled."""
    return any(
        key.startswith(f"{STAGES_KEY}.") and key.endswith(".enabled") and new is True
        for key, (_, new) in changes.items()
    )


def makes_longer(changes: Changes) -> bool:
    """Whether the run gets more steps; no limit counts as more than any limit."""
    for key, (old, new) in changes.items():
        if _of_any_stage(key) not in ("recipe.train.epochs", "recipe.train.max_steps"):
            continue
        if old is not None and (new is None or new > old):
            return True
        if old is None and new is not None and key.endswith("epochs") and new > 1:
            return True
    return False


def unreached_limit(changes: Changes, before: Train, total_steps: int | None) -> tuple[str, str] | None:
    """(a key that was raised and ends no run, the one that does), if only the limit that a run of `total_steps` steps
    does not reach was raised."""
    raised = [key for key in ("epochs", "max_steps") if makes_longer(_only(changes, f"recipe.train.{key}"))]
    if total_steps is None or before.max_steps is None or len(raised) != 1:
        return None
    ends = "max_steps" if total_steps >= before.max_steps else "epochs"
    return None if raised[0] == ends else (f"train.{raised[0]}", f"train.{ends}")


def _only(changes: Changes, key: str) -> Changes:
    return {key: changes[key]} if key in changes else {}


def _matches(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(_of_any_stage(key), glob) for glob in globs)


def _of_any_stage(key: str) -> str:
    """Gives "recipe.train.eps" for "recipe.stages.NAME.train.eps"."""
    return STAGE_OF_KEY.sub("recipe.", key)
