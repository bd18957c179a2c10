"""Which parameters of a model are trained, and which linear layers get an adapter, by a recipe's patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from engine.architecture.facts import Architecture
from engine.architecture.families import names_of_experts
from engine.architecture.parameters import (
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
from engine.architecture.vision_encoder import VisionEncoder
from engine.budget.trace.memory_config import MemoryConfig, Patterns
from engine.config.name_patterns import compile_patterns, layer_of

ATTENTION_PARTS = frozenset({"attn", "attention", "self_attn", "self_attention"})
"""Names of the module around attention projections, in all families; targets = "attention" selects the linear layers
in it."""


class Trainable(NamedTuple):
    """The trained parameters of one layer and its linear weights that get an adapter, named relative to the layer."""

    trained: frozenset[str] = frozenset()
    adapted: frozenset[str] = frozenset()
    dense: bool = True
    """The layer has no experts."""


@lru_cache(maxsize=256)
def trainable_by_layer(arch: Architecture, patterns: Patterns) -> tuple[Trainable, ...]:
    """What is trained and adapted in each decoder layer, in order."""
    dense = [arch.is_dense(layer) for layer in range(arch.layers)]
    return tuple(
        _trainable(layer_prefix(arch, layer), _adaptable(arch, each), patterns)._replace(dense=each)
        for layer, each in enumerate(dense)
    )


def adapted_modules(arch: Architecture, patterns: Patterns) -> set[str]:
    """Dotted names of the modules, and of the fused weights of experts, that get an adapter."""
    groups = _groups(arch, patterns)
    return {prefix + name.removesuffix(".weight") for prefix, each in groups for name in each.adapted}


def learning_names(arch: Architecture, patterns: Patterns) -> set[str]:
    """Dotted names of the parameters that are trained or have an adapter; a tied head by its embedding's name."""
    names = {prefix + name for prefix, each in _groups(arch, patterns) for name in (*each.adapted, *each.trained)}
    return names | trainable_outer(arch, patterns)


def trained_parameters(arch: Architecture, config: MemoryConfig) -> dict[str, list[str]]:
    """The names that trained parameters have in the engine, adapters' included, each with its tied weight's other
    name."""
    names: list[str] = []
    for prefix, each in _groups(arch, config.patterns):
        names += [prefix + name for name in sorted(each.trained)]
        for depth, name in enumerate(sorted(name for name in each.adapted if not name.endswith(".weight"))):
            block = f"{prefix}{name.rpartition('.')[0]}{'.base_layer' * depth}"  # peft nests a wrapper for each
            names += [f"{block}.lora_{side}.weight" for side in "AB"]
        parts = ["lora_A", "lora_B", *(["lora_magnitude_vector"] if config.dora else [])]
        modules = sorted(name.removesuffix(".weight") for name in each.adapted if name.endswith(".weight"))
        names += [f"{prefix}{module}.{part}.weight" for module in modules for part in parts]
    rows = "token_adapter.trainable_tokens_delta"
    names += [name.replace("weight", rows) for name in tables_with_rows(arch, config)]
    names += sorted(trainable_outer(arch, config.patterns))
    table = outer_parameters(arch)[0].name
    tied = {table: HEAD, table.replace("weight", rows): HEAD.replace("weight", rows)} if arch.tied else {}
    return {name: [tied[name]] if name in tied else [] for name in names}


def _groups(arch: Architecture, patterns: Patterns) -> Iterator[tuple[str, Trainable]]:
    """(prefix of the names, what is trained) of each layer, and of the rest of a vision encoder."""
    for layer, each in enumerate(trainable_by_layer(arch, patterns)):
        yield layer_prefix(arch, layer), each
    if arch.vision_encoder is not None:
        for layer, each in enumerate(vision_trainable_by_layer(arch.vision_encoder, patterns)):
            yield vision_layer_prefix(arch.vision_encoder, layer), each
        yield "", trainable_vision_ends(arch.vision_encoder, patterns)


def _adaptable(arch: Architecture, dense: bool) -> Sequence[Parameter]:
    """Weights that peft treats as an expert's because of their name are not marked as `linear`: they get no adapter."""
    experts = names_of_experts(arch.model_type)
    return [
        Parameter(one.name, one.shape) if one.linear and one.module.rpartition(".")[2] in experts else one
        for one in layer_parameters(arch, dense)
    ]


@lru_cache(maxsize=256)
def vision_trainable_by_layer(encoder: VisionEncoder, patterns: Patterns) -> tuple[Trainable, ...]:
    """What is trained and adapted in each layer of the vision encoder, in order."""
    parameters = vision_layer_parameters(encoder)
    return tuple(
        _trainable(vision_layer_prefix(encoder, layer), parameters, patterns) for layer in range(encoder.layers)
    )


@lru_cache(maxsize=256)
def trainable_vision_ends(encoder: VisionEncoder, patterns: Patterns) -> Trainable:
    """What is trained and adapted outside the layers of the vision encoder."""
    return _trainable("", vision_end_parameters(encoder), patterns)


def _trainable(prefix: str, parameters: Sequence[Parameter], patterns: Patterns) -> Trainable:
    trains = _trained_test(patterns)
    trained = frozenset([p.name for p in parameters if trains(prefix + p.name)])
    if not patterns.lora:
        return Trainable(trained)
    linear = _adapted(prefix, [p for p in parameters if p.linear], patterns)
    experts = _adapted_experts(prefix, [p.name for p in parameters if p.of_experts], patterns)
    return Trainable(trained, frozenset([*(p.name for p in linear), *experts]) - trained)


@lru_cache(maxsize=256)
def trainable_outer(arch: Architecture, patterns: Patterns) -> frozenset[str]:
    """Trained parameters outside the layers; a pattern that names a tied head selects the embedding."""
    trains = _trained_test(patterns)
    names = {p.name: [p.name] for p in outer_parameters(arch)}
    if arch.tied:
        names[outer_parameters(arch)[0].name].append(HEAD)
    return frozenset([name for name, aliases in names.items() if trains(*aliases)])


def _trained_test(patterns: Patterns) -> Callable[..., bool]:
    """A test of all names of a base parameter: with LoRA it is trained if `also_train` matches one, in full fine-tuning
    if `train_only` matches one or is empty; never if `freeze` matches one."""
    meant = compile_patterns(patterns.also_train if patterns.lora else patterns.train_only or ("**",)).matches
    frozen = compile_patterns(patterns.freeze).matches
    return lambda *names: any(map(meant, names)) and not any(map(frozen, names))


def tables_with_rows(arch: Architecture, config: MemoryConfig) -> tuple[str, ...]:
    """The embedding, and the head unless it is tied, if rows of them are trained beside LoRA; without those that are
    trained in full."""
    if not config.token_rows:
        return ()
    trained, table = trainable_outer(arch, config.patterns), outer_parameters(arch)[0].name
    return tuple(name for name in ([table] if arch.tied else [table, HEAD]) if name not in trained)


def embedding_learns(arch: Architecture, config: MemoryConfig) -> bool:
    """Whether the first layer's input needs a gradient because a token or position embedding is trained, or rows of
    it."""
    trained = trainable_outer(arch, config.patterns)
    if tables_with_rows(arch, config):
        return True
    if not trained:
        return False
    tables = [p.name for p in outer_parameters(arch) if p.shape[-1] == arch.hidden and len(p.shape) == 2]
    return any(name in trained for name in tables if name != HEAD)


def _adapted(prefix: str, linear: list[Parameter], patterns: Patterns) -> list[Parameter]:
    """What `targets` selects in `layers`, without what `exclude` or `freeze` matches; `prefix` completes names. In a
    vision encoder, only what `targets` lists."""
    targets = patterns.targets
    if not isinstance(targets, str):
        named = _named(targets)
        linear = [p for p in linear if named(prefix + p.module)]
    elif not linear or in_vision_encoder(prefix + linear[0].module):
        return []
    elif targets == "attention":
        linear = [p for p in linear if not ATTENTION_PARTS.isdisjoint(p.module.split(".")[:-1])]
    if patterns.layers and layer_of(prefix) not in patterns.layers:
        return []
    if patterns.exclude:
        spared = _named(patterns.exclude)
        linear = [p for p in linear if not spared(prefix + p.module)]
    if patterns.freeze:
        frozen = compile_patterns(patterns.freeze).matches
        linear = [p for p in linear if not frozen(prefix + p.name)]
    return linear


def _adapted_experts(prefix: str, names: list[str], patterns: Patterns) -> list[str]:
    """The weights of all experts that `targets` names, and neither `exclude` nor `freeze`: "all-linear" leaves them
    out."""
    if isinstance(patterns.targets, str) or (patterns.layers and layer_of(prefix) not in patterns.layers):
        return []
    named, spared = _named(patterns.targets), _named(patterns.exclude) if patterns.exclude else lambda _: None
    frozen = compile_patterns(patterns.freeze).matches
    return [name for name in names if named(prefix + name) and not spared(prefix + name) and not frozen(prefix + name)]


def _named(globs: tuple[str, ...]) -> Callable[[str], object]:
    """A test whether a pattern matches the whole dotted name or its last parts ("q_proj"), as in peft."""
    return compile_patterns(globs + tuple(f"**.{glob}" for glob in globs)).matches
