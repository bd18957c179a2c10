"""The chunked loss: token losses and their gradients, computed for a few tokens' logits at a time.

Shapes: N target tokens, H hidden size, V vocabulary, C tokens of one chunk.

For a plain linear head, gradients are computed in the forward pass while the chunk's logits exist. So nothing is
computed twice, and only gradients of shape [N, H] (and [V, H] if the head is trained) are stored for backward, never
[N, V]. For any other head, such as a head with an adapter, activation checkpointing recomputes each chunk.

Try: `python -m pytest tests/model/test_loss.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.model.head import OutputHead


@dataclass(frozen=True)
class LossSettings:
    """Label smoothing and logit soft-cap of the loss, and the number of tokens in a chunk."""

    label_smoothing: float
    softcap: float | None
    chunk_tokens: int


def chunked_loss(head: OutputHead, hidden_NH: Tensor, targets_N: Tensor, settings: LossSettings) -> Tensor:
    """Compute the sum of token losses, an fp32 scalar, chunk by chunk."""
    if head.scale != 1.0:
        hidden_NH = hidden_NH * head.scale
    if head.linear is not None:
        weight_VH: Tensor = head.linear.weight
        bias_V: Tensor | None = head.linear.bias
        if not torch.is_grad_enabled():  # else _LinearLoss would compute the head's gradient needlessly
            weight_VH, bias_V = weight_VH.detach(), None if bias_V is None else bias_V.detach()
        apply: Callable[..., Tensor] = _LinearLoss.apply
        return apply(hidden_NH, weight_VH, bias_V, targets_N, settings)
    total = hidden_NH.new_zeros((), dtype=torch.float32)
    for hidden_CH, targets_C in _chunks(hidden_NH, targets_N, settings):
        total = total + checkpoint(_through_module, head, hidden_CH, targets_C, settings, use_reentrant=False)
    return total


def token_losses(logits_NV: Tensor, targets_N: Tensor, label_smoothing: float) -> Tensor:
    """Compute the loss of each token, -(1-ε)·log p(target) - ε·mean log p with ε the label smoothing, from fp32 logits
    (Szegedy et al. 2016, §7)."""
    return torch.nn.functional.cross_entropy(
        logits_NV, targets_N, reduction="none", label_smoothing=label_smoothing
    )


def _through_module(head: OutputHead, hidden_CH: Tensor, targets_C: Tensor, settings: LossSettings) -> Tensor:
    """Compute the sum of one chunk's token losses by calling the head module; hidden_CH is already scaled."""
    logits_CV = head.project(hidden_CH).float()
    if settings.softcap is not None:
        logits_CV = (logits_CV / settings.softcap).tanh() * settings.softcap
    return token_losses(logits_CV, targets_C, settings.label_smoothing).sum()


@dataclass
class _Gradients:
    """The gradients of the summed loss with respect to hidden states, weight and bias of the head, collected over
    chunks; None for a tensor that requires no gradient. The bias gradient accumulates in fp32."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None

    def add(self, start: int, grad_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor) -> None:
        """Add the part of one chunk to the gradients. The chunk begins at token `start`; `grad_CV` is the gradient of
        its logits, `hidden_CH` are its hidden states, and `weight_VH` is the head's weight."""
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
    """The loss of a plain linear head. Forward also computes the gradients; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, settings: LossSettings
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
        # Under autocast weights may be fp32 and hidden states fp16: compute in fp16, accumulate in fp32.
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight_in = weight_VH.to(hidden_NH.dtype)
            bias_in = None if bias_V is None else bias_V.to(hidden_NH.dtype)
            for hidden_CH, targets_C in _chunks(hidden_NH, targets_N, settings):
                logits_CV = torch.nn.functional.linear(hidden_CH, weight_in, bias_in)
                loss, grad_CV = _loss_and_gradient(logits_CV, targets_C, settings, any(ctx.needs_input_grad[:3]))
                del logits_CV
                total += loss
                if grad_CV is not None:
                    gradients.add(start, grad_CV, hidden_CH, weight_in)
                # Free this chunk's logits before the next chunk's are computed.
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
    logits_CV: Tensor, targets_C: Tensor, settings: LossSettings, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the chunk's losses and its gradient d(sum)/d(logits) [C, V] in fp32, computed in place on one
    copy of the logits. The gradient is None unless `wants_gradient`.

    With p the softmax, y one-hot and ε the smoothing: d = p - (1-ε)·y - ε/V; a soft-cap z = c·tanh(x/c) multiplies it
    by 1 - (z/c)².
    """
    smoothing = settings.label_smoothing
    work_CV = logits_CV.float()
    slope_CV = None
    if settings.softcap is not None:
        work_CV = (work_CV / settings.softcap).tanh_()
        slope_CV = 1.0 - work_CV.square() if wants_gradient else None
        work_CV *= settings.softcap
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


def _chunks(hidden_NH: Tensor, targets_N: Tensor, settings: LossSettings) -> list[tuple[Tensor, Tensor]]:
    return list(zip(hidden_NH.split(settings.chunk_tokens), targets_N.split(settings.chunk_tokens), strict=True))
