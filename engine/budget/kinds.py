"""Which layers of a model are alike: in what learns in them, in their attention mask, and in where gradients stop.

Try: `python -m pytest tests/budget/test_kinds.py`
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from engine.budget.architecture import Architecture
from engine.budget.selection import (
    Selection,
    counted,
    embedding_learns,
    select_tower_ends,
    selections,
    tower_selections,
)
from engine.budget.setting import Patterns, Setting


@dataclass(slots=True, eq=False)
class Kind:
    """Layers of one kind cost the same. Never changed; `kind_of` gives one object for equal ones."""

    chosen: Selection
    masked: bool
    """Attention gets a mask: packed documents, images seen both ways, or a window shorter than the sequence."""
    slides: bool
    """It attends within a window only."""
    follows: bool
    """Something below learns, so that the layer's input needs a gradient."""
    learns: bool = field(init=False)
    """Whether backward reaches the layer at all."""

    def __post_init__(self) -> None:
        self.learns = self.follows or bool(self.chosen.trained or self.chosen.adapted)


kind_of = lru_cache(maxsize=1024)(Kind)


@dataclass(slots=True, eq=False)
class Stack:
    """The layers of a model by their kinds: there are dozens of layers, and one, two or three kinds."""

    kinds: tuple[Kind, ...]
    order: bytes
    """For each layer from the first, its place among `kinds`."""
    spans: tuple[tuple[int, int], ...]
    """The first and the last layer of each kind."""
    larger: dict[Kind, Kind | None] = field(init=False)
    """For each kind another one whose layers hold all that its own do, and more."""

    def __post_init__(self) -> None:
        self.larger = {kind: self._larger(kind) for kind in self.kinds}

    def kind(self, layer: int) -> Kind:
        """That of one layer."""
        return self.kinds[self.order[layer]]

    def _larger(self, kind: Kind) -> Kind | None:
        """One with a mask where this has none, or with a gradient of the input."""
        found = kind
        for other in self.kinds:
            more = other.masked > found.masked or other.follows > found.follows
            if more and other.masked >= found.masked and other.follows >= found.follows and other.chosen == kind.chosen:
                found = other
        return None if found is kind else found

    def between(self, start: int, stop: int) -> list[tuple[Kind, int]]:
        """How many layers of each kind there are from `start` up to `stop`, which is left out."""
        part = self.order[start:stop]
        return [(kind, part.count(place)) for place, kind in enumerate(self.kinds) if place in part]

    def counts(self, layer: int) -> list[int]:
        """How many layers of each kind there are below one."""
        if len(self.kinds) == 1:
            return [layer]
        below = self.order[:layer]
        return [below.count(place) for place in range(len(self.kinds))]

    def ends(self, *, checkpointed: bool) -> dict[int, str]:
        """The first and the last layer of each kind that backward comes to, and the phase of the table that each is in:
        between the two sizes change evenly, so one of them decides.

        Of checkpointed layers that make the same gradients all keep as much: a kind never decides whose layers all lie
        between those of one that holds more.
        """
        last = len(self.order) - 1
        layers: set[int] = set()
        even = checkpointed and len(self.kinds) > 1 and len({kind.chosen for kind in self.kinds}) == 1
        for kind, (low, high) in zip(self.kinds, self.spans, strict=True):
            larger = self.larger[kind] if even else None
            beyond = self.spans[self.kinds.index(larger)] if larger else None
            if kind.learns and (beyond is None or low < beyond[0] or beyond[1] < high):
                layers |= {low, high}
        return {layer: "layer_first" if 2 * layer >= last else "layer_last" for layer in sorted(layers, reverse=True)}

    def highest(self) -> dict[Kind, int]:
        """The last layer of each kind."""
        return {kind: high for kind, (_, high) in zip(self.kinds, self.spans, strict=True)}


@lru_cache(maxsize=256)
def stack_of(arch: Architecture, setting: Setting) -> Stack:
    """The layers of a model as a recipe trains it."""
    always = setting.packed or sees_images_both_ways(arch, setting)
    return _stack(arch, setting.patterns, always, setting.window_reached, tower_learns(arch, setting))


@lru_cache(maxsize=256)
def _stack(arch: Architecture, patterns: Patterns, always: bool, window_reached: bool, tower: bool) -> Stack:
    """`always`: every layer has a mask; `window_reached`: those that slide have. `tower`: one before them learns."""
    chosen = selections(arch, patterns)
    first = 0  # that has something below it that learns
    if not (tower or embedding_learns(arch, patterns)):
        learning = (layer for layer, one in enumerate(chosen, 1) if one.trained or one.adapted)
        first = next(learning, arch.layers)
    unlike = [one for one, _ in counted(chosen)]
    marks = bytes(arch.sliding_layers or arch.layers)  # a byte for each layer: 1 where it slides
    if len(unlike) > 1:
        marks = bytes([2 * unlike.index(one) + slides for one, slides in zip(chosen, marks, strict=True)])
    kinds: list[Kind] = []
    order = b""
    for part, follows in (marks[:first], False), (marks[first:], True):
        own = bytes(dict.fromkeys(part))
        order += part.translate(bytes.maketrans(own, bytes(range(len(kinds), len(kinds) + len(own)))))
        for mark in own:
            slides = mark % 2 == 1
            kinds.append(kind_of(unlike[mark // 2], always or (slides and window_reached), slides, follows))
    return Stack(tuple(kinds), order, tuple([(order.index(place), order.rindex(place)) for place in range(len(kinds))]))


def sees_images_both_ways(arch: Architecture, setting: Setting) -> bool:
    """Whether tokens of an image see each other, for which attention needs a mask of every row."""
    return arch.tower is not None and arch.tower.bidirectional and setting.image_patches > 0


def tower_learns(arch: Architecture, setting: Setting) -> bool:
    """Whether the decoder's input needs a gradient on account of images."""
    tower = arch.tower
    if tower is None or not setting.image_patches:
        return False
    parts = (select_tower_ends(tower, setting.patterns), *tower_selections(tower, setting.patterns))
    return any(chosen.trained or chosen.adapted for chosen in parts)


def body_learns(arch: Architecture, setting: Setting) -> bool:
    """Whether the last layer's output needs a gradient."""
    return stack_of(arch, setting).kind(-1).learns
