"""Liger's cross-entropy kernel, computed with torch's operations, with the arguments that the kernel takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MAX_FUSED_SIZE = 32768


class Kernel:
    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self.launch

    def launch(
        self, *, X_ptr: torch.Tensor, Y_ptr: torch.Tensor, loss_ptr: torch.Tensor, reduction: str, n_cols: int,
        label_smoothing: float, softcap: float | None, HAS_GRADIENTS: bool, **others: Any,
    ) -> None:  # fmt: skip
        """Write the loss of each row of logits `X_ptr` [C, V] into `loss_ptr` [C], and the gradient over the logits."""
        assert reduction == "sum" and n_cols == X_ptr.shape[1]
        with torch.enable_grad():
            logits = X_ptr.detach().float().requires_grad_()
            capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            losses = torch.nn.functional.cross_entropy(capped, Y_ptr, reduction="none", label_smoothing=label_smoothing)
            (gradient,) = torch.autograd.grad(losses.sum(), logits)
        loss_ptr.copy_(losses.detach())
        if HAS_GRADIENTS:
            X_ptr.copy_(gradient)


liger_cross_entropy_kernel = Kernel()
