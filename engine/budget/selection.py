"""Which parameters of a model learn, and which linear layers get an adapter, by a recipe's patterns.

What they take is `engine.budget.static`, which layers are alike on that account `engine.budget.kinds`.

Try: `python -m pytest tests/budget/test_kinds.py`
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.globs import compile_globs
from engine.budget.parameter import Parameter
from engine.budget.parameters import HEAD, layer_parameters, layer_prefix, outer_parameters
from engine.budget.setting import Patterns
from engine.budget.tower import Tower
from engine.budget.tower_parameters import in_tower, tower_ends, tower_layer, tower_prefix

ATTENTION_PARTS = frozenset({"attn", "attention", "self_attn", "self_attention"})
"""What the module around attention projections is called; targets = "attention" means the linear layers in it."""


NOTHING: frozenset[str] = frozenset()

_TELLS_NUMBERS = re.compile(r"[?\[0-9]")
"""In a pattern: what may fit one number and not another."""


Test = Callable[[str], object]
"""Of a dotted name; what it gives counts by its truth."""


def _yes(_name: str) -> bool:
    return True


def _no(_name: str) -> bool:
    return False


class Selection(NamedTuple):
    """Which relative parameter names of one layer are trained, and which linear layers get an adapter."""

    trained: frozenset[str]
    adapted: frozenset[str]
    dense: bool = True
    """Whether the layer has no experts."""


@lru_cache(maxsize=256)
def selections(arch: Architecture, patterns: Patterns) -> tuple[Selection, ...]:
    """Apply the recipe's patterns to every layer's names."""
    dense = [arch.experts is None] * arch.layers
    if arch.dense_layers:
        dense = [arch.is_dense(layer) for layer in range(arch.layers)]

    def select(layer: int) -> Selection:
        parameters = layer_parameters(arch, dense[layer])
        return _select(layer_prefix(arch, layer), parameters, patterns, dense=dense[layer])

    return _per_layer(dense, patterns, select)


@lru_cache(maxsize=256)
def tower_selections(tower: Tower, patterns: Patterns) -> tuple[Selection, ...]:
    """Apply the recipe's patterns to every layer of a tower."""
    parameters = tower_layer(tower)

    def select(layer: int) -> Selection:
        return _select(tower_prefix(tower, layer), parameters, patterns)

    return _per_layer([True] * tower.layers, patterns, select)


@lru_cache(maxsize=256)
def select_tower_ends(tower: Tower, patterns: Patterns) -> Selection:
    """The same for what stands before and behind the layers."""
    return _select("", tower_ends(tower), patterns)


def counted(selections: tuple[Selection, ...]) -> Iterable[tuple[Selection, int]]:
    """Each that there is, and of how many layers. Most often they are one object, which is soon seen."""
    first = selections[0]
    count = selections.count(first)
    return [(first, count)] if count == len(selections) else Counter(selections).items()


def _per_layer(alike: Sequence[bool], patterns: Patterns, select: Callable[[int], Selection]) -> tuple[Selection, ...]:
    """One answer for all layers that are `alike` where no pattern can tell one layer's number from another's: asking
    for every layer was most of a first plan's time."""
    targets = () if isinstance(patterns.targets, str) else patterns.targets
    globs = (*targets, *patterns.exclude, *patterns.also_train, *patterns.train_only, *patterns.freeze)
    if globs and _TELLS_NUMBERS.search(" ".join(globs)):
        return tuple([select(layer) for layer in range(len(alike))])
    answers = {kind: select(alike.index(kind)) for kind in set(alike)}
    if len(answers) == 1:
        return (*answers.values(),) * len(alike)
    return tuple([answers[kind] for kind in alike])


def _select(
    prefix: str, parameters: Sequence[Parameter], patterns: Patterns, *, dense: bool = True
) -> Selection:
    trained = adapted = NOTHING
    if not patterns.lora or patterns.also_train:
        meant, frozen = _rules(patterns)
        names = [p.name for p in parameters]
        if (meant, frozen) != (_yes, _no):
            names = [name for name in names if meant(prefix + name) and not frozen(prefix + name)]
        trained = frozenset(names)
    if patterns.lora:
        linear = _adapted(prefix, [p for p in parameters if p.linear], patterns)
        adapted = frozenset([p.name for p in linear]) - trained
    return Selection(trained, adapted, dense)


def _rules(patterns: Patterns) -> tuple[Test, Test]:
    """What tells by its name that a base parameter is meant to learn, and that it is frozen, which wins: with LoRA what
    also_train names, else all, or train_only."""
    if patterns.lora:
        return compile_globs(patterns.also_train).fullmatch, _no
    return (
        compile_globs(patterns.train_only).fullmatch if patterns.train_only else _yes,
        compile_globs(patterns.freeze).fullmatch if patterns.freeze else _no,
    )


@lru_cache(maxsize=256)
def selected_outer(arch: Architecture, patterns: Patterns) -> frozenset[str]:
    """Names outside the layers that are trained. A tied table answers to the head's name, too."""
    if patterns.lora and not patterns.also_train:
        return NOTHING
    meant, frozen = _rules(patterns)
    names: dict[str, tuple[str, ...]] = {p.name: (p.name,) for p in outer_parameters(arch)}
    if arch.tied:
        table = outer_parameters(arch)[0].name
        names[table] += (HEAD,)
    return frozenset([name for name, own in names.items() if any(map(meant, own)) and not any(map(frozen, own))])


def embedding_learns(arch: Architecture, patterns: Patterns) -> bool:
    """Whether what goes into the first layer needs a gradient: a trained token or position table."""
    trained = selected_outer(arch, patterns)
    if not trained:
        return False
    tables = [p.name for p in outer_parameters(arch) if p.shape[-1] == arch.hidden and len(p.shape) == 2]
    return any(name in trained for name in tables if name != HEAD)


def _adapted(prefix: str, linear: list[Parameter], patterns: Patterns) -> list[Parameter]:
    """Of the linear layers of one group, the head aside, those that get an adapter. In a vision tower only what a
    pattern names."""
    targets = patterns.targets
    if not isinstance(targets, str):
        named = _named(targets)
        linear = [p for p in linear if named(prefix + p.module)]
    elif not linear or in_tower(prefix + linear[0].module):
        return []
    elif targets == "attention":
        linear = [p for p in linear if not ATTENTION_PARTS.isdisjoint(p.module.split(".")[:-1])]
    if patterns.exclude:
        spared = _named(patterns.exclude)
        linear = [p for p in linear if not spared(prefix + p.module)]
    return linear


def _named(globs: tuple[str, ...]) -> Test:
    """A pattern is held against the whole dotted name and its trailing parts ("q_proj"), as peft does."""
    return compile_globs(globs + tuple(f"**.{glob}" for glob in globs)).fullmatch
