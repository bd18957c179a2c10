"""Notes about a recipe: settings that have no effect or that a run changes, reported before the run starts.

Try: `tunedeck plan -p demo -r demo --set train.max_steps=5`
"""

from __future__ import annotations

import math

from engine.spec.schema.recipe import Recipe, Train


def warmup_steps_of(train: Train, total_steps: int) -> int:
    """Number of warm-up steps in a run of `total_steps` steps. A ratio is rounded up to whole steps.

    A number of steps above `total_steps` is shortened, so that the last step has the full learning rate.
    """
    if train.warmup_ratio is not None:
        return math.ceil(total_steps * train.warmup_ratio)
    wanted = train.warmup_steps or 0
    return wanted if wanted <= total_steps else max(0, total_steps - 1)


def warmup_note(train: Train, total_steps: int) -> str | None:
    """The note for a warm-up that is shortened because the run has only `total_steps` steps; None if it is not."""
    taken = warmup_steps_of(train, total_steps)
    if train.warmup_steps is None or taken == train.warmup_steps:
        return None
    steps = f"{total_steps} step" + "s" * (total_steps != 1)
    return f"train.warmup_steps = {train.warmup_steps} is more than the run's {steps}: the warm-up takes {taken}"


def frozen_router_note(recipe: Recipe) -> str | None:
    """The note for an auxiliary loss with a weight above 0 although the routers are frozen; None otherwise."""
    if not recipe.moe.aux_loss_weight or not recipe.freezes_router:
        return None
    return (
        f"moe.aux_loss_weight = {recipe.moe.aux_loss_weight:g}, but the routers are frozen: only what is trained "
        "before them learns from it; set moe.freeze_router = false to train them"
    )


def unused_tracker_note(recipe: Recipe) -> str | None:
    """The note for keys of [trackers] that have no effect because `trackers.use` is empty; None otherwise."""
    trackers = recipe.trackers
    given = [f"trackers.{key}" for key in ("project", "tags") if getattr(trackers, key)]
    if trackers.use or not given:
        return None
    return f"{' and '.join(given)}: no effect, because trackers.use names no tracker"


def notes_of(recipe: Recipe) -> list[str]:
    """The notes about a recipe that need no data."""
    warmup = warmup_note(recipe.train, recipe.train.max_steps) if recipe.train.max_steps is not None else None
    return [note for note in (warmup, frozen_router_note(recipe), unused_tracker_note(recipe)) if note]
