"""Kinds of layers: layers of one kind need the same memory.

Layers are of one kind if they train the same weights, attend through the same mask, and agree in whether their input
needs a gradient.

Try: `python -m pytest tests/budget/test_layer_kinds.py`
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from engine.budget.architecture.facts import Architecture
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.trainable import (
    Trainable,
    embedding_learns,
    trainable_by_layer,
    trainable_vision_ends,
    vision_trainable_by_layer,
)


class LayerKind(NamedTuple):
    """The facts that decide the memory of a layer."""

    trainable: Trainable
    masked: bool
    """Attention gets a mask: documents are packed, tokens of an image attend to each other in both directions, or the
    sliding window is shorter than the sequence."""
    slides: bool
    """The layer attends within a sliding window."""
    follows: bool
    """The layer's input needs a gradient, because an earlier layer, the embedding or the vision encoder is trained."""

    @property
    def learns(self) -> bool:
        """Whether backward reaches a layer of this kind."""
        return self.follows or bool(self.trainable.trained or self.trainable.adapted)

    def holds_more_than(self, other: LayerKind) -> bool:
        """Whether this kind needs more memory: it trains the same weights as `other`, and has a mask or an input
        gradient that `other` lacks, but not the reverse."""
        mine, its = (self.masked, self.follows), (other.masked, other.follows)
        more = mine != its and all(one >= another for one, another in zip(mine, its, strict=True))
        return more and self.trainable == other.trainable


@dataclass(frozen=True)
class LayerStack:
    """The layers of a model in order, each represented by its kind. Most models have one to three kinds."""

    layers: tuple[LayerKind, ...]

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Each kind once, in the order in which they appear."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def spans(self) -> dict[LayerKind, tuple[int, int]]:
        """Maps each kind to the index of its first layer and that of its last layer."""
        last = len(self.layers) - 1
        return {kind: (self.layers.index(kind), last - self.layers[::-1].index(kind)) for kind in self.kinds}

    def larger(self, kind: LayerKind) -> list[LayerKind]:
        """The kinds that need more memory than `kind`."""
        return [other for other in self.kinds if other.holds_more_than(kind)]

    def counts(self, start: int, stop: int) -> dict[LayerKind, int]:
        """Maps each kind to the number of its layers in `layers[start:stop]`."""
        return Counter(self.layers[start:stop])

    def ends(self, *, checkpointed: bool) -> dict[int, str]:
        """Return the layers whose backward pass may be the peak, from the last layer to the first, with their phases.

        They are the first and the last layer of each kind: live bytes change linearly from one layer of a kind to the
        next, so no layer between the two has the most. The phase is `layer_first` for layers in the model's second
        half, which backward reaches first, and `layer_last` for the others.

        If layers are checkpointed and all train the same weights, each saves the same number of bytes. A kind is then
        left out if a larger kind has layers both before and after all of its own.
        """
        last = len(self.layers) - 1
        even = checkpointed and len({kind.trainable for kind in self.kinds}) == 1
        kinds = [kind for kind in self.kinds if kind.learns and not (even and self._is_between_larger(kind))]
        layers = sorted({layer for kind in kinds for layer in self.spans[kind]}, reverse=True)
        return {layer: "layer_first" if 2 * layer >= last else "layer_last" for layer in layers}

    def _is_between_larger(self, kind: LayerKind) -> bool:
        """Whether a kind that needs more memory has layers both before and after all layers of `kind`."""
        first, last = self.spans[kind]
        return any(self.spans[other][0] <= first and last <= self.spans[other][1] for other in self.larger(kind))


@lru_cache(maxsize=256)
def layer_stack(arch: Architecture, config: MemoryConfig) -> LayerStack:
    """The kind of each layer of a model, as this config trains it."""
    trainable = trainable_by_layer(arch, config.patterns)
    slides = arch.sliding_layers or (False,) * arch.layers
    always_masked = config.packed or sees_images_both_ways(arch, config)
    follows = vision_learns(arch, config) or embedding_learns(arch, config.patterns)
    layers = []
    for each, sliding in zip(trainable, slides, strict=True):
        kind = LayerKind(each, always_masked or (sliding and config.window_reached), sliding, follows)
        layers.append(kind)
        follows = kind.learns
    return LayerStack(tuple(layers))


def sees_images_both_ways(arch: Architecture, config: MemoryConfig) -> bool:
    """Whether tokens of an image attend to each other in both directions, for which every row needs an attention mask
    of its own."""
    return arch.vision_encoder is not None and arch.vision_encoder.bidirectional and config.image_patches > 0


def vision_learns(arch: Architecture, config: MemoryConfig) -> bool:
    """Whether the decoder's input needs a gradient because the vision encoder is trained."""
    encoder = arch.vision_encoder
    if encoder is None or not config.image_patches:
        return False
    parts = (trainable_vision_ends(encoder, config.patterns), *vision_trainable_by_layer(encoder, config.patterns))
    return any(part.trained or part.adapted for part in parts)


def body_learns(arch: Architecture, config: MemoryConfig) -> bool:
    """Whether the last layer's output needs a gradient."""
    return layer_stack(arch, config).layers[-1].learns
