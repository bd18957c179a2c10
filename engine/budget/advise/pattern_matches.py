"""Refuses recipes whose patterns of names match nothing in the model, or select only weights that its data never use.
Names are those of `engine.budget.architecture.parameters`, before a model is loaded; the engine checks again on the
real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from engine.budget.architecture.facts import Architecture
from engine.budget.architecture.parameters import (
    HEAD,
    Parameter,
    in_vision_encoder,
    layer_parameters,
    layer_prefix,
    outer_parameters,
    vision_end_parameters,
    vision_layer_parameters,
    vision_layer_prefix,
)
from engine.config.check.data_rules import image_key
from engine.config.name_patterns import matches, matches_end, no_match
from engine.config.schema.recipe import Method, Recipe
from engine.errors import DataError


def refuse_patterns(arch: Architecture, recipe: Recipe, *, has_images: bool | None = None) -> None:
    """Check the patterns of [method]. `has_images`: whether any sample has an image; None: the recipe's keys tell.

    UsageError: a pattern matches no name. DataError: only a vision encoder would be trained, and there are no images.
    """
    learning = _full_names(arch, recipe.method) if recipe.method.kind == "full" else _lora_names(arch, recipe.method)
    if has_images is None:
        has_images = image_key(recipe) is not None
    if not has_images and learning and all(map(in_vision_encoder, learning)):
        raise DataError(
            "nothing that learns is used by these samples: only the vision encoder is trained, and there are no images",
            expected="samples with images, or weights of the language model that learn",
            fix='set method.train_only, or method.targets, to names outside "model.visual" and its like',
        )


def _full_names(arch: Architecture, method: Method) -> list[str]:
    """Parameters trained by `train_only` and `freeze`. Raises UsageError for a pattern without a match."""
    names = parameter_names(arch)
    frozen = set(_matched(method.freeze, names, "method.freeze", matches))
    chosen = _matched(method.train_only, names, "method.train_only", matches) if method.train_only else names
    return [name for name in chosen if name not in frozen]


def _lora_names(arch: Architecture, method: Method) -> list[str]:
    """Modules that get adapters, then parameters that `also_train` trains. Empty if method.targets is "all-linear" or
    "attention": such adapters are in the language model. Raises UsageError for a pattern without a match."""
    targets = method.targets if isinstance(method.targets, list) else []
    adapted = _matched(targets, adaptable_names(arch), "method.targets", matches_end)
    excluded = set(_matched(method.exclude, adapted or adaptable_names(arch), "method.exclude", matches_end))
    in_full = _matched(method.also_train, parameter_names(arch), "method.also_train", matches)
    return [*(name for name in adapted if name not in excluded), *in_full] if targets else []


@lru_cache(maxsize=16)
def parameter_names(arch: Architecture) -> tuple[str, ...]:
    """Names of all parameters; a tied head as well as the embedding, because patterns may name either."""
    names = [prefix + parameter.name for prefix, parameter in _parameters(arch)]
    return (*names, HEAD) if arch.tied else tuple(names)


@lru_cache(maxsize=16)
def adaptable_names(arch: Architecture) -> tuple[str, ...]:
    """Names of what can get an adapter: linear layers except the head, and the fused weights of experts."""
    linears = [prefix + one.module for prefix, one in _parameters(arch) if one.linear and one.name != HEAD]
    fused = [prefix + one.name for prefix, one in _parameters(arch) if one.of_experts]
    return (*linears, *fused)


def _parameters(arch: Architecture) -> Iterator[tuple[str, Parameter]]:
    """(prefix, parameter) of every parameter; prefix + parameter.name is the dotted name."""
    for layer in range(arch.layers):
        for parameter in layer_parameters(arch, arch.is_dense(layer)):
            yield layer_prefix(arch, layer), parameter
    yield from (("", parameter) for parameter in outer_parameters(arch))
    if arch.vision_encoder is not None:
        for layer in range(arch.vision_encoder.layers):
            for parameter in vision_layer_parameters(arch.vision_encoder):
                yield vision_layer_prefix(arch.vision_encoder, layer), parameter
        yield from (("", parameter) for parameter in vision_end_parameters(arch.vision_encoder))


def _matched(patterns: Sequence[str], names: Sequence[str], key: str, test: Callable[[str, str], bool]) -> list[str]:
    """Names that any pattern matches by `test(pattern, name)`. UsageError: a pattern of `key` without a match."""
    chosen: list[str] = []
    for pattern in patterns:
        hits = [name for name in names if test(pattern, name)]
        if not hits:
            raise no_match(pattern, names, key)
        chosen += hits
    return chosen
