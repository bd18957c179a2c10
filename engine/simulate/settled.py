"""What a simulation assumes where the sizes of tensors depend on values, which fake tensors lack: the most that they
can be.

A mask that selects along a dimension selects all of it. A router sends all tokens to the same experts, as many as a
token has, and a token to each of the others, so that every expert runs and the largest has every token. Where tokens
are only divided among experts, and the parts stand beside each other throughout, the parts are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, unset_fake_temporarily

from engine.budget.architecture.families import EXPERT_COUNTS

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
