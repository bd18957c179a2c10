"""A frozen linear layer and its LoRA adapter as one operation, in the dtype of the layer's input.

peft computes in the adapter's dtype: fp32 adapters on a bf16 base make an fp32 copy of every input and add in fp32.
Here fp32 adapter weights are cast for each use, and the low-rank product is added in place (`addmm`), also in backward.
The weights, gradients and optimizer state stay fp32, as under autocast. DoRA, fused experts, and merged or disabled
adapters stay with peft's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def compute_in_input_dtype(model: nn.Module) -> None:
    """Replace the forward of every plain LoRA layer of `model`; other layers are left to peft."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and _is_plain(module):
            module.forward = MethodType(_forward, module)


def compute_with_peft(model: nn.Module) -> None:
    """Undo `compute_in_input_dtype`."""
    for module in model.modules():
        if is_ours(module):
            del module.__dict__["forward"]


def is_ours(module: nn.Module) -> bool:
    return isinstance(module, LoraLayer) and getattr(module.__dict__.get("forward"), "__func__", None) is _forward


def _is_plain(layer: LoraLayer) -> bool:
    """Whether a LoRA layer adds B(A(x)) to the output of a frozen linear layer and does nothing else."""
    base = layer.get_base_layer()
    linear = isinstance(base, (nn.Linear, Conv1D)) and base is layer.base_layer
    frozen = not any(parameter.requires_grad for parameter in base.parameters())
    return linear and frozen and not layer.lora_variant and not any(layer.lora_bias.values())


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """base(x) + B(A(dropout(x))) · scaling."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(active) != 1 or args or kwargs:
        return cast(Tensor, type(layer).forward(layer, x, *args, **kwargs))
    (name,) = active
    dropped = layer.lora_dropout[name](x)
    if torch.compiler.is_compiling():
        return _by_formula(layer, name, x, dropped)
    apply: Callable[..., Tensor] = _AdaptedLinear.apply
    weights = layer.lora_A[name].weight, layer.lora_B[name].weight
    return apply(x, None if dropped is x else dropped, *weights, layer.base_layer, layer.scaling[name])


def _by_formula(layer: Any, name: str, x: Tensor, dropped: Tensor) -> Tensor:
    """For torch.compile, which makes the backward pass itself and decides what to save for it."""
    a_RI, b_OR = layer.lora_A[name].weight.to(x.dtype), layer.lora_B[name].weight.to(x.dtype)
    output: Tensor = layer.base_layer(x) + dropped @ a_RI.t() @ b_OR.t() * layer.scaling[name]
    return output


class _AdaptedLinear(torch.autograd.Function):
    """base(x) + dropped · Aᵀ · Bᵀ · scaling, where `dropped` is x after dropout (None: without dropout).

    Shapes: x [..., inputs], A [rank, inputs], B [outputs, rank]; T: product of x's leading dimensions. Saves the
    adapter's input and its product with A for backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, a_RI: Tensor, b_OR: Tensor, base: nn.Module, scaling: float
    ) -> Tensor:
        inputs_TI = (x if dropped is None else dropped).reshape(-1, x.shape[-1])
        output = cast(Tensor, base(x)).contiguous()
        low_rank_TR = inputs_TI @ a_RI.to(x.dtype).t()
        output.view(-1, output.shape[-1]).addmm_(low_rank_TR, b_OR.to(x.dtype).t(), alpha=scaling)
        ctx.save_for_backward(inputs_TI, low_rank_TR, a_RI, b_OR)
        ctx.base, ctx.scaling, ctx.shape = base, scaling, x.shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs_TI, low_rank_TR, a_RI, b_OR = ctx.saved_tensors
        x_wanted, dropped_wanted = ctx.needs_input_grad[:2]
        scaling, dtype = ctx.scaling, inputs_TI.dtype
        grad_TO = gradients[0].reshape(-1, b_OR.shape[0])
        grad_b_OR = _weight_gradient(grad_TO, low_rank_TR, b_OR.dtype).mul_(scaling)
        grad_TR = grad_TO @ b_OR.to(dtype)
        grad_a_RI = _weight_gradient(grad_TR, inputs_TI, a_RI.dtype).mul_(scaling)
        grad_x_TI = grad_TO @ _weight_OI(ctx.base) if x_wanted else None
        if dropped_wanted:
            grad_dropped = (grad_TR @ a_RI.to(dtype)).mul_(scaling).view(ctx.shape)
        else:
            grad_dropped = None
            if grad_x_TI is not None:
                grad_x_TI.addmm_(grad_TR, a_RI.to(dtype), alpha=scaling)
        grad_x = None if grad_x_TI is None else grad_x_TI.view(ctx.shape)
        return grad_x, grad_dropped, grad_a_RI, grad_b_OR, None, None


def _weight_gradient(grad_TO: Tensor, inputs_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """grad_TO^T · inputs_TI: CUDA can return its fp32 sum unrounded; a CPU rounds to the inputs' dtype first."""
    if grad_TO.is_cuda and dtype == torch.float32 != grad_TO.dtype:
        return torch.mm(grad_TO.t(), inputs_TI, out_dtype=torch.float32)
    return torch.mm(grad_TO.t(), inputs_TI).to(dtype)


def _weight_OI(base: nn.Module) -> Tensor:
    weight: Tensor = dequantize_module_weight(base)
    return weight.t() if isinstance(base, Conv1D) else weight
