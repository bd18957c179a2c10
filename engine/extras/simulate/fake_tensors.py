"""Fake tensors: shapes, dtypes and storages without memory. What an operation returns for inputs of one layout is found
out once. Where sizes depend on values, the most that they can be is assumed.

Torch has a cache for the same, which also serves symbolic sizes, constants and subclasses. Describing the inputs for it
took more than half of a simulation, which has none of these.

A mask that selects along a dimension selects all of it. A router sends all tokens to the same experts, as many as a
token has, and a token to each of the others, so that every expert runs and the largest has every token. Where tokens
are only divided among experts, and the parts stand beside each other throughout, the parts are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from engine.architecture.families import EXPERT_COUNTS

PLAIN = {int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format}
"""Types of arguments that are no tensors."""


class Layout(NamedTuple):
    """What the result of an operation depends on, of a tensor without values."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    device: torch.device


class Result(NamedTuple):
    """How a returned tensor is made: of a storage of its own, as a view of an input, or it is an input itself."""

    layout: Layout
    source: int | None
    """Number of the viewed or returned tensor among the inputs; None with a storage of its own."""
    is_input: bool = False


class _NotKeptError(Exception):
    """Raised for inputs or results that a layout does not describe."""


class FastFakeMode(FakeTensorMode):
    """Torch's mode, which makes fake tensors of all new ones and of the results of operations on them."""

    _known: ClassVar[dict[Any, list[Result] | Result | None]] = {}
    """Results by operation and inputs, for all simulations of a process; None if torch must be asked each time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # without a guard of dynamo around each operation: nothing is compiled in a simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, inputs = kwargs or {}, list[FakeTensor]()
        try:
            key = (func, _described((args, *kwargs.items()), inputs))
        except _NotKeptError:
            return self.dispatch(func, types, args, kwargs)
        if key in self._known:
            known = self._known[key]
            if isinstance(known, Result):
                return self._made(known, inputs)
            if known is not None:
                return tuple(self._made(each, inputs) for each in known)
            return self.dispatch(func, types, args, kwargs)
        made = self.dispatch(func, types, args, kwargs)
        try:
            changed = _described((args, *kwargs.items()), []) != key[1]
            self._known[key] = None if changed else _results(made, inputs)
        except _NotKeptError:
            self._known[key] = None
        return made

    def _made(self, result: Result, inputs: list[FakeTensor]) -> FakeTensor:
        if result.source is None:
            made = torch.empty_strided(*result.layout[:2], dtype=result.layout.dtype, device="meta")
        elif result.is_input:
            return inputs[result.source]
        else:
            made = torch.empty(0, dtype=result.layout.dtype, device="meta")
            storage = inputs[result.source].untyped_storage()
            made.set_(storage, result.layout.offset, result.layout.shape, result.layout.strides)
        return FakeTensor(self, made, result.layout.device)


def _described(value: Any, inputs: list[FakeTensor]) -> Any:
    """Return a hashable description of an argument, and append its tensors to `inputs`."""
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple([_described(each, inputs) for each in value])
    if kind in PLAIN:
        return kind, value
    if isinstance(value, FakeTensor) and value.constant is None:
        inputs.append(value)
        return _layout(value)
    raise _NotKeptError


def _layout(tensor: FakeTensor) -> Layout:
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise _NotKeptError
    return Layout(tensor.shape, tensor.stride(), tensor.dtype, int(tensor.storage_offset()), tensor.fake_device)


def _results(made: Any, inputs: list[FakeTensor]) -> list[Result] | Result:
    """Return how what torch has made of `inputs` is made again."""
    if not isinstance(made, (tuple, list)):
        return _result(made, inputs)
    results = [_result(each, inputs) for each in made]
    own = [each.untyped_storage()._cdata for each, result in zip(made, results, strict=True) if result.source is None]
    if len(own) > len(set(own)):
        raise _NotKeptError
    return results


def _result(made: Any, inputs: Sequence[FakeTensor]) -> Result:
    if not inputs or not isinstance(made, FakeTensor) or made.constant is not None:
        raise _NotKeptError
    layout, storage = _layout(made), made.untyped_storage()
    for number, tensor in enumerate(inputs):
        if made is tensor:
            return Result(layout, number, is_input=True)
    for number, tensor in enumerate(inputs):
        if tensor.untyped_storage()._cdata == storage._cdata:
            return Result(layout, number)
    again = torch.empty_strided(*layout[:2], dtype=layout.dtype, device="meta")
    if layout.offset or again.untyped_storage().nbytes() != storage.nbytes():
        raise _NotKeptError
    return Result(layout, None)


Assumed = Literal["masks", "routing"]
"""What is assumed: of masks alone, or of masks and of routers."""
WAYS: tuple[Assumed | None, ...] = (None, "masks", "routing")
"""From the one that assumes least."""

CHOOSE, DIVIDE = torch.ops.aten.topk.default, torch.ops.aten.split_with_sizes.default


Found = TypeVar("Found")


def assuming(simulate: Callable[[Assumed | None], Found]) -> tuple[Found, Assumed | None]:
    """Return what `simulate` finds with as few assumptions as it needs, and these. Raises its error of the first try
    where none helps."""
    first: Exception | None = None
    for assumed in WAYS:
        try:
            return simulate(assumed), assumed
        except (DynamicOutputShapeException, RuntimeError) as error:
            if not (isinstance(error, DynamicOutputShapeException) or "split_sizes" in str(error)):
                raise first or error from None
            first = first or error
    assert first is not None
    raise first


def experts_of(facts: Mapping[str, Any]) -> int:
    """How many experts a layer of the model with the config `facts` has that compute; 0 if none is stated."""
    text = facts.get("text_config") or facts
    tables = [text, text.get("ffn_config") or {}]
    return max([int(table[key]) for table in tables for key in EXPERT_COUNTS if isinstance(table.get(key), int)] or [0])


def everywhere(mask: torch.Tensor) -> list[torch.Tensor]:
    """Every place of a mask, by dimension, as if it were True throughout."""
    with unset_fake_temporarily():
        return list(torch.ones(tuple(mask.shape), dtype=torch.bool).nonzero(as_tuple=True))


def settled(func: Any, args: Any, kwargs: Any, experts: int) -> Any:
    """The result of an operation that chooses experts, or divides tokens among them; None of any other. `experts`: as
    `experts_of` returns it."""
    if func is CHOOSE and _chooses_experts(args[0], experts):
        values, places = func(*args, **kwargs)
        with unset_fake_temporarily():
            return values, _uneven(len(places), places.shape[1], args[0].shape[1], experts)
    if func is DIVIDE and isinstance(args[0], FakeTensor):
        dimension = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        whole, parts = args[0].shape[dimension], len(args[1])
        if sum(args[1]) != whole:
            sizes = [whole // parts + (number < whole % parts) for number in range(parts)]
            return func(args[0], sizes, dimension)
    return None


def _chooses_experts(scores: torch.Tensor, experts: int) -> bool:
    """Whether `scores` [tokens, experts] are those of a router, which may also know experts that compute nothing."""
    return isinstance(scores, FakeTensor) and scores.dim() == 2 and 0 < experts <= scores.shape[1]


def _uneven(tokens: int, choices: int, total: int, experts: int) -> torch.Tensor:
    """Numbers of experts [tokens, choices]: the last of those `experts` that compute, and each other one of `total` for
    one token."""
    first = experts - choices
    places = torch.arange(first, experts).repeat(tokens, 1)
    others = [*range(first), *range(experts, total)][: tokens * choices]
    for number, other in enumerate(others):
        places[number % tokens, number // tokens] = other
    return places
