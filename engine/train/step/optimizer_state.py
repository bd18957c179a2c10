"""Optimizer state: what it is made of, how it is allocated before the first step, and what of it is saved.

Allocated up front, what a run holds is known in the first minute; without advancing step counters, training is
bit-equal to lazy allocation. The optimizer chooses shapes and dtypes: torch's through `_init_group`, bitsandbytes'
through `init_state`. Remainders of bf16 weights with rounding = "exact" (`engine.train.step.piecewise_update`) are part
of it, for offload, copies, checkpoints and shards alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from engine.config.schema.recipe import Train

REMAINDER = "remainder"
"""Name of the remainder, int16, among a weight's optimizer state."""

CONSTANTS = ("qmap1", "qmap2")
"""State that never changes and that all parameters share: bitsandbytes' tables of 256 numbers."""


@dataclass(frozen=True)
class Rounding:
    """How weights that are trained in bf16 are updated (`engine.train.step.piecewise_update`)."""

    mode: Literal["exact", "stochastic", "nearest"]
    state_dtype: torch.dtype
    seed: int

    @classmethod
    def of(cls, train: Train) -> Rounding:
        return cls(train.rounding, getattr(torch, train.state_dtype), train.seed)

    def needs_scratch(self, parameter: Tensor) -> bool:
        """Whether a weight is updated in fp32 scratch; if not, the optimizer updates it directly."""
        return parameter.dtype == torch.bfloat16 and (self.mode, self.state_dtype) != ("nearest", torch.bfloat16)

    def keeps_remainder(self, parameter: Tensor) -> bool:
        """Whether the bits of the fp32 value that bf16 cannot hold are kept for this weight."""
        return parameter.dtype == torch.bfloat16 and self.mode == "exact"


def counts_in_ints(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are counted in Python integers (bitsandbytes); between steps they are tensors, like all state."""
    return hasattr(optimizer, "init_state")


def allocate_state(
    optimizer: torch.optim.Optimizer, rounding: Rounding, settle: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> None:
    """Allocate all state, one parameter at a time, at step 0. `settle` may move each tensor, such as to the host."""
    for group_number, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            if counts_in_ints(optimizer):
                cast(Any, optimizer).init_state(group, parameter, group_number, number)
                state = optimizer.state[parameter]
                state["step"] = torch.tensor(float(state["step"]))
            else:
                _allocate_one(optimizer, group, parameter, rounding)
            if rounding.keeps_remainder(parameter):
                optimizer.state[parameter][REMAINDER] = torch.zeros_like(parameter, dtype=torch.int16)
            state = optimizer.state.get(parameter, {})
            state.update({key: settle(tensor) for key, tensor in changing_state(state)})


def _allocate_one(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Parameter, rounding: Rounding
) -> None:
    """Call the optimizer's own `_init_group` with a zero gradient.

    If the state has another dtype than the parameter, the optimizer is shown a stand-in: one zero, expanded, which
    takes no memory. SGD's momentum buffer starts from zeros, with the result of its own first step.
    """
    dtype = rounding.state_dtype if rounding.needs_scratch(parameter) else parameter.dtype
    if isinstance(optimizer, torch.optim.SGD):
        if group["momentum"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
        return
    zero = torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape)
    stand_in = Parameter(zero, requires_grad=False)
    stand_in.grad = zero
    init_group: Callable[..., object] = cast(Any, optimizer)._init_group
    lists = len(inspect.signature(init_group).parameters) - 1
    try:
        init_group({**group, "params": [stand_in]}, *([] for _ in range(lists)))
    finally:
        optimizer.state[parameter] = optimizer.state.pop(stand_in, {})


def changing_state(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of one parameter's state that steps change, in a fixed order."""
    for key, value in sorted(state.items()):
        if isinstance(value, Tensor) and key not in CONSTANTS:
            yield key, value


def state_tensors(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, Parameter]]
) -> Iterator[tuple[str, Tensor]]:
    """(`parameter name::state name`, tensor) for all optimizer state that steps change, in a fixed order."""
    for name, parameter in named:
        for key, value in changing_state(optimizer.state.get(parameter, {})):
            yield f"{name}::{key}", value
