"""Which layers of a model are alike: in what learns in them, in their attention mask, and in where gradients stop.

Try: `python -m pytest tests/budget/test_kinds.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.budget.architecture import Architecture
from engine.budget.setting import Setting
from engine.budget.static import Selection, embedding_learns, select_layer


@dataclass(frozen=True)
class Kind:
    """Layers of one kind cost the same."""

    chosen: Selection
    masked: bool
    """Attention gets a mask: packed documents, or a sliding window shorter than the sequence."""
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
    follows = embedding_learns(arch, setting)
    for layer in range(arch.layers):
        slides = layer < len(arch.sliding_layers) and arch.sliding_layers[layer]
        masked = setting.packed or (slides and setting.window_reached)
        kind = Kind(select_layer(arch, setting, layer), masked, slides, follows)
        kinds.append(kind)
        follows = kind.learns
    return tuple(kinds)


def body_learns(arch: Architecture, setting: Setting) -> bool:
    """Whether the last layer's output needs a gradient."""
    return kinds_of(arch, setting)[-1].learns
