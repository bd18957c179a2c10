"""Which parameters of a model are trained, and which linear layers get an adapter, by a recipe's patterns.

Their bytes are counted in `engine.budget.predict.static`; layers that are alike are found in
`engine.budget.trace.layer_kinds`.

Try: `python -m pytest tests/budget/test_layer_kinds.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture.facts import Architecture
from engine.budget.architecture.parameter import Parameter
from engine.budget.architecture.parameters import HEAD, layer_parameters, layer_prefix, outer_parameters
from engine.budget.architecture.trainable_families import names_of_experts
from engine.budget.architecture.vision_encoder import VisionEncoder
from engine.budget.architecture.vision_parameters import (
    in_vision_encoder,
    vision_end_parameters,
    vision_layer_parameters,
    vision_layer_prefix,
)
from engine.budget.trace.memory_config import Patterns
from engine.spec.name_patterns import compile_patterns

ATTENTION_PARTS = frozenset({"attn", "attention", "self_attn", "self_attention"})
"""Names of the module around attention projections; targets = "attention" selects the linear layers in it."""


class Trainable(NamedTuple):
    """The trained parameters of one layer and its linear weights that get an adapter, named relative to the layer."""

    trained: frozenset[str] = frozenset()
    adapted: frozenset[str] = frozenset()
    dense: bool = True
    """Whether the layer has no experts."""


@lru_cache(maxsize=256)
def trainable_by_layer(arch: Architecture, patterns: Patterns) -> tuple[Trainable, ...]:
    """What the recipe's patterns train and adapt in each decoder layer, in the order of the layers."""
    dense = [arch.is_dense(layer) for layer in range(arch.layers)]
    return tuple(
        _trainable(layer_prefix(arch, layer), _adaptable(arch, each), patterns)._replace(dense=each)
        for layer, each in enumerate(dense)
    )


def _adaptable(arch: Architecture, dense: bool) -> Sequence[Parameter]:
    """The parameters of a layer; `dense`: the layer has no experts. Weights that peft treats as an expert's because of
    their name are not marked as `linear`, so they get no adapter."""
    experts = names_of_experts(arch.model_type)
    return [
        Parameter(one.name, one.shape) if one.linear and one.module.rpartition(".")[2] in experts else one
        for one in layer_parameters(arch, dense)
    ]


@lru_cache(maxsize=256)
def vision_trainable_by_layer(encoder: VisionEncoder, patterns: Patterns) -> tuple[Trainable, ...]:
    """What the recipe's patterns train and adapt in each layer of a vision encoder, in the order of the layers."""
    parameters = vision_layer_parameters(encoder)
    return tuple(
        _trainable(vision_layer_prefix(encoder, layer), parameters, patterns) for layer in range(encoder.layers)
    )


@lru_cache(maxsize=256)
def trainable_vision_ends(encoder: VisionEncoder, patterns: Patterns) -> Trainable:
    """What the recipe's patterns train and adapt in a vision encoder outside its layers."""
    return _trainable("", vision_end_parameters(encoder), patterns)


def _trainable(prefix: str, parameters: Sequence[Parameter], patterns: Patterns) -> Trainable:
    trains = _trained_test(patterns)
    trained = frozenset([p.name for p in parameters if trains(prefix + p.name)])
    if not patterns.lora:
        return Trainable(trained)
    linear = _adapted(prefix, [p for p in parameters if p.linear], patterns)
    return Trainable(trained, frozenset([p.name for p in linear]) - trained)


@lru_cache(maxsize=256)
def trainable_outer(arch: Architecture, patterns: Patterns) -> frozenset[str]:
    """Names of trained parameters outside the layers; a pattern that names a tied head selects the embedding."""
    trains = _trained_test(patterns)
    names = {p.name: [p.name] for p in outer_parameters(arch)}
    if arch.tied:
        names[outer_parameters(arch)[0].name].append(HEAD)
    return frozenset([name for name, aliases in names.items() if trains(*aliases)])


def _trained_test(patterns: Patterns) -> Callable[..., bool]:
    """Return a function that takes all names of a base parameter and returns whether the parameter is trained.

    With LoRA, a parameter is trained if `also_train` matches one of its names; in full fine-tuning, if `train_only`
    matches one or is empty, and `freeze` matches none.
    """
    if patterns.lora:
        meant, frozen = compile_patterns(patterns.also_train).fullmatch, compile_patterns(()).fullmatch
    else:
        meant, frozen = (
            compile_patterns(patterns.train_only or ("**",)).fullmatch,
            compile_patterns(patterns.freeze).fullmatch,
        )
    return lambda *names: any(map(meant, names)) and not any(map(frozen, names))


def embedding_learns(arch: Architecture, patterns: Patterns) -> bool:
    """Whether the first layer's input needs a gradient because a token or position embedding is trained."""
    trained = trainable_outer(arch, patterns)
    if not trained:
        return False
    tables = [p.name for p in outer_parameters(arch) if p.shape[-1] == arch.hidden and len(p.shape) == 2]
    return any(name in trained for name in tables if name != HEAD)


def _adapted(prefix: str, linear: list[Parameter], patterns: Patterns) -> list[Parameter]:
    """Those of the linear layers in `linear` that get an adapter by `targets` and `exclude`; `prefix` completes their
    names. In a vision encoder, only those that `targets` lists by name."""
    targets = patterns.targets
    if not isinstance(targets, str):
        named = _named(targets)
        linear = [p for p in linear if named(prefix + p.module)]
    elif not linear or in_vision_encoder(prefix + linear[0].module):
        return []
    elif targets == "attention":
        linear = [p for p in linear if not ATTENTION_PARTS.isdisjoint(p.module.split(".")[:-1])]
    if patterns.exclude:
        spared = _named(patterns.exclude)
        linear = [p for p in linear if not spared(prefix + p.module)]
    return linear


def _named(globs: tuple[str, ...]) -> Callable[[str], object]:
    """Return a function that tells whether one of `globs` matches a dotted name: as in peft, a pattern matches the
    whole name or its last parts ("q_proj")."""
    return compile_patterns(globs + tuple(f"**.{glob}" for glob in globs)).fullmatch
