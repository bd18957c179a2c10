"""The chunked loss: token losses and gradients for a few tokens' logits at a time, by torch or by Liger's fused kernel.

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
from engine.device.oom import classify, is_sticky
from engine.model.decoder import OutputHead

FusedLoss = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""Sum of token losses from hidden states [N, H], head [V, H], targets [N], bias [V] or None, and label smoothing."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""By dtype, the largest difference of loss and gradient from torch's in the trial, relative to torch's."""

TRIAL_NHV = (24, 16, 40)
"""Sizes of the trial: two chunks of 16 tokens (chunk: N · H / V, rounded up to a power of two)."""


def liger_loss(head: OutputHead, hidden_NH: Tensor, targets_N: Tensor, label_smoothing: float) -> Tensor:
    """Sum of token losses; per-token losses are summed in fp32."""
    assert head.linear is not None
    scaled_NH = hidden_NH * head.scale if head.scale != 1.0 else hidden_NH
    return _fused(scaled_NH, head.linear.weight, targets_N, head.linear.bias, label_smoothing)


def liger_applies(head: OutputHead, device: Device) -> bool:
    """Whether Liger is installed, the device is a GPU, and the head is frozen, plain and linear, without a soft-cap.
    For a trained head Liger would hold 10 bytes per weight at its peak (sum and chunk's gradient in fp32; liger-kernel
    0.8, ops/fused_linear_cross_entropy.py), `_LinearLoss` one gradient in the weight's dtype."""
    return (
        device.kind == "cuda"
        and head.linear is not None
        and not any(parameter.requires_grad for parameter in head.linear.parameters())
        and head.softcap is None
        and bool(is_liger_kernel_available())
    )


def liger_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Liger's loss and gradient of random numbers cannot be had or differ from torch's; None if they agree. Triton
    compiles at the first launch, which takes a C compiler and a driver that fits: without this trial, a failure would
    end the run in its first micro-batch."""
    try:
        found = _trial(_fused, device, dtype)
    except Exception as error:  # of any kind: Triton compiles the kernel with what the machine has
        if classify(error) or is_sticky(error):
            raise
        return f"it fails on this machine: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    expected = _trial(_reference, device, dtype)
    for name, ours, theirs in zip(("loss", "gradient"), found, expected, strict=True):
        error_size, size = float((ours - theirs).norm()), float(theirs.norm())
        if not error_size <= TOLERANCE[dtype] * size:
            return f"its {name} is off by {error_size:.3g} of {size:.3g}"
    return None


def _trial(compute: FusedLoss, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(mean token loss, its gradient by the hidden states [N, H]) for random numbers, in fp32 on the host."""
    tokens, width, vocabulary = TRIAL_NHV
    draw = torch.Generator().manual_seed(0)  # its own, so that the run's random states stay as they are
    hidden_NH = torch.randn(tokens, width, generator=draw).to(device, dtype).requires_grad_()
    weight_VH = torch.randn(vocabulary, width, generator=draw).to(device, dtype)
    targets_N = torch.randint(vocabulary, (tokens,), generator=draw).to(device)
    with torch.enable_grad():
        loss = compute(hidden_NH, weight_VH, targets_N, None, 0.0) / tokens
        loss.backward()
    assert hidden_NH.grad is not None
    return loss.detach().float().cpu(), hidden_NH.grad.float().cpu()


def _reference(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, _bias: Tensor | None, smoothing: float
) -> Tensor:
    logits_NV = hidden_NH.float() @ weight_VH.float().T
    return torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="sum", label_smoothing=smoothing)


def _fused(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, bias_V: Tensor | None, label_smoothing: float
) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(
        hidden_NH, weight_VH, targets_N, bias=bias_V, label_smoothing=label_smoothing, reduction="sum"
    )
    return loss.float()


@dataclass(frozen=True)
class LossSettings:
    label_smoothing: float
    softcap: float | None
    chunk_tokens: int


def chunked_loss(head: OutputHead, hidden_NH: Tensor, targets_N: Tensor, settings: LossSettings) -> Tensor:
    """Sum of token losses, an fp32 scalar, chunk by chunk."""
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
    """-(1-ε)·log p(target) - ε·mean log p per token, ε the label smoothing (Szegedy et al. 2016, §7); fp32 logits."""
    return torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none", label_smoothing=label_smoothing)


def _through_module(head: OutputHead, hidden_CH: Tensor, targets_C: Tensor, settings: LossSettings) -> Tensor:
    """The sum for one chunk by calling the head module; hidden_CH is already scaled."""
    logits_CV = head.project(hidden_CH).float()
    if settings.softcap is not None:
        logits_CV = (logits_CV / settings.softcap).tanh() * settings.softcap
    return token_losses(logits_CV, targets_C, settings.label_smoothing).sum()


@dataclass
class _Gradients:
    """Gradients of the summed loss by hidden states, weight and bias of the head; None where none is required. The bias
    accumulates in fp32."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None

    def add(self, start: int, grad_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor) -> None:
        """Add one chunk's part; the chunk begins at token `start`."""
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
    """The loss of a plain linear head. Forward also computes the gradients; backward only scales them. So [N, H] and,
    if the head is trained, [V, H] are kept for backward, never [N, V]."""

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
    """The chunk's summed loss and d(sum)/d(logits) [C, V] in fp32 (None unless wanted), in place on one copy of the
    logits.

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
