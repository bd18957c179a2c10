"""Memory of a rank with sharded weights (torch's FSDP2), group by group.

A group's weights are gathered in a flat buffer and copied out of it, tensor by tensor. Its gradients are reduced in a
flat fp32 buffer; the rank's part of the result is one flat tensor. First dimensions are padded to equal parts. The
schedule follows `engine.distributed.sharded` and `torch/distributed/fsdp/_fully_shard` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from engine.architecture.facts import Architecture
from engine.architecture.parameters import HEAD, Parameter, layer_parameters, outer_parameters
from engine.budget.calibration import BLOCK_BYTES, round_to_blocks
from engine.budget.predict.static import Tensors, state_bytes, vision_tensors, widened_bytes
from engine.budget.trace.layer import LayerKind, layer_stack
from engine.budget.trace.memory_config import DTYPE_BYTES, MemoryConfig
from engine.budget.trace.memory_trace import MemoryTrace, Storage
from engine.budget.trace.operations import FLOAT
from engine.budget.trace.polynomial import BYTE
from engine.budget.trace.trainable import trainable_outer
from engine.config.files.machine import install_packages, installed, older
from engine.errors import EnvironmentProblem

KNOWN_TORCH = ("2.13", "2.14", "2.15")
"""Versions of torch for whose `_fully_shard` folder `engine.distributed.sharded` was written and tested. With
others, all ranks have to restart after an out-of-memory failure."""

SHARDS_SINCE = "2.13"
"""Earlier versions of `fully_shard` cannot reduce zero gradients for weights that only other ranks have used."""

Value = tuple[tuple[int, ...], str, bool, bool]
"""A tensor: shape, dtype, whether it is trained, whether it is part of an adapter."""


@dataclass(frozen=True)
class Group:
    """Bytes of weights that are gathered together."""

    held: Tensors = field(compare=False)  # so that groups with equal buffers share a trace
    """Of the rank with the largest part; the gradients of that part are one flat tensor."""
    gathered: int
    """The gathered weights as separate tensors."""
    flat: int
    """The buffer that the weights are gathered in."""
    reduced: int
    """The buffer that the gradients are reduced in."""


class ShardedMicroBatch(NamedTuple):
    """Bytes of gathered weights and of buffers in a micro-batch."""

    forward: list[int]
    """During the forward pass of each layer, and then of each small module."""
    loss: int
    backward: list[int]
    """During the backward pass of each layer."""
    embedding: int
    """While the embedding's gradient is computed or reduced."""
    gathered: int
    """Bytes of all weights that are gathered; each use counts."""
    reduced: int
    """Bytes of all gradients that are summed over the ranks, in fp32."""


@dataclass(frozen=True)
class Shards:
    """All groups of a model."""

    table: Group
    """The embedding, including a tied head."""
    layers: tuple[Group, ...]
    small: tuple[Group, ...]
    """Small modules, each a group of its own: position embeddings, and last the norm after the layers."""
    head: Group | None
    """The head; None if tied."""
    keeps: bool
    """Gathered weights stay allocated from forward to backward (ZeRO-2)."""

    @property
    def outer(self) -> tuple[Group, ...]:
        """All groups but those of the layers."""
        return (self.table, *self.small, *([self.head] if self.head else []))

    @cached_property
    def micro_batch(self) -> ShardedMicroBatch:
        """Bytes of gathered weights and of buffers in a micro-batch."""
        return _micro_batch(self)

    @cached_property
    def _without_gradients(self) -> ShardedMicroBatch:
        """A micro-batch of evaluation, whose forward pass keeps no gathered weights."""
        return replace(self, keeps=False).micro_batch if self.keeps else self.micro_batch

    def evaluate(self) -> int:
        """Peak bytes of gathered weights and of buffers during an evaluation."""
        return max(*self._without_gradients.forward, self._without_gradients.loss)

    def generate(self) -> int:
        """The same during generation, in which the head stays gathered."""
        return max(self._without_gradients.forward) + (self.head.gathered if self.head else 0)


@lru_cache(maxsize=256)
def _micro_batch(shards: Shards) -> ShardedMicroBatch:
    """Traces FSDP2's schedule of a micro-batch. In forward a gather buffer lives until the next group is
    gathered; in backward the next group is gathered while one is differentiated, and a reduce buffer lives until
    the next reduction."""
    trace, gathers, reductions = MemoryTrace(metered=False), list[int](), list[int]()

    def hold(size_bytes: int) -> Storage:
        return trace.allocate(size_bytes * BYTE)

    def gather(group: Group) -> Storage:
        gathers.append(group.flat)
        return hold(group.flat)

    def reduce(group: Group) -> Storage:
        reductions.append(group.reduced)
        return hold(group.reduced)

    buffer: Storage | None = gather(shards.table)
    table = hold(shards.table.gathered) if shards.keeps or shards.head is None else None  # tied: the head uses it again
    kept, forward = list[Storage](), list[int]()
    for group in (*shards.layers, *shards.small):
        buffer = gather(group)
        kept.append(hold(group.gathered))
        forward.append(trace.live.fixed)
        if not shards.keeps:
            kept.clear()
    buffer, head = (gather(shards.head), hold(shards.head.gathered)) if shards.head else (buffer, None)
    loss = trace.live.fixed
    del head, kept[len(shards.layers) :]

    reducing = reduce(shards.head) if shards.head else None
    for group in shards.small:  # a position table's gradients are reduced last in fact; they are small
        buffer = None if shards.keeps else gather(group)
        reducing = reduce(group)
    buffer, backward = None if shards.keeps else gather(shards.layers[-1]), list[int]()
    for layer in reversed(range(len(shards.layers))):
        whole = kept.pop() if shards.keeps else hold(shards.layers[layer].gathered)
        buffer = gather(shards.layers[layer - 1]) if layer and not shards.keeps else None
        backward.insert(0, trace.live.fixed)
        del whole
        reducing = reduce(shards.layers[layer])
    embedding = trace.live.fixed
    del table
    reducing = reduce(shards.table)
    embedding = max(embedding, trace.live.fixed)
    del buffer, reducing
    return ShardedMicroBatch(forward, loss, backward, embedding, sum(gathers), sum(reductions))


def can_shard() -> bool:
    return not older(installed("torch"), SHARDS_SINCE)


def require_shards() -> None:
    """Raise EnvironmentProblem if torch is too old to shard weights."""
    if not can_shard():
        raise EnvironmentProblem(
            f'parallel.strategy = "sharded" needs torch {SHARDS_SINCE}, but {installed("torch")} is installed',
            fix=f'{install_packages(f"torch=={KNOWN_TORCH[-1]}.*")}, or set parallel.strategy = "replicated" if '
            "it fits",
        )


def recovers_with(torch_version: str) -> bool:
    """Whether sharded ranks can go on after an out-of-memory failure without a restart."""
    return torch_version.startswith(KNOWN_TORCH)


@lru_cache(maxsize=256)
def shards_of(arch: Architecture, config: MemoryConfig, ranks: int, *, keeps: bool) -> Shards:
    """The groups into which `engine.distributed.sharded` divides a model. `keeps`: as in `Shards`."""
    stack = layer_stack(arch, config)
    of_kind = {kind: _group(_layer_values(arch, config, kind), config, ranks) for kind in stack.kinds}
    outer = {p.name: p for p in outer_parameters(arch)}
    table = outer_parameters(arch)[0]
    small = dict.fromkeys(p.module for p in outer.values() if p.name not in (table.name, HEAD))

    def group(parameters: Iterable[Parameter]) -> Group:
        return _group(_outer_values(arch, config, parameters), config, ranks)

    return Shards(
        group([table]),
        tuple(of_kind[kind] for kind in stack.layers),
        tuple(group(p for p in outer.values() if p.module == module) for module in small),
        group([outer[HEAD]]) if HEAD in outer else None,
        keeps,
    )


@lru_cache(maxsize=256)
def held_by_a_rank(arch: Architecture, config: MemoryConfig, ranks: int) -> Tensors:
    """Bytes of one rank's part of weights, adapters, optimizer state and complete gradients."""
    total = Tensors(weights=BLOCK_BYTES * arch.buffers)
    spread = shards_of(arch, config, ranks, keeps=False)
    for group in (*spread.layers, *spread.outer):
        total = total.plus(group.held)
    if arch.vision_encoder:
        encoder = vision_tensors(arch.vision_encoder, config)
        total = total.plus(Tensors(*(-(-size // ranks) for size in encoder)))
    return total


def _layer_values(arch: Architecture, config: MemoryConfig, kind: LayerKind) -> Iterator[Value]:
    trainable = kind.trainable
    for parameter in layer_parameters(arch, trainable.dense):
        name = parameter.name
        yield from _values(parameter, config, name in trainable.trained, name in trainable.adapted)


def _outer_values(arch: Architecture, config: MemoryConfig, parameters: Iterable[Parameter]) -> Iterator[Value]:
    trained = trainable_outer(arch, config.patterns)
    for parameter in parameters:
        yield from _values(parameter, config, parameter.name in trained, False)


def _values(parameter: Parameter, config: MemoryConfig, trained: bool, adapted: bool) -> Iterator[Value]:
    yield parameter.shape, config.dtype, trained and not config.lora, False
    if trained and config.lora:  # peft trains a copy and keeps the original
        yield parameter.shape, config.dtype, True, False
    if adapted:
        shapes = [*parameter.adapter_shapes(config.rank), *([parameter.shape[:1]] if config.dora else [])]
        yield from ((shape, config.adapter_dtype or "", True, True) for shape in shapes)


def _group(values: Iterable[Value], config: MemoryConfig, ranks: int) -> Group:
    parts = [((-(-shape[0] // ranks), *shape[1:]), dtype, learns, adapter) for shape, dtype, learns, adapter in values]
    learning = [(shape, dtype) for shape, dtype, learns, _ in parts if learns]
    sizes = [(prod(shape) * DTYPE_BYTES[dtype], adapter) for shape, dtype, _, adapter in parts]

    def weights(of_adapters: bool) -> int:
        return sum(round_to_blocks(size) for size, adapter in sizes if adapter == of_adapters)

    return Group(
        Tensors(
            weights(False),
            weights(True),
            round_to_blocks(sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in learning)),
            sum(state_bytes(shape, dtype, config) for shape, dtype in learning),
            widened_bytes(learning, config),
        ),
        gathered=sum(round_to_blocks(ranks * size) for size, _ in sizes),
        flat=round_to_blocks(ranks * sum(size for size, _ in sizes)),
        reduced=round_to_blocks(ranks * FLOAT * sum(prod(shape) for shape, _ in learning)),
    )
