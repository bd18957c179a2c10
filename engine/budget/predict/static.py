"""Bytes of weights, adapters and optimizer state, which stay for the whole run, of each step's gradients, and of the
scratch of the optimizer's step. Each tensor is rounded up to whole blocks (`engine.budget.calibration`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from engine.architecture.facts import Architecture
from engine.architecture.parameters import (
    HEAD,
    Parameter,
    behind_vision_layers,
    layer_parameters,
    outer_parameters,
    vision_end_parameters,
    vision_layer_parameters,
)
from engine.architecture.vision_encoder import VisionEncoder
from engine.budget.calibration import BLOCK_BYTES, round_to_blocks
from engine.budget.predict.shapes import PIECE_ELEMENTS, STAGE_BYTES
from engine.budget.trace.memory_config import DTYPE_BYTES, MemoryConfig
from engine.budget.trace.operations import FLOAT, INDEX
from engine.budget.trace.trainable import (
    Trainable,
    tables_with_rows,
    trainable_by_layer,
    trainable_outer,
    trainable_vision_ends,
    vision_trainable_by_layer,
)

Trained = tuple[tuple[int, ...], str]


class Tensors(NamedTuple):
    """Bytes of a group of tensors, by component."""

    weights: int = 0
    adapters: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Optimizer state, and with exact rounding the 16-bit remainders of weights trained in bf16."""
    widened: int = 0
    """Bytes in fp32 of the trained weights that are updated in scratch (`update_scratch`)."""

    def plus(self, other: Tensors, times: int = 1) -> Tensors:
        return Tensors(*[mine + times * its for mine, its in zip(self, other, strict=True)])

    @property
    def static(self) -> int:
        """Bytes that are live at every moment of the run."""
        return self.weights + self.adapters + self.optimizer


REMAINDER_BYTES = 2
"""Bytes of what rounding drops of one fp32 weight."""


class StaticBytes(NamedTuple):
    """Bytes of the whole model's tensors, and of the parts that single phases need."""

    embedding_gradient: int
    head_gradient: int
    """0 for a tied head, which shares the embedding's."""
    vision: Tensors
    """Of the vision encoder; gradients exist only if there are images."""
    total: Tensors


@lru_cache(maxsize=256)
def static_config(config: MemoryConfig) -> MemoryConfig:
    """The config with choices that do not matter to static bytes fixed, so that more configs share a result."""
    return replace(config, checkpointing=False, kept_layers=0, activation_offload=False, loss="plain")


def static_bytes(arch: Architecture, config: MemoryConfig) -> StaticBytes:
    """Bytes that a run keeps on one device without sharding, and of its gradients."""
    return _static_bytes(arch, static_config(config))


@lru_cache(maxsize=256)
def _static_bytes(arch: Architecture, config: MemoryConfig) -> StaticBytes:
    layers, patterns = Tensors(), config.patterns
    for trainable, count in Counter(trainable_by_layer(arch, patterns)).items():
        layers = layers.plus(layer_tensors(arch, config, trainable), count)
    parameters, trained = outer_parameters(arch), trainable_outer(arch, patterns)
    outer = _tensors(parameters, Trainable(trained), config).plus(Tensors(weights=BLOCK_BYTES * arch.buffers))
    gradients = {p.name: round_to_blocks(p.elements * config.base_bytes) for p in parameters if p.name in trained}
    tables = tables_with_rows(arch, config)
    rows = token_row_tensors(arch, config) if tables else Tensors()
    outer = outer.plus(rows, len(tables))
    if HEAD in tables:
        gradients[HEAD] = rows.gradients
    vision = vision_tensors(arch.vision_encoder, config) if arch.vision_encoder else Tensors()
    return StaticBytes(
        embedding_gradient=gradients.get(parameters[0].name, 0),
        head_gradient=gradients.get(HEAD, 0),
        vision=vision,
        total=layers.plus(outer).plus(vision),
    )


def token_row_tensors(arch: Architecture, config: MemoryConfig) -> Tensors:
    """Bytes of the rows of added tokens in one table: the trained ones, those of the base that peft keeps beside them
    (widened with the adapter), and their ids."""
    shape, dtype = (config.token_rows, arch.hidden), config.adapter_dtype or ""
    ids = round_to_blocks(INDEX * config.token_rows) * (2 if arch.tied else 1)  # of each layer that has them
    weights = round_to_blocks(prod(shape) * max(config.base_bytes, config.adapter_bytes)) + ids
    learning = [(shape, dtype)]
    adapters = round_to_blocks(prod(shape) * config.adapter_bytes)
    return Tensors(weights, adapters, adapters, state_bytes(shape, dtype, config), widened_bytes(learning, config))


@lru_cache(maxsize=256)
def vision_tensors(vision: VisionEncoder, config: MemoryConfig) -> Tensors:
    """Bytes of a vision encoder: its layers, the parameters outside them, and its buffers."""
    ends = trainable_vision_ends(vision, config.patterns)
    total = _tensors(vision_end_parameters(vision), ends, config)
    for trainable in vision_trainable_by_layer(vision, config.patterns):
        total = total.plus(vision_layer_tensors(vision, config, trainable))
    positions = 8 * vision.patches if vision.patches else 0  # int64
    total = total.plus(Tensors(weights=round_to_blocks(positions) if positions else 2 * BLOCK_BYTES))
    return total if config.image_patches else total._replace(gradients=0)


@lru_cache(maxsize=256)
def vision_layer_tensors(vision: VisionEncoder, config: MemoryConfig, trainable: Trainable) -> Tensors:
    return _tensors(vision_layer_parameters(vision), trainable, config)


def vision_end_gradients(vision: VisionEncoder, config: MemoryConfig, *, behind: bool) -> int:
    """Bytes of the gradients of what is trained outside the encoder's layers, and used after (`behind`) or before
    them."""
    parameters = [p for p in vision_end_parameters(vision) if behind_vision_layers(p.name) == behind]
    return _tensors(parameters, trainable_vision_ends(vision, config.patterns), config).gradients


def layer_tensors(arch: Architecture, config: MemoryConfig, trainable: Trainable) -> Tensors:
    return _layer_tensors(arch, static_config(config), trainable)


@lru_cache(maxsize=256)
def _layer_tensors(arch: Architecture, config: MemoryConfig, trainable: Trainable) -> Tensors:
    return _tensors(layer_parameters(arch, trainable.dense), trainable, config)


def _tensors(parameters: Iterable[Parameter], trainable: Trainable, config: MemoryConfig) -> Tensors:
    weights = adapters = 0
    learning: list[Trained] = []
    for parameter in parameters:
        name, whole = parameter.name, round_to_blocks(parameter.elements * config.base_bytes)
        packed = config.quantized and parameter.linear and name != HEAD
        weights += _nf4_bytes(parameter.elements) if packed else whole
        if name in trainable.trained:
            weights += whole if config.lora else 0  # peft trains a copy and keeps the original
            learning.append((parameter.shape, config.dtype))
        if name in trainable.adapted:
            shapes = _adapter_shapes(parameter, config)
            adapters += sum(round_to_blocks(prod(shape) * config.adapter_bytes) for shape in shapes)
            learning += [(shape, config.adapter_dtype or "") for shape in shapes]
    gradients = sum(round_to_blocks(prod(shape) * DTYPE_BYTES[dtype]) for shape, dtype in learning)
    state = sum(state_bytes(shape, dtype, config) for shape, dtype in learning)
    return Tensors(weights, adapters, gradients, state, widened_bytes(learning, config))


def widened_bytes(learning: Iterable[Trained], config: MemoryConfig) -> int:
    """Bytes in fp32 of those trained tensors that are updated in scratch."""
    return sum(round_to_blocks(FLOAT * prod(shape)) for shape, dtype in learning if config.updates_in_scratch(dtype))


@lru_cache(maxsize=256)
def optimizer_scratch(arch: Architecture, config: MemoryConfig) -> int:
    """Bytes that the optimizer's step allocates temporarily, without the scratch of weights in bf16: nothing if
    fused, the largest tensor's update for adafactor, and a staging buffer with optimizer offload."""
    if not config.optimizer_offload and config.optimizer != "adafactor":
        return 0
    shapes = trained_shapes(arch, config)
    scratch = _stage(arch, config, shapes) if config.optimizer_offload else 0
    if config.optimizer == "adafactor":
        updates = [prod(shape) * _update_bytes(dtype, config) for shape, dtype in shapes]
        scratch += round_to_blocks(max(updates, default=0))
    return scratch


@lru_cache(maxsize=256)
def update_scratch(arch: Architecture, config: MemoryConfig, widened: int) -> int:
    """Bytes of one rank's scratch in which weights trained in bf16 are updated in fp32, a piece at a time
    (`engine.train.step.piecewise_update`). `widened`: bytes of these weights in fp32. A piece is at most
    PIECE_ELEMENTS, for adafactor the largest weight."""
    if config.optimizer == "adafactor":
        largest = [prod(shape) for shape, dtype in trained_shapes(arch, config) if config.updates_in_scratch(dtype)]
        piece_bytes = max((round_to_blocks(FLOAT * elements) for elements in largest), default=0)
    else:
        piece_bytes = min(FLOAT * PIECE_ELEMENTS, widened)
    return _scratch_rows(config) * piece_bytes + BLOCK_BYTES if piece_bytes else 0


def _scratch_rows(config: MemoryConfig) -> int:
    """fp32 values per element of a piece: weight, gradient, random bits, state kept in bf16."""
    momenta = {"adamw": 2, "sgd": int(config.momentum)}.get(config.optimizer, 0)
    narrow = momenta if config.state_dtype == "bfloat16" else 0
    return 2 + narrow + int(narrow > 0 or config.rounding == "stochastic")


def _update_bytes(dtype: str, config: MemoryConfig) -> int:
    """Bytes per element of the update that adafactor computes."""
    return FLOAT if config.updates_in_scratch(dtype) else DTYPE_BYTES[dtype]


def trained_shapes(arch: Architecture, config: MemoryConfig) -> set[Trained]:
    """The different (shape, dtype) of trained tensors, those of adapters included."""
    outer = trainable_outer(arch, config.patterns)
    full = [p.shape for p in outer_parameters(arch) if p.name in outer]
    adapted: list[Parameter] = []
    for parts, found in _groups(arch, config):
        trained = frozenset[str]().union(*[trainable.trained for trainable in found])
        beside = frozenset[str]().union(*[trainable.adapted for trainable in found])
        full += [p.shape for p in parts if p.name in trained]
        adapted += [p for p in parts if p.name in beside]
    sides: list[tuple[int, ...]] = [shape for p in adapted for shape in p.adapter_shapes(config.rank)]
    sides += [(config.token_rows, arch.hidden)] * len(tables_with_rows(arch, config))
    return {(shape, config.dtype) for shape in full} | {(shape, config.adapter_dtype or "") for shape in sides}


def _groups(arch: Architecture, config: MemoryConfig) -> Iterator[tuple[tuple[Parameter, ...], set[Trainable]]]:
    """The parameters of one layer of each sort, and what layers of this sort train."""
    layers = set(trainable_by_layer(arch, config.patterns))
    for dense in {layer.dense for layer in layers}:
        yield layer_parameters(arch, dense), {layer for layer in layers if layer.dense == dense}
    if arch.vision_encoder:
        yield (
            vision_layer_parameters(arch.vision_encoder),
            set(vision_trainable_by_layer(arch.vision_encoder, config.patterns)),
        )
        yield vision_end_parameters(arch.vision_encoder), {trainable_vision_ends(arch.vision_encoder, config.patterns)}


def _stage(arch: Architecture, config: MemoryConfig, shapes: set[Trained]) -> int:
    """Bytes of the staging buffer of `engine.train.step.optimizer_offload`: STAGE_BYTES or the largest tensor's
    state, at most all state."""
    kept = replace(config, optimizer_offload=False)
    largest = max((state_bytes(shape, dtype, kept) for shape, dtype in shapes), default=0)
    return min(static_bytes(arch, kept).total.optimizer, max(largest, STAGE_BYTES))


def _nf4_bytes(elements: int) -> int:
    """Bytes of a weight in nf4: 4 bits per value, and per 64 values a scale of 8 bits (bitsandbytes Params4bit,
    blocksize 64, nested blocks of 256; QLoRA, arXiv 2305.14314, section 3)."""
    blocks = -(-elements // 64)
    return (
        round_to_blocks((elements + 1) // 2)
        + round_to_blocks(blocks)
        + round_to_blocks(4 * -(-blocks // 256))
        + 4 * BLOCK_BYTES
    )


def _adapter_shapes(parameter: Parameter, config: MemoryConfig) -> list[tuple[int, ...]]:
    """A [rank, inputs], B [outputs, rank] and, for DoRA, the magnitude [outputs]."""
    return [*parameter.adapter_shapes(config.rank), *([parameter.shape[:1]] if config.dora else [])]


def state_bytes(shape: tuple[int, ...], dtype: str, config: MemoryConfig) -> int:
    """Bytes of one tensor's optimizer state on the device; 0 with optimizer offload.

    adamw: two moments and an fp32 step counter. adamw_8bit: two moments of one byte with an fp32 scale per 256 values
    (bitsandbytes; tensors under 4096 values stay in fp32). adafactor: torch's, row and column factors for matrices, a
    full variance for vectors. sgd: the momentum buffer, if any. The state has the parameter's dtype; for weights in
    bf16 it has train.state_dtype, and exact rounding adds a remainder.
    """
    if config.optimizer_offload:
        return 0
    exact = dtype == "bfloat16" and config.rounding == "exact"
    remainder = round_to_blocks(REMAINDER_BYTES * prod(shape)) if exact else 0
    wide = config.state_dtype if config.updates_in_scratch(dtype) else dtype
    return remainder + _moments(shape, DTYPE_BYTES[wide], config)


def _moments(shape: tuple[int, ...], dtype_bytes: int, config: MemoryConfig) -> int:
    elements = prod(shape)
    if config.optimizer == "adamw":
        return 2 * round_to_blocks(elements * dtype_bytes) + BLOCK_BYTES
    if config.optimizer == "sgd":
        return round_to_blocks(elements * dtype_bytes) if config.momentum else 0
    if config.optimizer == "adamw_8bit":
        if elements < 4096:
            return 2 * round_to_blocks(4 * elements)
        return 2 * (round_to_blocks(elements) + round_to_blocks(4 * -(-elements // 256)))
    if len(shape) < 2:  # adafactor
        return round_to_blocks(elements * dtype_bytes) + BLOCK_BYTES
    leading = elements // (shape[-1] * shape[-2])
    return (
        round_to_blocks(leading * shape[-2] * dtype_bytes)
        + round_to_blocks(leading * shape[-1] * dtype_bytes)
        + BLOCK_BYTES
    )
