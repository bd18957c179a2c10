"""Bytes that stay for a whole run: weights, adapters, optimizer state; and gradients, which come with each step.

Each tensor is rounded up to 512 bytes, the block size of CUDA's caching allocator, which the metered device uses too.

Try: `python -m pytest tests/budget/test_predict.py`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from engine.budget.architecture import Architecture
from engine.budget.parameter import Parameter
from engine.budget.parameters import HEAD, layer_parameters, outer_parameters
from engine.budget.selection import (
    NOTHING,
    Selection,
    counted,
    select_tower_ends,
    selected_outer,
    selections,
    tower_selections,
)
from engine.budget.setting import Setting
from engine.budget.tower import Tower
from engine.budget.tower_parameters import tower_ends, tower_layer

BLOCK_BYTES = 512

STAGE_BYTES = 32 * 2**20
"""Optimizer state that is brought from the host at once. Large enough that a copy over PCIe is bound by bandwidth."""


def rounded(size_bytes: int) -> int:
    """Up to whole blocks of 512 bytes."""
    return size_bytes + BLOCK_BYTES - 1 & -BLOCK_BYTES


class Tensors(NamedTuple):
    """Bytes of a group of layers or of what stands outside them."""

    weights: int = 0
    adapters: int = 0
    gradients: int = 0
    optimizer: int = 0

    def plus(self, other: Tensors, times: int = 1) -> Tensors:
        """This group and `times` of another."""
        weights, adapters, gradients, optimizer = self
        more_weights, more_adapters, more_gradients, more_optimizer = other
        return Tensors(
            weights + times * more_weights,
            adapters + times * more_adapters,
            gradients + times * more_gradients,
            optimizer + times * more_optimizer,
        )

    def stateless(self) -> Tensors:
        """The same where the optimizer's state is elsewhere."""
        weights, adapters, gradients, _state = self
        return Tensors(weights, adapters, gradients)

    @property
    def static(self) -> int:
        """What is there at every moment of the run."""
        return self.weights + self.adapters + self.optimizer


class StaticBytes(NamedTuple):
    """The whole model's tensors, split by where they sit."""

    layers: Tensors
    """All layers together."""
    outer: Tensors
    embedding_gradient: int
    head_gradient: int
    """Of an untied head; a tied one shares the embedding's."""
    tower: Tensors
    """Of a vision tower. Its gradients come only where there are images."""

    total: Tensors
    """Layers and the rest."""


@lru_cache(maxsize=256)
def lasting(setting: Setting) -> Setting:
    """The same to what stays for a whole run: remedies change how a step is computed, most of them nothing else."""
    return setting.but(checkpointing=False, activation_offload=False, loss="plain")


def static_bytes(arch: Architecture, setting: Setting) -> StaticBytes:
    """Count every tensor of the run once."""
    return _static_bytes(arch, lasting(setting))


@lru_cache(maxsize=256)
def _static_bytes(arch: Architecture, setting: Setting) -> StaticBytes:
    if setting.optimizer_offload:
        layers, outer, table, head, tower, total = _static_bytes(arch, setting.but(optimizer_offload=False))
        return StaticBytes(layers.stateless(), outer.stateless(), table, head, tower.stateless(), total.stateless())
    total, patterns = Tensors(), setting.patterns
    for chosen, count in counted(selections(arch, patterns)):
        total = total.plus(layer_tensors(arch, setting, chosen), count)
    trained, around = selected_outer(arch, patterns), outer_parameters(arch)
    outer = _tensors(around, trained, NOTHING, setting)
    gradients = {p.name: rounded(p.elements * setting.base_bytes) for p in around if p.name in trained}
    outer = outer._replace(weights=outer.weights + BLOCK_BYTES * arch.buffers)
    tower = tower_tensors(arch.tower, setting) if arch.tower else Tensors()
    return StaticBytes(
        layers=total,
        outer=outer,
        embedding_gradient=gradients.get(around[0].name, 0),
        head_gradient=gradients.get("lm_head.weight", 0),
        tower=tower,
        total=total.plus(outer).plus(tower),
    )


@lru_cache(maxsize=256)
def tower_tensors(tower: Tower, setting: Setting) -> Tensors:
    """Bytes of a vision tower: its layers, its ends, and its buffers."""
    ends = select_tower_ends(tower, setting.patterns)
    total = _tensors(tower_ends(tower), ends.trained, ends.adapted, setting)
    for chosen in tower_selections(tower, setting.patterns):
        total = total.plus(tower_layer_tensors(tower, setting, chosen))
    positions = 8 * tower.patches if tower.patches else 0  # int64
    total = total.plus(Tensors(weights=rounded(positions) if positions else 2 * BLOCK_BYTES))
    return total if setting.image_patches else total._replace(gradients=0)


@lru_cache(maxsize=256)
def tower_layer_tensors(tower: Tower, setting: Setting, chosen: Selection) -> Tensors:
    """Bytes of one layer of a tower."""
    return _tensors(tower_layer(tower), chosen.trained, chosen.adapted, setting)


def layer_tensors(arch: Architecture, setting: Setting, chosen: Selection) -> Tensors:
    """Bytes of one layer."""
    return _layer_tensors(arch, lasting(setting), chosen)


@lru_cache(maxsize=256)
def _layer_tensors(arch: Architecture, setting: Setting, chosen: Selection) -> Tensors:
    return _tensors(layer_parameters(arch, chosen.dense), chosen.trained, chosen.adapted, setting)


def _tensors(
    parameters: Iterable[Parameter], trained: frozenset[str], adapted: frozenset[str], setting: Setting
) -> Tensors:
    """Add up parameters, of which some by name are trained in full, or have an adapter beside them."""
    weights = adapters = gradients = 0
    learning: list[tuple[tuple[int, ...], int]] = []
    base, beside, quantized = setting.base_bytes, setting.adapter_bytes, setting.quantized
    for parameter in parameters:
        name, elements = parameter.name, parameter.elements
        whole = rounded(elements * base)
        weights += _nf4_bytes(elements) if quantized and parameter.linear and name != HEAD else whole
        if name in trained:
            weights += whole if setting.lora else 0  # peft trains a copy and keeps the original
            gradients += whole
            learning.append((parameter.shape, base))
        if name in adapted:
            for shape in _adapter_shapes(parameter, setting):
                adapters += rounded(prod(shape) * beside)
                learning.append((shape, beside))
    gradients += adapters
    if setting.optimizer == "adamw" and not setting.optimizer_offload:  # as `state_bytes` has it
        state = 2 * gradients + BLOCK_BYTES * len(learning)
    else:
        state = sum([state_bytes(shape, width, setting) for shape, width in learning])
    return Tensors(weights, adapters, gradients, state)


@lru_cache(maxsize=256)
def optimizer_scratch(arch: Architecture, setting: Setting) -> int:
    """What is made and dropped in the optimizer's step: by fused ones nothing, by adafactor the update of one tensor;
    and room for the state that comes over from the host, where that is where it lives."""
    if not setting.optimizer_offload and setting.optimizer != "adafactor":
        return 0
    shapes = set(_learning_shapes(arch, setting))
    scratch = _stage(arch, setting, shapes) if setting.optimizer_offload else 0
    if setting.optimizer == "adafactor":
        scratch += rounded(max((prod(shape) * width for shape, width in shapes), default=0))
    return scratch


def _learning_shapes(arch: Architecture, setting: Setting) -> list[tuple[tuple[int, ...], int]]:
    """(shape, bytes per element) of every kind of tensor that learns, each once."""
    outer = selected_outer(arch, setting.patterns)
    full = [p.shape for p in outer_parameters(arch) if p.name in outer]
    adapted: list[Parameter] = []
    for parts, found in _groups(arch, setting):
        trained = NOTHING.union(*[chosen.trained for chosen in found])
        beside = NOTHING.union(*[chosen.adapted for chosen in found])
        full += [p.shape for p in parts if p.name in trained]
        adapted += [p for p in parts if p.name in beside]
    sides = [(side, setting.rank) for p in adapted for side in p.shape]
    return [(shape, setting.base_bytes) for shape in full] + [(shape, setting.adapter_bytes) for shape in sides]


def _groups(arch: Architecture, setting: Setting) -> Iterator[tuple[tuple[Parameter, ...], set[Selection]]]:
    """Parameters that adapters may stand beside, with what is chosen of them in each of their layers."""
    chosen = set(selections(arch, setting.patterns))
    for dense in {selection.dense for selection in chosen}:
        yield layer_parameters(arch, dense), {selection for selection in chosen if selection.dense == dense}
    if arch.tower:
        yield tower_layer(arch.tower), set(tower_selections(arch.tower, setting.patterns))
        yield tower_ends(arch.tower), {select_tower_ends(arch.tower, setting.patterns)}


def _stage(arch: Architecture, setting: Setting, shapes: set[tuple[tuple[int, ...], int]]) -> int:
    """Staging of `engine.train.step.optimizer_offload`: STAGE_BYTES, or the largest tensor's state if more."""
    kept = setting.but(optimizer_offload=False)
    largest = max((state_bytes(shape, width, kept) for shape, width in shapes), default=0)
    return min(static_bytes(arch, kept).total.optimizer, max(largest, STAGE_BYTES))


def _nf4_bytes(elements: int) -> int:
    """A linear layer's weight in 4 bits a value, with one fp32 scale per 64 values quantised again to 8 bits.

    Source: bitsandbytes Params4bit, blocksize 64, nested blocks of 256 (QLoRA, arXiv 2305.14314, section 3).
    """
    blocks = -(-elements // 64)
    return rounded((elements + 1) // 2) + rounded(blocks) + rounded(4 * -(-blocks // 256)) + 4 * BLOCK_BYTES


def _adapter_shapes(parameter: Parameter, setting: Setting) -> list[tuple[int, ...]]:
    """A [rank, inputs] and B [outputs, rank] of one linear layer, and DoRA's magnitude vector [outputs]."""
    (outputs, inputs), rank = parameter.shape, setting.rank
    return [(rank, inputs), (outputs, rank), (outputs,)] if setting.dora else [(rank, inputs), (outputs, rank)]


def state_bytes(shape: tuple[int, ...], dtype_bytes: int, setting: Setting) -> int:
    """Optimizer state of one tensor, each piece rounded to a block.

    adamw: two moments in the parameter's dtype and an fp32 step counter. adamw_8bit: two moments of one byte with an
    fp32 scale per 256 values (bitsandbytes; tensors under 4096 values stay in fp32). adafactor: torch's, row and column
    factors in fp32 for matrices, a full variance for vectors. sgd: the momentum buffer, if any. Nothing on the device
    where state is offloaded.
    """
    if setting.optimizer_offload:
        return 0
    elements = prod(shape)
    if setting.optimizer == "adamw":
        return 2 * rounded(elements * dtype_bytes) + BLOCK_BYTES
    if setting.optimizer == "sgd":
        return rounded(elements * dtype_bytes) if setting.momentum else 0
    if setting.optimizer == "adamw_8bit":
        if elements < 4096:
            return 2 * rounded(4 * elements)
        return 2 * (rounded(elements) + rounded(4 * -(-elements // 256)))
    if len(shape) < 2:  # adafactor
        return rounded(elements * dtype_bytes) + BLOCK_BYTES
    leading = elements // (shape[-1] * shape[-2])
    return rounded(leading * shape[-2] * dtype_bytes) + rounded(leading * shape[-1] * dtype_bytes) + BLOCK_BYTES
