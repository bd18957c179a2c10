"""The chunked loss: token losses and gradients for a few tokens' logits at a time, by torch or by Liger's kernel.

Shapes: N target tokens, H hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils.import_utils import is_liger_kernel_available

from engine.device.base import Device
from engine.model.head import OutputHead
from engine.model.liger import in_use
from engine.model.token_rows import HeadRows, add_gradients, put_logits


def liger_applies(head: OutputHead, device: Device) -> bool:
    """Whether Liger is installed, the device is a GPU, and the head is a plain linear layer."""
    return device.kind == "cuda" and head.linear is not None and bool(is_liger_kernel_available())


@dataclass(frozen=True)
class LossSettings:
    label_smoothing: float
    softcap: float | None
    chunk_tokens: int
    liger: bool = False
    """Liger's kernel computes a chunk's losses and gradient, in the dtype of the logits and in their memory."""


def chunked_loss(
    head: OutputHead, hidden_NH: Tensor, targets_N: Tensor, settings: LossSettings, weights_N: Tensor | None = None
) -> Tensor:
    """Sum of token losses, each times its weight (fp32; None: 1), an fp32 scalar, chunk by chunk."""
    if head.scale != 1.0:
        hidden_NH = hidden_NH * head.scale
    if head.linear is not None:
        weight_VH: Tensor = head.linear.weight
        bias_V: Tensor | None = head.linear.bias
        if not torch.is_grad_enabled():  # else _LinearLoss would compute the head's gradient needlessly
            weight_VH, bias_V = weight_VH.detach(), None if bias_V is None else bias_V.detach()
        apply: Callable[..., Tensor] = _LinearLoss.apply
        rows = head.rows
        rows_KH, ids_K = (None, None) if rows is None else (rows.rows_KH, rows.ids_K)
        return apply(hidden_NH, weight_VH, bias_V, targets_N, settings, weights_N, rows_KH, ids_K)
    total = hidden_NH.new_zeros((), dtype=torch.float32)
    for hidden_CH, targets_C, weights_C in _chunks(hidden_NH, targets_N, settings, weights_N):
        arguments = (head, hidden_CH, targets_C, settings, weights_C)
        total = total + checkpoint(_through_module, *arguments, use_reentrant=False)
    return total


def chunked_token_losses(head: OutputHead, hidden_NH: Tensor, targets_N: Tensor, settings: LossSettings) -> Tensor:
    """The loss of each token, fp32 [N], chunk by chunk and without gradients."""
    losses = []
    with torch.no_grad():
        if head.scale != 1.0:
            hidden_NH = hidden_NH * head.scale
        for hidden_CH, targets_C, _ in _chunks(hidden_NH, targets_N, settings):
            losses.append(_losses_and_gradient(head.project(hidden_CH), targets_C, settings, False)[0])
    return torch.cat(losses)


def token_losses(logits_NV: Tensor, targets_N: Tensor, label_smoothing: float) -> Tensor:
    """-(1-ε)·log p(target) - ε·mean log p per token, ε the label smoothing (Szegedy et al. 2016, §7); fp32 logits."""
    return torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none", label_smoothing=label_smoothing)


def _through_module(
    head: OutputHead, hidden_CH: Tensor, targets_C: Tensor, settings: LossSettings, weights_C: Tensor | None
) -> Tensor:
    """The sum for one chunk by calling the head module; hidden_CH is already scaled."""
    logits_CV = head.project(hidden_CH).float()
    if settings.softcap is not None:
        logits_CV = (logits_CV / settings.softcap).tanh() * settings.softcap
    return weighted_sum(token_losses(logits_CV, targets_C, settings.label_smoothing), weights_C)


def weighted_sum(losses_N: Tensor, weights_N: Tensor | None) -> Tensor:
    return losses_N.sum() if weights_N is None else (losses_N * weights_N).sum()


@dataclass
class _Gradients:
    """Gradients of the summed loss by hidden states, weight and bias of the head; None where none is required. The bias
    accumulates in fp32."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None
    rows_KH: Tensor | None = None
    """Of trained rows of a frozen head, in fp32."""

    def add(self, start: int, grad_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor, rows: HeadRows | None) -> None:
        """Add one chunk's part; the chunk begins at token `start`."""
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0, dtype=torch.float32)
        grad_CV = grad_CV.to(hidden_CH.dtype)
        if self.hidden_NH is not None:
            torch.mm(grad_CV, weight_VH, out=self.hidden_NH[start : start + len(grad_CV)])
        if self.weight_VH is not None and self.weight_VH.dtype == grad_CV.dtype:
            self.weight_VH.addmm_(grad_CV.t(), hidden_CH)
        elif self.weight_VH is not None:
            self.weight_VH += grad_CV.t() @ hidden_CH
        if rows is not None:
            part_CH = None if self.hidden_NH is None else self.hidden_NH[start : start + len(grad_CV)]
            add_gradients(part_CH, self.rows_KH, grad_CV, hidden_CH, weight_VH, rows)


class _LinearLoss(torch.autograd.Function):
    """The loss of a plain linear head. Forward also computes the gradients; backward only scales them. So [N, H] and,
    if the head is trained, [V, H] are kept for backward, never [N, V]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        settings: LossSettings,
        weights_N: Tensor | None,
        rows_KH: Tensor | None,
        ids_K: Tensor | None,
    ) -> Tensor:
        rows = None if rows_KH is None or ids_K is None else HeadRows(ids_K, rows_KH)
        needs_rows = ctx.needs_input_grad[6]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        ctx.gradients = gradients = _Gradients(
            torch.empty_like(hidden_NH) if needs_hidden else None,
            torch.zeros_like(weight_VH) if needs_weight else None,
            torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias and bias_V is not None else None,
            torch.zeros_like(rows_KH, dtype=torch.float32) if needs_rows and rows_KH is not None else None,
        )
        ctx.rows_dtype = None if rows_KH is None else rows_KH.dtype
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        total = hidden_NH.new_zeros((), dtype=torch.float32)
        start = 0
        # Under autocast weights may be fp32 and hidden states fp16: compute in fp16, accumulate in fp32.
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight_in = weight_VH.to(hidden_NH.dtype)
            bias_in = None if bias_V is None else bias_V.to(hidden_NH.dtype)
            for hidden_CH, targets_C, weights_C in _chunks(hidden_NH, targets_N, settings, weights_N):
                logits_CV = torch.nn.functional.linear(hidden_CH, weight_in, bias_in)
                if rows is not None:
                    put_logits(logits_CV, hidden_CH, rows, bias_in)
                losses_C, grad_CV = _losses_and_gradient(logits_CV, targets_C, settings, any(ctx.needs_input_grad))
                del logits_CV
                total += weighted_sum(losses_C, weights_C)
                del losses_C
                if grad_CV is not None:
                    if weights_C is not None:
                        grad_CV *= weights_C[:, None]
                    gradients.add(start, grad_CV, hidden_CH, weight_in, rows)
                # Free this chunk's logits before the next chunk's are computed.
                del grad_CV
                start += len(targets_C)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the chunked loss frees its gradients in backward; run the forward pass again")
        for gradient in (gradients.hidden_NH, gradients.weight_VH, gradients.bias_V, gradients.rows_KH):
            if gradient is not None:
                gradient.mul_(upstream[0])
        grad_bias_V = None if gradients.bias_V is None else gradients.bias_V.to(ctx.bias_dtype)
        grad_rows_KH = None if gradients.rows_KH is None else gradients.rows_KH.to(ctx.rows_dtype)
        return gradients.hidden_NH, gradients.weight_VH, grad_bias_V, None, None, None, grad_rows_KH, None


def _losses_and_gradient(
    logits_CV: Tensor, targets_C: Tensor, settings: LossSettings, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The chunk's token losses and d(their sum)/d(logits) [C, V] (None unless wanted): by Liger's kernel in the place
    of the logits, else in fp32, in place on one copy of them.

    With p the softmax, y one-hot and ε the smoothing: d = p - (1-ε)·y - ε/V; a soft-cap z = c·tanh(x/c) multiplies it
    by 1 - (z/c)².
    """
    smoothing = settings.label_smoothing
    if settings.liger:
        losses_C = in_use().token_losses(logits_CV, targets_C, smoothing, settings.softcap, wants_gradient)
        return losses_C, logits_CV if wants_gradient else None
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
        return loss_C, None
    work_CV /= total_C[:, None]
    if smoothing:
        work_CV -= smoothing / work_CV.shape[1]
    minus_C1 = torch.full_like(target_C, smoothing - 1.0)[:, None]
    work_CV.scatter_add_(1, targets_C[:, None], minus_C1)
    if slope_CV is not None:
        work_CV *= slope_CV
    return loss_C, work_CV


def _chunks(
    hidden_NH: Tensor, targets_N: Tensor, settings: LossSettings, weights_N: Tensor | None = None
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    size = settings.chunk_tokens
    hidden, targets = hidden_NH.split(size), targets_N.split(size)
    weights = [None] * len(hidden) if weights_N is None else weights_N.split(size)
    return list(zip(hidden, targets, weights, strict=True))


def torch_loss(
    head: OutputHead, hidden_NH: Tensor, targets_N: Tensor, chunk_tokens: int, weights_N: Tensor | None = None
) -> Tensor:
    """torch's chunked linear_cross_entropy. Per-token losses are summed here in fp32: torch's own sum has the input's
    dtype and would lose all precision in bf16."""
    scaled_NH = hidden_NH * head.scale if head.scale != 1.0 else hidden_NH
    assert head.linear is not None
    bias_V: Tensor | None = head.linear.bias
    losses_N = torch.nn.functional.linear_cross_entropy(
        scaled_NH,
        head.linear.weight.to(scaled_NH.dtype),
        targets_N,
        linear_bias=None if bias_V is None else bias_V.to(scaled_NH.dtype),
        reduction="none",
        options=torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=min(chunk_tokens, len(targets_N)), chunking_method=None, acc_policy="accurate"
        ),
    )
    return weighted_sum(losses_N.float(), weights_N)


def torch_obstacle(head: OutputHead, label_smoothing: float) -> str | None:
    """Why `torch_loss` cannot compute this head's loss; None if it can."""
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        return "torch's linear_cross_entropy needs torch 2.13, this is " + torch.__version__
    if head.linear is None:
        return "the head has an adapter or is quantised, which fused kernels do not support"
    if head.rows is not None:
        return "the head has rows of added tokens, which torch's kernel cannot train"
    if head.softcap is not None:
        return "this model caps its logits, which torch's kernel does not support"
    if label_smoothing:
        return "with train.label_smoothing, torch's kernel keeps all logits in memory"
    return None
