"""Refuses features whose keys are in the schema but which this version does not implement; they are never ignored.

One row per feature; the change that adds a feature deletes its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import SpecError
from engine.spec.check.images import image_key
from engine.spec.schema.run import RunSpec
from engine.spec.stages import stage_specs


def _when(condition: bool, key: str) -> str | None:
    return key if condition else None


def _in_shards(spec: RunSpec, key: str, written: str, unbuilt: tuple[str, ...]) -> str | None:
    sharded = spec.profile.parallel.strategy == "sharded"
    return _when(sharded and written in unbuilt, f'{key} = "{written}" beside parallel.strategy = "sharded"')


def _images_in_shards(spec: RunSpec) -> str | None:
    """The key that asks for images in a run with sharded weights; None if there is none. All ranks must gather a
    layer's shards together, but a rank whose samples have no image would not gather the vision encoder's."""
    key = image_key(spec.recipe)
    return key and _when(spec.profile.parallel.strategy == "sharded", f'{key} beside parallel.strategy = "sharded"')


def _compiled(spec: RunSpec, condition: bool, beside: str) -> str | None:
    return _when(spec.recipe.train.compile and condition, f"train.compile beside {beside}")


UNSUPPORTED_FEATURES: tuple[tuple[Callable[[RunSpec], Any], str], ...] = (
    (_images_in_shards, "sharding of a model that is trained on images"),
    (
        lambda spec: _in_shards(spec, "model.quantize", spec.recipe.model.quantize, ("nf4",)),
        "sharding of 4-bit weights",
    ),
    (
        lambda spec: _in_shards(spec, "train.optimizer", spec.recipe.train.optimizer, ("adafactor", "adamw_8bit")),
        "sharding with optimizers that need whole tensors",
    ),
    (
        lambda spec: _compiled(spec, spec.profile.parallel.strategy == "sharded", 'parallel.strategy = "sharded"'),
        "torch.compile of layers whose weights are gathered from shards",
    ),
    (
        lambda spec: _compiled(spec, spec.profile.parallel.sequence > 1, "parallel.sequence > 1"),
        "torch.compile of layers that exchange parts of sequences between ranks",
    ),
    (
        lambda spec: _compiled(spec, spec.recipe.method.dropout > 0, "method.dropout > 0"),
        "torch.compile of dropout whose masks do not depend on the split",
    ),
)
"""(function that returns the key as the user wrote it, or None if unused; name of the missing feature)."""


def refuse_unsupported(spec: RunSpec) -> None:
    """Raise SpecError naming every key whose feature this version does not have."""
    found = [
        f"{written}: this version does not do {feature} yet"
        for part in (stage_specs(spec) if spec.recipe.stages else [spec])
        for asks, feature in UNSUPPORTED_FEATURES
        if (written := asks(part))
    ]
    if problems := list(dict.fromkeys(found)):
        raise SpecError(problems, fix="remove these keys, or restore their defaults with --set KEY=")
