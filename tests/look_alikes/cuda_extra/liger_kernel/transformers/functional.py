"""Liger's fused linear cross-entropy, computed with torch's operations."""

from __future__ import annotations

from typing import Any

import torch


def liger_fused_linear_cross_entropy(
    input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Any = None, label_smoothing: float = 0.0,
    softcap: float | None = None, reduction: str = "mean", accum_dtype: Any = None,
) -> torch.Tensor:  # fmt: skip
    """The cross-entropy loss of a linear head, with the interface of liger-kernel's function of this name. Shapes:
    `input` [N, H], `weight` [V, H], `target` [N]."""
    logits = torch.nn.functional.linear(input, weight, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.nn.functional.cross_entropy(logits, target, reduction=reduction, label_smoothing=label_smoothing)
