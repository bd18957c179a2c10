"""What a rank holds and sends where weights are spread over ranks (torch's FSDP2), group by group.

A group's weights come in a flat buffer and are copied out of it, each tensor by itself; its gradients leave through a
flat fp32 buffer, and what remains here of all of them is one flat piece. First dimensions are padded to equal parts.
Which buffers are there at once follows `engine.distributed.sharded` and `torch/distributed/fsdp/_fully_shard` of torch
2.13: in forward a flat buffer waits until the next group is gathered, in backward the next group is on its way while
one is at work, and the gradients that left last keep their buffer until the next ones leave.

Try: `pytest tests/budget/test_sharing.py tests/distributed/test_sharded_steps.py`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from engine.budget.architecture import Architecture
from engine.budget.installed import installed, older
from engine.budget.kinds import Kind, stack_of
from engine.budget.operations import FLOAT
from engine.budget.parameter import Parameter
from engine.budget.parameters import HEAD, layer_parameters, outer_parameters
from engine.budget.selection import selected_outer
from engine.budget.setting import Setting
from engine.budget.static import BLOCK_BYTES, Tensors, rounded, state_bytes, tower_tensors
from engine.errors import EnvironmentProblem

KNOWN_TORCH = ("2.13",)
"""Versions of torch whose `_fully_shard` folder `engine.distributed.sharded` was read for and is tested with. On later
ones weights are sharded all the same, but after memory ran out all ranks have to start again."""

SHARDS_SINCE = "2.13"
"""Before, `fully_shard` could not be told to send gradients of zero for what only other ranks have used."""

Value = tuple[tuple[int, ...], int, bool, bool]
"""Shape, bytes per element, whether it learns, whether it is part of an adapter."""


@dataclass(frozen=True)
class Group:
    """Bytes of one group."""

    held: Tensors
    """By the rank with the largest part; gradients are the flat piece."""
    gathered: int
    flat: int
    reduced: int
    """Gradients on their way out."""


@dataclass(frozen=True)
class Shards:
    """All groups of a model over `ranks`."""

    table: Group
    """The embedding, with the head where that is tied to it."""
    layers: tuple[Group, ...]
    beside: tuple[Group, ...]
    """Small groups of their own: position tables, the last norm (which comes last)."""
    head: Group | None
    """Where it is not tied."""
    keeps: bool
    """Gathered weights stay from forward to backward (ZeRO-2)."""

    @property
    def ends(self) -> tuple[Group, ...]:
        """All but the layers."""
        return (self.table, *self.beside, *([self.head] if self.head else []))

    def forward(self, layer: int) -> int:
        """While a layer is computed."""
        return self._kept_up_to(layer) + self.layers[layer].flat + self._table_held

    def loss(self) -> int:
        """While token losses are."""
        kept = sum(group.gathered for group in (*self.layers, *self.beside)) if self.keeps else 0
        ends = self.head.flat + self.head.gathered if self.head else self.beside[-1].flat
        return kept + ends + self._table_held

    def backward(self, layer: int) -> int:
        """While a layer is differentiated."""
        behind = self.layers[layer + 1].reduced if layer + 1 < len(self.layers) else self.beside[-1].reduced
        coming = 0 if self.keeps else self.layers[layer - 1].flat if layer else 0
        return self._kept_up_to(layer) + coming + behind + self._table_held

    def embedding(self) -> int:
        """While the table's gradient is made, or leaves."""
        return max(self.layers[0].reduced + self._table_held, self.table.reduced)

    def evaluate(self) -> int:
        """While nothing is kept for backward."""
        layer = max(group.flat + group.gathered for group in self.layers)
        if self.head is None:
            return self.table.gathered + layer
        return max(layer, self.head.flat + self.head.gathered)

    def generate(self) -> int:
        """The same with the head there all the time."""
        ends = self.head or self.table
        return ends.gathered + max(group.flat + group.gathered for group in self.layers)

    @property
    def _table_held(self) -> int:
        return self.table.gathered if self.keeps or self.head is None else 0

    def _kept_up_to(self, layer: int) -> int:
        return sum(g.gathered for g in self.layers[: layer + 1]) if self.keeps else self.layers[layer].gathered


def require_shards() -> None:
    """Raise EnvironmentProblem where torch is too old to spread weights over ranks."""
    if older(installed("torch"), SHARDS_SINCE):
        raise EnvironmentProblem(
            f'parallel.strategy = "sharded" needs torch {SHARDS_SINCE}, this is {installed("torch")}',
            fix=f"pip install 'torch=={KNOWN_TORCH[-1]}.*', or set parallel.strategy = \"replicated\" if that fits",
        )


def recovers_with(torch_version: str) -> bool:
    """Whether this version's shards can be put back in order after memory ran out."""
    return torch_version.startswith(KNOWN_TORCH)


@lru_cache(maxsize=256)
def shards_of(arch: Architecture, setting: Setting, ranks: int, *, keeps: bool) -> Shards:
    """The groups that `engine.distributed.sharded` makes of a model."""
    stack = stack_of(arch, setting)
    of_kind = [_group(_layer_values(arch, setting, kind), setting, ranks) for kind in stack.kinds]
    outer = {p.name: p for p in outer_parameters(arch)}
    table = outer_parameters(arch)[0]
    beside = dict.fromkeys(p.module for p in outer.values() if p.name not in (table.name, HEAD))

    def group(parameters: Iterable[Parameter]) -> Group:
        return _group(_outer_values(arch, setting, parameters), setting, ranks)

    return Shards(
        group([table]),
        tuple(of_kind[place] for place in stack.order),
        tuple(group(p for p in outer.values() if p.module == module) for module in beside),
        group([outer[HEAD]]) if HEAD in outer else None,
        keeps,
    )


@lru_cache(maxsize=256)
def held_by_a_rank(arch: Architecture, setting: Setting, ranks: int) -> Tensors:
    """Weights, adapters, optimizer state and complete gradients of one rank."""
    total, order = Tensors(weights=BLOCK_BYTES * arch.buffers), stack_of(arch, setting).order
    spread = shards_of(arch, setting, ranks, keeps=False)
    for place, count in Counter(order).items():
        total = total.plus(spread.layers[order.index(place)].held, count)
    for group in spread.ends:
        total = total.plus(group.held)
    if arch.tower:
        tower = tower_tensors(arch.tower, setting)
        total = total.plus(Tensors(*(-(-size // ranks) for size in tower)))
    return total


def _layer_values(arch: Architecture, setting: Setting, kind: Kind) -> Iterator[Value]:
    chosen = kind.chosen
    for parameter in layer_parameters(arch, chosen.dense):
        yield from _values(parameter, setting, parameter.name in chosen.trained, parameter.name in chosen.adapted)


def _outer_values(arch: Architecture, setting: Setting, parameters: Iterable[Parameter]) -> Iterator[Value]:
    trained = selected_outer(arch, setting.patterns)
    for parameter in parameters:
        yield from _values(parameter, setting, parameter.name in trained, False)


def _values(parameter: Parameter, setting: Setting, trained: bool, adapted: bool) -> Iterator[Value]:
    yield parameter.shape, setting.base_bytes, trained and not setting.lora, False
    if trained and setting.lora:  # peft trains a copy and keeps the original
        yield parameter.shape, setting.base_bytes, True, False
    if adapted:
        outputs, inputs = parameter.shape
        shapes = [(setting.rank, inputs), (outputs, setting.rank), *([(outputs,)] if setting.dora else [])]
        yield from ((shape, setting.adapter_bytes, True, True) for shape in shapes)


def _group(values: Iterable[Value], setting: Setting, ranks: int) -> Group:
    parts = [((-(-shape[0] // ranks), *shape[1:]), width, learns, adapter) for shape, width, learns, adapter in values]
    learning = [(shape, width) for shape, width, learns, _ in parts if learns]

    def weights(of_adapters: bool) -> int:
        return sum(rounded(prod(shape) * width) for shape, width, _, adapter in parts if adapter == of_adapters)

    return Group(
        Tensors(
            weights(False),
            weights(True),
            rounded(sum(prod(shape) * width for shape, width in learning)),
            sum(state_bytes(shape, width, setting) for shape, width in learning),
        ),
        gathered=sum(rounded(ranks * prod(shape) * width) for shape, width, _, _ in parts),
        flat=rounded(ranks * sum(prod(shape) * width for shape, width, _, _ in parts)),
        reduced=rounded(ranks * FLOAT * sum(prod(shape) for shape, _ in learning)),
    )
