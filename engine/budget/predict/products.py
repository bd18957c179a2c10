"""Counts the FLOPs of a decoder's products from its architecture alone, before a model is loaded."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from engine.architecture.facts import Architecture
from engine.architecture.parameters import Parameter, layer_parameters
from engine.budget.trace.layer import LayerKind
from engine.budget.trace.memory_config import MemoryConfig


class Flops(NamedTuple):
    """FLOPs of one pass forward: 2 for each product of two numbers and its addition."""

    per_token: float
    per_pair: float
    """Per pair of a query's and a key's token."""
    window: int | None = None
    """Tokens that a query looks back; None: all."""

    def of(self, rows: int, length: int) -> float:
        return rows * length * self.per_token + self.of_pairs(rows, length)

    def of_pairs(self, rows: int, length: int) -> float:
        """Those of attention alone."""
        return rows * length * min(length, self.window or length) * self.per_pair


def layer_flops(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> Flops:
    """The forward pass of one layer, without adapters. Pairs that a causal mask hides count: kernels that leave them
    out reach half of a product's speed."""
    per_token = 2.0 * sum(used_weights(arch, each) for each in layer_parameters(arch, kind.trainable.dense))
    return Flops(per_token, 4.0 * arch.query_width, arch.sliding_window if kind.slides else None)


def trained_weights(arch: Architecture, kind: LayerKind) -> float:
    """Weights of a layer's matrices that learn, as far as a token uses them."""
    parameters = layer_parameters(arch, kind.trainable.dense)
    return sum(used_weights(arch, each) for each in parameters if each.name in kind.trainable.trained)


def adapter_weights(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> float:
    """Weights of a layer's adapters, as far as a token uses them."""
    parameters = layer_parameters(arch, kind.trainable.dense)
    adapted = [each for each in parameters if each.name in kind.trainable.adapted]
    return sum(_used_share(arch, each) * sum(map(prod, each.adapter_shapes(config.rank))) for each in adapted)


def used_weights(arch: Architecture, parameter: Parameter) -> float:
    """Weights of a matrix that a token is multiplied with: of experts, those of the ones it is sent to. 0 for a
    vector."""
    if len(parameter.shape) < 2 or parameter.name.endswith("bias"):
        return 0.0
    return parameter.elements * _used_share(arch, parameter)


def _used_share(arch: Architecture, parameter: Parameter) -> float:
    return arch.experts.per_token / arch.experts.count if parameter.of_experts and arch.experts is not None else 1.0
