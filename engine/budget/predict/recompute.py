"""Which decoder layers gradient checkpointing recomputes, if not all: the first ones.

Backward frees what the last layers kept before it reaches the first, so that their recomputation comes on top of
little. Layers of several kinds (sliding attention, experts, frozen ones) save different numbers of bytes for the time
that their recomputation takes: the kind that saves most is recomputed first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from engine.architecture.facts import Architecture
from engine.budget.predict.layer_traces import layer_forward
from engine.budget.predict.products import layer_flops
from engine.budget.trace.layer import LayerKind, LayerStack, layer_stack
from engine.budget.trace.memory_config import MemoryConfig
from engine.budget.trace.polynomial import shape_of

REFERENCE_TOKENS = 2048
"""Length at which kinds of layers are compared, within the sliding window; twice the window if sequences pass it."""


@lru_cache(maxsize=256)
def recomputing_stack(arch: Architecture, config: MemoryConfig) -> LayerStack:
    """The kind of each layer, with those that keep their activations not recomputed."""
    stack = layer_stack(arch, config)
    if not config.checkpointing or not config.kept_layers:
        return stack
    kept = set(recompute_order(arch, config)[-config.kept_layers :])
    return LayerStack(tuple(kind._replace(recomputed=layer not in kept) for layer, kind in enumerate(stack.layers)))


def recomputed_layers(arch: Architecture, config: MemoryConfig) -> int:
    """How many decoder layers are recomputed."""
    return arch.layers - config.kept_layers if config.checkpointing else 0


def recompute_order(arch: Architecture, config: MemoryConfig) -> tuple[int, ...]:
    """All layers, in the order in which they become recomputed ones."""
    return _order(arch, replace(config, checkpointing=False, kept_layers=0, activation_offload=False))


@lru_cache(maxsize=256)
def _order(arch: Architecture, config: MemoryConfig) -> tuple[int, ...]:
    layers = layer_stack(arch, config).layers
    # Whether its input needs a gradient is a matter of place: it must not set the first layer apart from the others.
    alike = [kind._replace(follows=kind.learns) for kind in layers]
    worth = {kind: _bytes_per_flop(arch, config, kind) for kind in set(alike)}
    return tuple(sorted(range(len(layers)), key=lambda layer: (-worth[alike[layer]], layer)))


def _bytes_per_flop(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> float:
    """Activations that recomputing a layer saves, above its input, per FLOP of its forward pass."""
    window = arch.sliding_window or REFERENCE_TOKENS
    length = 2 * window if config.window_reached else min(window, REFERENCE_TOKENS)
    shape = shape_of(1, length, 1)
    kept = layer_forward(arch, config, kind).saved.at(shape) - arch.hidden * config.base_bytes * length
    return max(0, kept) / layer_flops(arch, config, kind).of(1, length)
