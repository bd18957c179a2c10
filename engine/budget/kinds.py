"""Which layers of a model are alike: in what learns in them, in their attention mask, and in where gradients stop.

Try: `python -m pytest tests/budget/test_kinds.py`
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.selection import Selection, embedding_learns, select_tower_ends, selections, tower_selections
from engine.budget.setting import Patterns, Setting


class Kind(NamedTuple):
    """Layers of one kind cost the same."""

    chosen: Selection
    masked: bool
    """Attention gets a mask: packed documents, images seen both ways, or a window shorter than the sequence."""
    slides: bool
    """It attends within a window only."""
    follows: bool
    """Something below learns, so that the layer's input needs a gradient."""

    @property
    def learns(self) -> bool:
        """Whether backward reaches the layer at all."""
        return self.follows or bool(self.chosen.trained or self.chosen.adapted)


class Stack(NamedTuple):
    """The layers of a model by their kinds: there are dozens of layers, and one, two or three kinds."""

    kinds: tuple[Kind, ...]
    order: tuple[int, ...]
    """For each layer from the first, its place among `kinds`."""

    def kind(self, layer: int) -> Kind:
        """That of one layer."""
        return self.kinds[self.order[layer]]

    def larger(self, kind: Kind) -> Kind | None:
        """Another kind whose layers hold all that this one's do, and more: a mask, or a gradient of their input."""
        own, found = (kind.masked, kind.follows), None
        for other in self.kinds:
            its = (other.masked, other.follows)
            if other.chosen == kind.chosen and its != own and its[0] >= own[0] and its[1] >= own[1]:
                found, own = other, its
        return found

    def between(self, start: int, stop: int) -> list[tuple[Kind, int]]:
        """How many layers of each kind there are from `start` up to `stop`, which is left out."""
        part = self.order[start:stop]
        return [(kind, part.count(place)) for place, kind in enumerate(self.kinds) if place in part]

    def ends(self, *, checkpointed: bool) -> dict[int, str]:
        """The first and the last layer of each kind that backward comes to, and the phase of the table that each is in:
        between the two sizes change evenly, so one of them decides.

        Of checkpointed layers that make the same gradients all keep as much: a kind never decides whose layers all lie
        between those of one that holds more.
        """
        last = len(self.order) - 1
        layers: set[int] = set()
        spans = {kind: self._span(place) for place, kind in enumerate(self.kinds) if kind.learns}
        even = checkpointed and len({kind.chosen for kind in self.kinds}) == 1
        for kind, (low, high) in spans.items():
            larger = self.larger(kind) if even else None
            beyond = spans[larger] if larger else None
            if beyond is None or low < beyond[0] or beyond[1] < high:
                layers |= {low, high}
        return {layer: "layer_first" if 2 * layer >= last else "layer_last" for layer in sorted(layers, reverse=True)}

    def _span(self, place: int) -> tuple[int, int]:
        """The first and the last layer of a kind."""
        return self.order.index(place), len(self.order) - 1 - self.order[::-1].index(place)

    def highest(self) -> dict[Kind, int]:
        """The last layer of each kind."""
        return {kind: self._span(place)[1] for place, kind in enumerate(self.kinds)}


@lru_cache(maxsize=256)
def stack_of(arch: Architecture, setting: Setting) -> Stack:
    """The layers of a model as a recipe trains it."""
    always = setting.packed or sees_images_both_ways(arch, setting)
    return _stack(arch, setting.patterns, always, setting.window_reached, tower_learns(arch, setting))


@lru_cache(maxsize=256)
def _stack(arch: Architecture, patterns: Patterns, always: bool, window_reached: bool, tower: bool) -> Stack:
    """`always`: every layer has a mask; `window_reached`: those that slide have. `tower`: one before them learns."""
    places: dict[tuple[Selection, bool, bool], int] = {}
    kinds: list[Kind] = []
    order: list[int] = []
    follows, sliding = tower or embedding_learns(arch, patterns), arch.sliding_layers or (False,) * arch.layers
    for (chosen, slides), run in groupby(zip(selections(arch, patterns), sliding, strict=True)):
        left = len(list(run))
        while left:  # the first layers of a run may differ from its others, in having nothing below that learns
            place = places.setdefault((chosen, slides, follows), len(kinds))
            if place == len(kinds):
                kinds.append(Kind(chosen, always or (slides and window_reached), slides, follows))
            count = left if kinds[place].learns == follows else 1
            order += [place] * count
            left, follows = left - count, kinds[place].learns
    return Stack(tuple(kinds), tuple(order))


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
