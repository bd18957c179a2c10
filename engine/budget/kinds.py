"""Which layers of a model are alike: in what learns in them, in their attention mask, and in where gradients stop.

Try: `python -m pytest tests/budget/test_kinds.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.budget.architecture import Architecture
from engine.budget.setting import Setting
from engine.budget.static import Selection, embedding_learns, select_tower_ends, selections, tower_selections


@dataclass(frozen=True)
class Kind:
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


@lru_cache(maxsize=256)
def kinds_of(arch: Architecture, setting: Setting) -> tuple[Kind, ...]:
    """The kind of every layer, from the first."""
    kinds: list[Kind] = []
    follows = embedding_learns(arch, setting) or tower_learns(arch, setting)
    for layer, chosen in enumerate(selections(arch, setting)):
        slides = layer < len(arch.sliding_layers) and arch.sliding_layers[layer]
        masked = setting.packed or sees_images_both_ways(arch, setting) or (slides and setting.window_reached)
        kind = Kind(chosen, masked, slides, follows)
        kinds.append(kind)
        follows = kind.learns
    return tuple(kinds)


def sees_images_both_ways(arch: Architecture, setting: Setting) -> bool:
    """Whether tokens of an image see each other, for which attention needs a mask of every row."""
    return arch.tower is not None and arch.tower.bidirectional and setting.image_patches > 0


def tower_learns(arch: Architecture, setting: Setting) -> bool:
    """Whether the decoder's input needs a gradient on account of images."""
    tower = arch.tower
    if tower is None or not setting.image_patches:
        return False
    parts = (select_tower_ends(tower, setting), *tower_selections(tower, setting))
    return any(chosen.trained or chosen.adapted for chosen in parts)


def body_learns(arch: Architecture, setting: Setting) -> bool:
    """Whether the last layer's output needs a gradient."""
    return kinds_of(arch, setting)[-1].learns
