"""A frozen linear layer and its LoRA adapter as one operation, in the dtype of the layer's input.

peft computes in the adapter's dtype: fp32 adapters on a bf16 base make an fp32 copy of every input and add in fp32.
Here fp32 adapter weights are cast for each use, and the low-rank product is added in place (`addmm`), also in backward.
The weights, gradients and optimizer state stay fp32, as under autocast. DoRA, fused experts, and merged or disabled
adapters stay with peft's own forward.

Layers that read the same input, such as q, k and v, share one product with all their A's. Each still computes its base
product and adds its own B when the model calls it. Backward sums the input's gradient in one tensor instead of one for
each layer, and computes the gradients of all A's with one product. Which layers may share an input is read from their
names; whether they do is seen at each call: a layer that gets another tensor, or has dropout, is computed alone.

Shapes: T tokens, I inputs, O outputs, R rank of one adapter, G sum of the ranks of layers that share an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.budget.trace.weights import SIBLINGS

SHARED = "_shared_input"
"""Attribute of a LoRA layer that holds its `SharedInput`."""


def compute_in_input_dtype(model: nn.Module) -> None:
    """Replace the forward of every plain LoRA layer of `model`; other layers are left to peft."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and _is_plain(module):
            module.forward = MethodType(_forward, module)
    for module in model.modules():
        for number, layers in enumerate(_siblings(module)):
            shared = SharedInput(layers)
            for layer in layers:
                setattr(layer, SHARED, shared)
            _call_after(module, shared.close, -1 - number)


def _call_after(module: nn.Module, hook: Callable[..., None], number: int) -> None:
    """Call `hook` after each forward pass of `module`, whatever ends it. torch counts hooks on through the whole model,
    and torch.compile makes a graph for each number that it meets; here all decoder layers have the same numbers."""
    handle = module.register_forward_hook(hook, always_call=True)
    tables: list[Any] = [module._forward_hooks, module._forward_hooks_always_called]
    for table in tables:
        table[number] = table.pop(handle.id)


def _siblings(parent: nn.Module) -> Iterator[list[Any]]:
    """The LoRA layers of one module that read the same input, as far as names tell."""
    for names in SIBLINGS:
        children = (parent._modules.get(name) for name in names)
        layers: list[Any] = [child for child in children if child is not None and is_ours(child)]
        if len(layers) > 1 and len({layer.in_features for layer in layers}) == 1:
            yield layers


def compute_with_peft(model: nn.Module) -> None:
    """Undo `compute_in_input_dtype`."""
    for module in model.modules():
        if is_ours(module):
            del module.__dict__["forward"]


def is_ours(module: nn.Module) -> bool:
    return isinstance(module, LoraLayer) and getattr(module.__dict__.get("forward"), "__func__", None) is _forward


def shares_input(layer: nn.Module) -> bool:
    """Whether a layer that is ours computes its adapter's first product together with other layers'."""
    return isinstance(getattr(layer, SHARED, None), SharedInput)


def _is_plain(layer: LoraLayer) -> bool:
    """Whether a LoRA layer adds B(A(x)) to the output of a frozen linear layer and does nothing else."""
    base = layer.get_base_layer()
    linear = isinstance(base, (nn.Linear, Conv1D)) and base is layer.base_layer
    frozen = not any(parameter.requires_grad for parameter in base.parameters())
    matrices = isinstance(layer.lora_A, nn.ModuleDict)  # AdaLoRA's are parameters, with singular values between them
    return linear and frozen and matrices and not layer.lora_variant and not any(layer.lora_bias.values())


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """base(x) + B(A(dropout(x))) · scaling."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(active) != 1 or args or kwargs:
        return cast(Tensor, type(layer).forward(layer, x, *args, **kwargs))
    (name,) = active
    dropped = layer.lora_dropout[name](x)
    if torch.compiler.is_compiling():
        return _by_formula(layer, name, x, dropped)
    shared: SharedInput | None = getattr(layer, SHARED, None)
    if shared is not None and dropped is x and (output := shared.forward(layer, name, x)) is not None:
        return output
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
        grad_b_OR = weight_gradient(grad_TO, low_rank_TR, b_OR.dtype).mul_(scaling)
        grad_TR = grad_TO @ b_OR.to(dtype)
        grad_a_RI = weight_gradient(grad_TR, inputs_TI, a_RI.dtype).mul_(scaling)
        grad_x_TI = grad_TO @ _weight_OI(ctx.base) if x_wanted else None
        if dropped_wanted:
            grad_dropped = (grad_TR @ a_RI.to(dtype)).mul_(scaling).view(ctx.shape)
        else:
            grad_dropped = None
            if grad_x_TI is not None:
                grad_x_TI.addmm_(grad_TR, a_RI.to(dtype), alpha=scaling)
        grad_x = None if grad_x_TI is None else grad_x_TI.view(ctx.shape)
        return grad_x, grad_dropped, grad_a_RI, grad_b_OR, None, None


class SharedInput:
    """The layers of one module that read the same input, and the pass of those that are still to be called."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self._pass: _Pass | None = None

    def forward(self, layer: Any, name: str, x: Tensor) -> Tensor | None:
        """The output of `layer` with its adapter `name`; None if it is to be computed alone."""
        if layer is self.layers[0]:
            self._pass = self._begin(name, x)
        shared = self._pass
        if shared is None or shared.x is not x or layer not in shared.columns:
            return None
        first = shared.columns.pop(layer)
        if not shared.columns:
            self._pass = None
        apply: Callable[..., Tensor] = _SharingLinear.apply
        b_OR, scaling = layer.lora_B[name].weight, layer.scaling[name]
        return apply(shared.alias, shared.low_rank_TG, b_OR, layer.base_layer, scaling, first, shared.gradients)

    def _begin(self, name: str, x: Tensor) -> _Pass | None:
        if not all(_shares(layer, name) for layer in self.layers):
            return None
        weights = [layer.lora_A[name].weight for layer in self.layers]
        columns = dict(zip(self.layers, accumulate(map(len, weights), initial=0), strict=False))
        gradients = _PassGradients()
        apply: Callable[..., Any] = _ProductWithAll.apply
        made = apply(x, gradients, *weights)
        alias, low_rank_TG = made if isinstance(made, tuple) else (x, made)
        return _Pass(x, alias, low_rank_TG, columns, gradients)

    def close(self, *_: object) -> None:
        """Forget the input: a layer that was not called would keep it allocated."""
        self._pass = None


class _PassGradients:
    """The gradients of a pass's input and low-rank product, to which the layers add in backward."""

    x_TI: Tensor | None = None
    low_rank_TG: Tensor | None = None


class _Pass(NamedTuple):
    x: Tensor
    alias: Tensor
    """A view of x, through which the layers' gradients reach it; x itself if it needs none."""
    low_rank_TG: Tensor
    columns: dict[Any, int]
    """The layers still to be called, and where each one's columns in `low_rank_TG` begin."""
    gradients: _PassGradients


def _shares(layer: Any, name: str) -> bool:
    """Whether the one active adapter of a layer is `name`, without dropout."""
    active = [each for each in layer.active_adapters if each in layer.lora_A]
    if layer.disable_adapters or layer.merged or active != [name]:
        return False
    dropout = layer.lora_dropout[name]
    return isinstance(dropout, nn.Identity) or not dropout.training


class _ProductWithAll(torch.autograd.Function):
    """x · A_1ᵀ | x · A_2ᵀ | …, after a view of x for the layers if x needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: _PassGradients, *weights_RI: Tensor) -> Any:
        x_TI = x.reshape(-1, x.shape[-1])
        low_rank_TG = x_TI @ _joined(weights_RI, x.dtype).t()
        ctx.save_for_backward(x_TI, *weights_RI)
        ctx.gradients, ctx.shape = gradients, x.shape
        return (x.view_as(x), low_rank_TG) if ctx.needs_input_grad[0] else low_rank_TG

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gradients.x_TI = ctx.gradients.low_rank_TG = None
        x_TI, *weights_RI = ctx.saved_tensors
        grad_TG = gradients[-1]
        grads_a_GI = weight_gradient(grad_TG, x_TI, weights_RI[0].dtype)
        grads_a_RI = grads_a_GI.split([len(weight) for weight in weights_RI])
        if not ctx.needs_input_grad[0]:
            return None, None, *grads_a_RI
        grad_x = gradients[0]
        grad_x.view(x_TI.shape).addmm_(grad_TG, _joined(weights_RI, x_TI.dtype))
        return grad_x, None, *grads_a_RI


class _SharingLinear(torch.autograd.Function):
    """base(x) + low_rank · Bᵀ · scaling, where low_rank is R columns of low_rank_TG from `first` on.

    The layer of a pass whose backward runs first returns the gradients of x and low_rank_TG; the others add to them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        low_rank_TG: Tensor,
        b_OR: Tensor,
        base: nn.Module,
        scaling: float,
        first: int,
        gradients: _PassGradients,
    ) -> Tensor:
        output = cast(Tensor, base(x)).contiguous()
        own = slice(first, first + b_OR.shape[1])
        output.view(-1, output.shape[-1]).addmm_(low_rank_TG[:, own], b_OR.to(x.dtype).t(), alpha=scaling)
        ctx.save_for_backward(low_rank_TG, b_OR)
        ctx.base, ctx.scaling, ctx.own, ctx.gradients, ctx.shape = base, scaling, own, gradients, x.shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        low_rank_TG, b_OR = ctx.saved_tensors
        sums, own = ctx.gradients, ctx.own
        grad_TO = gradients[0].reshape(-1, b_OR.shape[0])
        grad_b_OR = weight_gradient(grad_TO, low_rank_TG[:, own], b_OR.dtype).mul_(ctx.scaling)
        begun_TG = begun_x = None
        if sums.low_rank_TG is None:
            begun_TG = sums.low_rank_TG = torch.zeros_like(low_rank_TG)
        sums.low_rank_TG[:, own].addmm_(grad_TO, b_OR.to(low_rank_TG.dtype), alpha=ctx.scaling)
        if ctx.needs_input_grad[0]:
            if sums.x_TI is None:
                sums.x_TI = grad_TO @ _weight_OI(ctx.base)
                begun_x = sums.x_TI.view(ctx.shape)
            else:
                sums.x_TI.addmm_(grad_TO, _weight_OI(ctx.base))
        return begun_x, begun_TG, grad_b_OR, None, None, None, None


def _joined(weights_RI: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[G, I] in `dtype`."""
    joined_GI = weights_RI[0].new_empty((sum(map(len, weights_RI)), weights_RI[0].shape[1]), dtype=dtype)
    for part_RI, weight_RI in zip(joined_GI.split([*map(len, weights_RI)]), weights_RI, strict=True):
        part_RI.copy_(weight_RI)
    return joined_GI


def weight_gradient(grad_TO: Tensor, inputs_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """grad_TO^T · inputs_TI: CUDA can return its fp32 sum unrounded; a CPU rounds to the inputs' dtype first."""
    if grad_TO.is_cuda and dtype == torch.float32 != grad_TO.dtype:
        return torch.mm(grad_TO.t(), inputs_TI, out_dtype=torch.float32)
    return torch.mm(grad_TO.t(), inputs_TI).to(dtype)


def _weight_OI(base: nn.Module) -> Tensor:
    weight: Tensor = dequantize_module_weight(base)
    return weight.t() if isinstance(base, Conv1D) else weight
