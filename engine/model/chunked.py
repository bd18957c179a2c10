"""The chunk loop of the loss: token losses and their gradients, a few tokens' logits at a time.

Shapes: N tokens that have a target, H hidden size, V vocabulary, C tokens of one chunk.

For a plain linear head the gradients are made in the forward pass, while the chunk's logits exist: nothing is computed
twice, and what stays for backward is [N, H] (and [V, H] where the head learns), never [N, V]. Any other head, such as
one with an adapter on it, goes through activation checkpointing chunk by chunk.

Try: `python -m pytest tests/model/test_loss.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.model.head import Head


@dataclass(frozen=True)
class Shape:
    """What a token's loss is made of beside its logits."""

    label_smoothing: float
    softcap: float | None
    chunk_tokens: int


def chunked_loss(head: Head, hidden_NH: Tensor, targets_N: Tensor, shape: Shape) -> Tensor:
    """Sum of token losses, fp32 scalar."""
    if head.scale != 1.0:
        hidden_NH = hidden_NH * head.scale
    if head.linear is not None:
        weight_VH: Tensor = head.linear.weight
        bias_V: Tensor | None = head.linear.bias
        if not torch.is_grad_enabled():  # which the function is not told: it would make the head's gradient
            weight_VH, bias_V = weight_VH.detach(), None if bias_V is None else bias_V.detach()
        apply: Callable[..., Tensor] = _LinearLoss.apply
        return apply(hidden_NH, weight_VH, bias_V, targets_N, shape)
    total = hidden_NH.new_zeros((), dtype=torch.float32)
    for hidden_CH, targets_C in _chunks(hidden_NH, targets_N, shape):
        total = total + checkpoint(_through_module, head, hidden_CH, targets_C, shape, use_reentrant=False)
    return total


def token_losses(logits_NV: Tensor, targets_N: Tensor, label_smoothing: float) -> Tensor:
    """The definition: -(1-ε)·log p(target) - ε·mean log p, per token, from fp32 logits (Szegedy et al. 2016, §7)."""
    return torch.nn.functional.cross_entropy(
        logits_NV, targets_N, reduction="none", label_smoothing=label_smoothing
    )


def _through_module(head: Head, hidden_CH: Tensor, targets_C: Tensor, shape: Shape) -> Tensor:
    """The scale is in hidden_CH already."""
    logits_CV = head.project(hidden_CH).float()
    if shape.softcap is not None:
        logits_CV = (logits_CV / shape.softcap).tanh() * shape.softcap
    return token_losses(logits_CV, targets_C, shape.label_smoothing).sum()


@dataclass
class _Gradients:
    """d(sum of losses) for what needs it, each accumulated in the dtype of what it is for."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None

    def add(self, start: int, grad_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor) -> None:
        """Add a chunk's share, from its gradient for the logits; the chunk begins at token `start`."""
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0)
        grad_CV = grad_CV.to(hidden_CH.dtype)
        if self.hidden_NH is not None:
            torch.mm(grad_CV, weight_VH, out=self.hidden_NH[start : start + len(grad_CV)])
        if self.weight_VH is not None and self.weight_VH.dtype == grad_CV.dtype:
            self.weight_VH.addmm_(grad_CV.t(), hidden_CH)
        elif self.weight_VH is not None:
            self.weight_VH += grad_CV.t() @ hidden_CH


class _LinearLoss(torch.autograd.Function):
    """Loss of a plain linear head, its gradients made in forward and only scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, shape: Shape
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        ctx.gradients = gradients = _Gradients(
            torch.empty_like(hidden_NH) if needs_hidden else None,
            torch.zeros_like(weight_VH) if needs_weight else None,
            torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias and bias_V is not None else None,
        )
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        total = hidden_NH.new_zeros((), dtype=torch.float32)
        start = 0
        # Under autocast the weight may be fp32 and the hidden states fp16: compute in the latter, accumulate in fp32.
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight_in = weight_VH.to(hidden_NH.dtype)
            bias_in = None if bias_V is None else bias_V.to(hidden_NH.dtype)
            for hidden_CH, targets_C in _chunks(hidden_NH, targets_N, shape):
                logits_CV = torch.nn.functional.linear(hidden_CH, weight_in, bias_in)
                loss, grad_CV = _loss_and_gradient(logits_CV, targets_C, shape, any(ctx.needs_input_grad[:3]))
                del logits_CV
                total += loss
                if grad_CV is not None:
                    gradients.add(start, grad_CV, hidden_CH, weight_in)
                # Or this chunk's logits would still be there when the next chunk's are made.
                del grad_CV
                start += len(targets_C)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the chunked loss frees its gradients in backward; run the forward pass again")
        for gradient in (gradients.hidden_NH, gradients.weight_VH, gradients.bias_V):
            if gradient is not None:
                gradient.mul_(upstream[0])
        grad_bias_V = None if gradients.bias_V is None else gradients.bias_V.to(ctx.bias_dtype)
        return gradients.hidden_NH, gradients.weight_VH, grad_bias_V, None, None


def _loss_and_gradient(
    logits_CV: Tensor, targets_C: Tensor, shape: Shape, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum of the chunk's losses and d(sum)/d(logits) in fp32. Works in place on one fp32 copy of the logits.

    With p the softmax, y one-hot and ε the smoothing: d = p - (1-ε)·y - ε/V; a soft-cap z = c·tanh(x/c) multiplies it
    by 1 - (z/c)².
    """
    smoothing = shape.label_smoothing
    work_CV = logits_CV.float()
    slope_CV = None
    if shape.softcap is not None:
        work_CV = (work_CV / shape.softcap).tanh_()
        slope_CV = 1.0 - work_CV.square() if wants_gradient else None
        work_CV *= shape.softcap
    work_CV -= work_CV.amax(-1, keepdim=True)
    target_C = work_CV.gather(1, targets_C[:, None]).squeeze(1)
    mean_C = work_CV.mean(-1) if smoothing else None
    work_CV.exp_()
    total_C = work_CV.sum(-1)
    loss_C = total_C.log() - (1.0 - smoothing) * target_C
    if mean_C is not None:
        loss_C -= smoothing * mean_C
    if not wants_gradient:
        return loss_C.sum(), None
    work_CV /= total_C[:, None]
    if smoothing:
        work_CV -= smoothing / work_CV.shape[1]
    minus_C1 = torch.full_like(target_C, smoothing - 1.0)[:, None]
    work_CV.scatter_add_(1, targets_C[:, None], minus_C1)
    if slope_CV is not None:
        work_CV *= slope_CV
    return loss_C.sum(), work_CV


def _chunks(hidden_NH: Tensor, targets_N: Tensor, shape: Shape) -> list[tuple[Tensor, Tensor]]:
    return list(zip(hidden_NH.split(shape.chunk_tokens), targets_N.split(shape.chunk_tokens), strict=True))
