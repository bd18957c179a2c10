"""What an operation of torch can do to storages, read off its schema once and remembered.

Pure facts about operators; counting is `engine.device.meter`.

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
"""Filled by `behaviour`, by `id` of each operator overload met: hashing an overload runs Python, and this is looked up
for every operation. `_known` keeps the overloads alive, so that an id stays theirs."""
_known: list[Any] = []

_SWAPPERS = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::_resize_output_"}
# A copy that looks like a view to its schema: torch.tensor() and from_numpy() announce their new storage through it.
_FRESH_DESPITE_SCHEMA = {"aten::lift_fresh", "aten::lift"}
ANNOUNCERS = {*_FRESH_DESPITE_SCHEMA, "aten::set_"}
"""Operations through which memory that is there already turns up."""


def behaviour(func: Any) -> str:
    """One of the constants above for an operator overload."""
    does = behaviours[id(func)] = _read(func)
    _known.append(func)
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
    """The tensors among `args` and `kwargs` that `func` says it writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            candidates = value if isinstance(value, (list, tuple)) else (value,)
            yield from (item for item in candidates if isinstance(item, torch.Tensor))
