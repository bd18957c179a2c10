"""Finds out whether all layers of a model are alike, so that the memory of all can be computed from a simulation of a
few.

Try: `tunedeck plan -p 80gb -r lora --set model.id=facebook/opt-1.3b`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from engine.simulate.device import SimulatedDevice
from engine.simulate.phase_peaks import decoder_layers
from engine.simulate.step import on_meta
from engine.spec.schema.run import RunSpec

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
FEWEST_LAYERS = 5
"""Models of fewer layers are simulated with all their layers."""
NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "idx")
"""Attributes in which a layer keeps its own number."""


def depth_of(spec: RunSpec, facts: dict[str, Any]) -> int | None:
    """The number of a model's layers; None if they are not all alike, if there are fewer than FEWEST_LAYERS, or if not
    exactly one key of the config (`facts`) gives their number."""
    place = _depth_place(facts)
    if place is None or place[0][place[1]] < FEWEST_LAYERS:
        return None
    layers = list(decoder_layers(on_meta(spec, SimulatedDevice(like_a_card=True), facts).base))
    kinds = {tuple(_outline(layer)) for layer in layers}
    return len(layers) if len(kinds) == 1 and len(layers) == place[0][place[1]] else None


def at_depth(facts: dict[str, Any], depth: int) -> dict[str, Any]:
    """A copy of the config `facts` with `depth` layers; lists with an entry per layer are shortened. Requires that
    `depth_of` found the model's depth."""
    place = _depth_place(facts)
    assert place is not None
    table, key = place
    layers = table[key]
    changed = {
        name: value[:depth] if isinstance(value, list) and len(value) == layers else value
        for name, value in table.items()
    } | {key: depth}
    return changed if table is facts else {**facts, "text_config": changed}


def _depth_place(facts: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return (table, key): the table of the config `facts` that contains the number of layers, and its key there; None
    unless exactly one of DEPTH_KEYS is set."""
    table = facts.get("text_config") or facts
    keys = [key for key in DEPTH_KEYS if isinstance(table.get(key), int)]
    return (table, keys[0]) if len(keys) == 1 else None


def _outline(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple for each module of a layer: its name, class, settings, and the shapes of its parameters and whether
    each is trained. Two layers are alike if they yield the same tuples."""
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str, bool, type(None))) and key not in NUMBERS
        }
        own = module.named_parameters(recurse=False)
        shapes = tuple((key, tuple(tensor.shape), tensor.requires_grad) for key, tensor in own)
        yield name, type(module).__name__, tuple(sorted(settings.items(), key=str)), shapes
