"""LoRA on fused experts, computed beside their base products: (x·Aᵀ)·Bᵀ for the tokens of each expert, in groups.

peft adds each expert's B·A to its weight, which makes a second tensor as large as all experts of a layer in every pass,
and its gradient in every backward pass. Here transformers' own forward of grouped experts runs as it is; only its
product with a weight that has an adapter also adds the low-rank product. Adapters stay peft's: they are saved, merged
and opened as before.

Shapes: S tokens copied once for each of their experts and sorted by expert, E experts, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations import moe

from engine.budget.trace.experts import RANK_STEP

GROUPED, PRODUCT = "grouped_mm", "_grouped_linear"
"""transformers' name of experts that are computed in groups, and of the function that multiplies one weight of all."""


class AdaptersInGroups:
    """The blocks of experts whose adapters are computed in groups, in place of peft's own forward."""

    def __init__(self, model: nn.Module) -> None:
        """Replace the forward of every adapter on fused experts of `model` whose experts transformers computes in
        groups; others are left to peft."""
        wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
        inside = {id(wrapper.base_layer) for wrapper in wrappers}
        self.blocks: list[Any] = [each for each in wrappers if id(each) not in inside and _fits(each)]
        self._replace()

    def __len__(self) -> int:
        return len(self.blocks)

    def _replace(self) -> None:
        for block in self.blocks:
            block.forward = MethodType(_forward, block)

    def remove(self) -> None:
        """Leave all adapters to peft from now on."""
        for block in self.blocks:
            del block.forward

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block, peft computes them."""
        self.remove()
        try:
            yield
        finally:
            self._replace()


def _chain(outer: Any) -> Iterator[Any]:
    """The adapters of one block of experts: peft nests them, one for each of its weights."""
    while isinstance(outer, ParamWrapper):
        yield outer
        outer = outer.base_layer


def _fits(outer: Any) -> bool:
    grouped = hasattr(moe, PRODUCT) and hasattr(outer.get_base_layer(), "_is_expert_parallel")
    return grouped and all(wrapper.num_experts > 1 for wrapper in _chain(outer))


def _forward(outer: Any, *args: Any, **kwargs: Any) -> Tensor:
    experts, adapters = outer.get_base_layer(), _active(outer)
    if adapters is None or experts.config._experts_implementation != GROUPED:
        return cast(Tensor, type(outer).forward(outer, *args, **kwargs))
    with _adding(adapters):
        output: Tensor = experts(*args, **kwargs)
    if adapters:  # transformers did not multiply by a weight in the way that is known here
        raise RuntimeError(f"{type(experts).__name__} leaves out the adapters of {len(adapters)} weights")
    return output


def _active(outer: Any) -> dict[int, tuple[Any, str]] | None:
    """The adapters to add, by the identity of their weight; None where peft has to say what is computed."""
    adapters = {}
    for wrapper in _chain(outer):
        active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        if wrapper.disable_adapters or wrapper.merged or len(active) != 1:
            return None
        adapters[id(wrapper.get_param())] = wrapper, active[0]
    return adapters


@contextmanager
def _adding(adapters: dict[int, tuple[Any, str]]) -> Iterator[None]:
    """Inside the block, a product with a weight of `adapters` takes its adapter from there and adds it."""
    plain: Callable[..., Tensor] = getattr(moe, PRODUCT)

    def product(x_SI: Tensor, weight: Tensor, offs: Tensor, **options: Any) -> Tensor:
        output_SO = plain(x_SI, weight, offs, **options)
        found = adapters.pop(id(weight), None)
        if found is None:
            return output_SO
        a_ERI, b_EOR, scaling = _factors(found, x_SI.dtype)
        low_rank_SR = plain(x_SI, a_ERI, offs) * scaling
        return output_SO.add_(plain(low_rank_SR, b_EOR, offs))

    setattr(moe, PRODUCT, product)
    try:
        yield
    finally:
        setattr(moe, PRODUCT, plain)


def _factors(adapter: tuple[Any, str], dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """A, B and scaling of an adapter, (layer, name). peft keeps A as [E · R, I] and B as [O, R · E]."""
    wrapper, name = adapter
    a, b = wrapper.lora_A[name].weight.to(dtype), wrapper.lora_B[name].weight.to(dtype)
    a_ERI = a.view(wrapper.num_experts, -1, a.shape[1])
    b_EOR = b.view(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    missing = -a_ERI.shape[1] % RANK_STEP
    if missing:
        a_ERI, b_EOR = functional.pad(a_ERI, (0, 0, 0, missing)), functional.pad(b_EOR, (0, missing))
    return a_ERI, b_EOR.contiguous(), wrapper.scaling[name]
