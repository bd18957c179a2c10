"""Memory of a rank with sharded weights (torch's FSDP2), group by group.

A group's weights are gathered in a flat buffer and copied out of it, tensor by tensor. Its gradients are reduced in a
flat fp32 buffer; the rank's part of the result is one flat tensor. First dimensions are padded to equal parts.
Which buffers are live at once follows `engine.distributed.sharded` and `torch/distributed/fsdp/_fully_shard` of torch
2.13: in forward a gather buffer lives until the next group is gathered; in backward the next group is gathered while
one is differentiated, and a reduce buffer lives until the next group's gradients are reduced.

Try: `pytest tests/budget/test_parallel_layout.py tests/distributed/test_sharded_steps.py`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from engine.budget.architecture.facts import Architecture
from engine.budget.architecture.parameter import Parameter
from engine.budget.architecture.parameters import HEAD, layer_parameters, outer_parameters
from engine.budget.blocks import BLOCK_BYTES, round_to_blocks
from engine.budget.predict.static import Tensors, state_bytes, vision_tensors, widened_bytes
from engine.budget.trace.layer_kinds import LayerKind, layer_stack
from engine.budget.trace.memory_config import DTYPE_BYTES, MemoryConfig
from engine.budget.trace.operations import FLOAT
from engine.budget.trace.trainable import trainable_outer
from engine.errors import EnvironmentProblem
from engine.spec.installed import installed, older

KNOWN_TORCH = ("2.13",)
"""Versions of torch for whose `_fully_shard` folder `engine.distributed.sharded` was written and tested.
With other versions sharding works, too, but all ranks have to restart after an out-of-memory failure."""

SHARDS_SINCE = "2.13"
"""Earlier versions of `fully_shard` cannot reduce zero gradients for weights that only other ranks have used."""

Value = tuple[tuple[int, ...], str, bool, bool]
"""A tensor: shape, dtype, whether it is trained, whether it is part of an adapter."""


@dataclass(frozen=True)
class Group:
    """Bytes of one group: weights that are gathered together."""

    held: Tensors
    """Bytes by component of the rank with the largest part of the group; the gradients of that part are one flat
    tensor."""
    gathered: int
    """Bytes of the gathered weights as separate tensors."""
    flat: int
    """Bytes of the flat buffer that the weights are gathered in."""
    reduced: int
    """Bytes of the buffer that the gradients are reduced in."""


@dataclass(frozen=True)
class Shards:
    """All groups of a model, and the bytes of their gathered weights and buffers in each phase."""

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
        """All groups except those of the layers: embedding, small modules, and the head if it is not tied."""
        return (self.table, *self.small, *([self.head] if self.head else []))

    def forward(self, layer: int) -> int:
        """Bytes of gathered weights and of buffers while the forward pass of `layer` runs."""
        return self._kept_up_to(layer) + self.layers[layer].flat + self._table_held

    def loss(self) -> int:
        """Bytes of gathered weights and of buffers while the loss is computed."""
        kept = sum(group.gathered for group in (*self.layers, *self.small)) if self.keeps else 0
        ends = self.head.flat + self.head.gathered if self.head else self.small[-1].flat
        return kept + ends + self._table_held

    def backward(self, layer: int) -> int:
        """Bytes of gathered weights and of buffers while the backward pass of `layer` runs."""
        behind = self.layers[layer + 1].reduced if layer + 1 < len(self.layers) else self.small[-1].reduced
        coming = 0 if self.keeps else self.layers[layer - 1].flat if layer else 0
        return self._kept_up_to(layer) + coming + behind + self._table_held

    def gathered_in_micro_batch(self) -> int:
        """Bytes of all weights that one micro-batch gathers: those of the layers and of the small modules for forward
        and, unless they are kept, again for backward, those of embedding and head once."""
        uses = 1 if self.keeps else 2
        ends = self.table.flat + (self.head.flat if self.head else 0)
        return ends + uses * sum(group.flat for group in (*self.layers, *self.small))

    def reduced_in_micro_batch(self) -> int:
        """Bytes of all gradients that one micro-batch sums over the ranks, in fp32."""
        return sum(group.reduced for group in (*self.layers, *self.outer))

    def embedding(self) -> int:
        """Bytes of gathered weights and of buffers while the embedding's gradient is computed or reduced."""
        return max(self.layers[0].reduced + self._table_held, self.table.reduced)

    def evaluate(self) -> int:
        """Peak bytes of gathered weights and of buffers during an evaluation."""
        layer = max(group.flat + group.gathered for group in self.layers)
        if self.head is None:
            return self.table.gathered + layer
        return max(layer, self.head.flat + self.head.gathered)

    def generate(self) -> int:
        """Peak bytes of gathered weights and of buffers during generation, in which the head stays gathered."""
        ends = self.head or self.table
        return ends.gathered + max(group.flat + group.gathered for group in self.layers)

    @property
    def _table_held(self) -> int:
        return self.table.gathered if self.keeps or self.head is None else 0

    def _kept_up_to(self, layer: int) -> int:
        return sum(g.gathered for g in self.layers[: layer + 1]) if self.keeps else self.layers[layer].gathered


def can_shard() -> bool:
    """Whether the installed torch can shard weights."""
    return not older(installed("torch"), SHARDS_SINCE)


def require_shards() -> None:
    """Raise EnvironmentProblem if torch is too old to shard weights."""
    if not can_shard():
        raise EnvironmentProblem(
            f'parallel.strategy = "sharded" needs torch {SHARDS_SINCE}, this is {installed("torch")}',
            fix=f"pip install 'torch=={KNOWN_TORCH[-1]}.*', or set parallel.strategy = \"replicated\" if that fits",
        )


def recovers_with(torch_version: str) -> bool:
    """Whether, with this torch version, sharded ranks can go on after an out-of-memory failure without a restart."""
    return torch_version.startswith(KNOWN_TORCH)


@lru_cache(maxsize=256)
def shards_of(arch: Architecture, config: MemoryConfig, ranks: int, *, keeps: bool) -> Shards:
    """The groups into which `engine.distributed.sharded` divides a model over `ranks` ranks. `keeps`: gathered weights
    stay allocated from forward to backward (ZeRO-2)."""
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
        outputs, inputs = parameter.shape
        shapes = [(config.rank, inputs), (outputs, config.rank), *([(outputs,)] if config.dora else [])]
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
