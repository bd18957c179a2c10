"""What is said of a valid recipe before its run starts: keys without an effect, and features that this version
refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from engine.config.check.data_rules import image_key
from engine.config.schema.recipe import Generate, Method, Recipe, Train
from engine.config.schema.run import RunSpec
from engine.config.stages import stage_specs
from engine.errors import SpecError


def warmup_steps_of(train: Train, total_steps: int) -> int:
    """Number of warm-up steps. A ratio is rounded up; a number above `total_steps` is shortened, so that the last step
    has the full learning rate."""
    if train.warmup_ratio is not None:
        return math.ceil(total_steps * train.warmup_ratio)
    wanted = train.warmup_steps or 0
    return wanted if wanted <= total_steps else max(0, total_steps - 1)


def warmup_note(train: Train, total_steps: int) -> str | None:
    taken = warmup_steps_of(train, total_steps)
    if train.warmup_steps is None or taken == train.warmup_steps:
        return None
    steps = f"{total_steps} step" + "s" * (total_steps != 1)
    return f"train.warmup_steps = {train.warmup_steps} is more than the run's {steps}: the warm-up takes {taken}"


def frozen_router_note(recipe: Recipe) -> str | None:
    if not recipe.moe.aux_loss_weight or not recipe.freezes_router:
        return None
    return (
        f"moe.aux_loss_weight = {recipe.moe.aux_loss_weight:g}, but the routers are frozen: it only affects "
        "trained weights before them; set moe.freeze_router = false to train them"
    )


def unused_tracker_note(recipe: Recipe) -> str | None:
    trackers = recipe.trackers
    given = [f"trackers.{key}" for key in ("project", "tags") if getattr(trackers, key)]
    if trackers.use or not given:
        return None
    return f"{' and '.join(given)}: no effect, because trackers.use is empty"


def unused_sampling_note(recipe: Recipe) -> str | None:
    generate = recipe.generate
    given = [f"generate.{key}" for key in SAMPLING_KEYS if getattr(generate, key) != getattr(Generate(), key)]
    if generate.temperature > 0 or not given:
        return None
    return f"{' and '.join(given)}: no effect with generate.temperature = 0, which takes the likeliest token each time"


SAMPLING_KEYS = ("top_k", "top_p", "seed")
"""Keys of [generate] that only drawing tokens uses."""

ADAPTER_KEYS = ("rank", "alpha", "dropout", "adapter_dtype")
"""Keys of [method] that a recipe for LoRA often has, and that full fine-tuning does not use."""


def unused_method_note(recipe: Recipe) -> str | None:
    method = recipe.method
    if method.kind != "full":
        return None
    given = [f"method.{key}" for key in ADAPTER_KEYS if getattr(method, key) != Method.model_fields[key].default]
    return f'{" and ".join(given)}: no effect with method.kind = "full", which has no adapter' if given else None


def notes_of(recipe: Recipe) -> list[str]:
    """Without notes that need the data."""
    warmup = warmup_note(recipe.train, recipe.train.max_steps) if recipe.train.max_steps is not None else None
    unused = (unused_tracker_note(recipe), unused_method_note(recipe), unused_sampling_note(recipe))
    return [note for note in (warmup, frozen_router_note(recipe), *unused) if note]


def _when(condition: bool, key: str) -> str | None:
    return key if condition else None


def _in_shards(spec: RunSpec, key: str, written: str, unbuilt: tuple[str, ...]) -> str | None:
    sharded = spec.profile.parallel.strategy == "sharded"
    return _when(sharded and written in unbuilt, f'{key} = "{written}" with parallel.strategy = "sharded"')


def _images_in_shards(spec: RunSpec) -> str | None:
    """All ranks must gather a layer's shards together, but a rank whose samples have no image would not gather the
    vision encoder's."""
    key = image_key(spec.recipe)
    return key and _when(spec.profile.parallel.strategy == "sharded", f'{key} with parallel.strategy = "sharded"')


def _compiled(spec: RunSpec, condition: bool, beside: str) -> str | None:
    return _when(spec.recipe.train.compile and condition, f"train.compile with {beside}")


UNSUPPORTED_FEATURES: tuple[tuple[Callable[[RunSpec], Any], str], ...] = (
    (_images_in_shards, "sharding models that are trained on images"),
    (
        lambda spec: _when(
            bool(spec.recipe.model.add_tokens) and spec.profile.parallel.strategy == "sharded",
            'model.add_tokens with parallel.strategy = "sharded"',
        ),
        "sharding embeddings with added tokens",
    ),
    (
        lambda spec: _in_shards(spec, "model.quantize", spec.recipe.model.quantize, ("nf4",)),
        "sharding 4-bit weights",
    ),
    (
        lambda spec: _in_shards(spec, "train.optimizer", spec.recipe.train.optimizer, ("adafactor", "adamw_8bit")),
        "sharding with optimizers that need whole tensors",
    ),
    (
        lambda spec: _compiled(spec, spec.profile.parallel.strategy == "sharded", 'parallel.strategy = "sharded"'),
        "torch.compile for layers with sharded weights",
    ),
    (
        lambda spec: _compiled(spec, spec.profile.parallel.sequence > 1, "parallel.sequence > 1"),
        "torch.compile for layers that exchange parts of sequences between ranks",
    ),
    (
        lambda spec: _compiled(spec, spec.recipe.method.dropout > 0, "method.dropout > 0"),
        "torch.compile for dropout with masks that do not depend on the micro-batch",
    ),
    (
        lambda spec: _compiled(spec, spec.recipe.train.mlp_tiles > 1, "train.mlp_tiles > 1"),
        "torch.compile for layers that recompute parts in their backward pass",
    ),
)
"""(the key as the user wrote it, or None if unused; name of the missing feature)."""


def refuse_unsupported(spec: RunSpec) -> None:
    """Raises SpecError."""
    found = [
        f"{written}: this version does not support {feature}"
        for part in (stage_specs(spec) if spec.recipe.stages else [spec])
        for asks, feature in UNSUPPORTED_FEATURES
        if (written := asks(part))
    ]
    if problems := list(dict.fromkeys(found)):
        raise SpecError(problems, fix="remove these keys, or restore their defaults with --set KEY=")
