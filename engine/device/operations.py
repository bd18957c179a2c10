"""Determines from the schema of a torch operator how the operator can allocate memory, and caches the result.

`engine.device.meter` counts the allocations.

Try: `python -c "import torch; from engine.device.operations import behaviour as b; print(b(torch.ops.aten.mm.out))"`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

NOTHING = "allocates nothing that outlives it"
ONE = "returns one tensor"
MANY = "returns several values"
RESIZES = "may resize or swap the storage of a tensor it writes to"
DECOMPOSE = "is made of other operations"

behaviours: dict[int, str] = {}
"""Cache of `behaviour`, read for every operation. Its keys are `id`s of operator overloads, as hashing an overload runs
Python code; `_kept_alive` holds the overloads, so that an id is not reused."""
_kept_alive: list[Any] = []

_SWAPPERS = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::_resize_output_"}
# By their schema they return views, but the storage is new: torch.tensor() and from_numpy() call them.
_FRESH_DESPITE_SCHEMA = {"aten::lift_fresh", "aten::lift"}
WRAPPERS_OF_EXISTING_MEMORY = {*_FRESH_DESPITE_SCHEMA, "aten::set_"}
"""Operations that return a tensor over memory which was allocated before, outside of torch's operations."""


def behaviour(func: Any) -> str:
    """Return how an operator overload allocates, and cache the answer: NOTHING, ONE (one new tensor), MANY (several
    values), RESIZES (may change the storage of a tensor it writes to), DECOMPOSE (made of other operations)."""
    does = behaviours[id(func)] = _read(func)
    _kept_alive.append(func)
    return does


def _read(func: Any) -> str:
    schema = func._schema
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU"):
        return DECOMPOSE
    native = func.namespace == "aten"
    writes = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    if schema.name in _SWAPPERS or any(argument.is_out for argument in writes) or (writes and not native):
        return RESIZES
    aliases = all(value.alias_info is not None for value in schema.returns)
    if native and aliases and schema.name not in _FRESH_DESPITE_SCHEMA:
        return NOTHING
    if len(schema.returns) == 1 and str(schema.returns[0].type) in ("Tensor", "Optional[Tensor]"):
        return ONE
    return MANY


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among `args` and `kwargs` that the schema of `func` marks as written to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            candidates = value if isinstance(value, (list, tuple)) else (value,)
            yield from (item for item in candidates if isinstance(item, torch.Tensor))
