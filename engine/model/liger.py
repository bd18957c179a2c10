"""Liger's kernels that the engine launches: RMS norms, gated feed-forward blocks, rotary embedding, and the losses of a
chunk of logits; and an outline of them for simulated runs, which allocates the same and computes nothing.

Shapes: B rows, S positions, H hidden size, D head size, N tokens (B · S), C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.budget.trace.operations import MULTIPROCESSORS
from engine.data.tokens import IGNORED


class NormForm(NamedTuple):
    """How a class computes an RMS norm in half precision."""

    offset: float
    """What is added to the weight."""
    casting: str
    """Liger's word for it. "llama": the normalised values are rounded before they are multiplied by the weight.
    "gemma": everything is computed in fp32 and rounded once."""


class Kernels(Protocol):
    """What computes the fused operations: Liger's kernels, or in a simulated run what allocates the same tensors."""

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, form: NormForm) -> tuple[Tensor, Tensor, Any]:
        """Return the output, the fp32 reciprocal of each token's root mean square [N], and what `norm_backward` needs
        besides."""
        ...

    def norm_backward(
        self, grad: Tensor, x: Tensor, weight_H: Tensor, reciprocal_N: Tensor, launch: Any, trained: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the input and, if it is `trained`, of the weight."""
        ...

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """Return act(gate) · up; `activation`: "silu" or "gelu"."""
        ...

    def gated_backward(self, gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor]:
        """Return the gradients of `gate` and `up`, written over them."""
        ...

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
        """Return q [B, heads, S, D] and k rotated, or with `back` rotated back: written over them, if [B, S, heads, D]
        is their order in memory."""
        ...

    def token_losses(
        self, logits_CV: Tensor, targets_C: Tensor, smoothing: float, softcap: float | None, wants_gradient: bool
    ) -> Tensor:
        """Return the fp32 losses of C tokens, and if `wants_gradient`, overwrite the logits with the gradient of their
        sum."""
        ...


class LigerKernels:
    """The kernels of the package liger-kernel."""

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, form: NormForm) -> tuple[Tensor, Tensor, Any]:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        output, _, reciprocal_N, *launch = rms_norm_forward(x, weight_H, eps, form.offset, form.casting, None)
        return output, reciprocal_N, (form.offset, *launch)

    def norm_backward(
        self, grad: Tensor, x: Tensor, weight_H: Tensor, reciprocal_N: Tensor, launch: Any, trained: bool
    ) -> tuple[Tensor, Tensor | None]:
        from liger_kernel.ops.rms_norm import rms_norm_backward

        offset, block, warps, casting = launch
        tokens_NH = x.view(-1, x.shape[-1])
        # Not in place: the gradient may be that of a residual connection, too.
        found: tuple[Tensor, Tensor | None] = rms_norm_backward(
            grad, tokens_NH, weight_H, reciprocal_N, offset, casting, block, warps, False, None, trained
        )
        return found

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        from liger_kernel.ops import geglu, swiglu

        forward = swiglu.swiglu_forward if activation == "silu" else geglu.geglu_forward
        output: Tensor = forward(gate, up)[2]
        return output

    def gated_backward(self, gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops import geglu, swiglu

        backward = swiglu.swiglu_backward if activation == "silu" else geglu.geglu_backward
        found: tuple[Tensor, Tensor] = backward(gate, up, grad)
        return found

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.rope import rope_backward, rope_forward

        turned: tuple[Tensor, ...] = (rope_backward if back else rope_forward)(q, k, cos, sin)
        return turned[0], turned[1]

    def token_losses(
        self, logits_CV: Tensor, targets_C: Tensor, smoothing: float, softcap: float | None, wants_gradient: bool
    ) -> Tensor:
        """Of liger-kernel 0.8, ops/cross_entropy.py. Liger's own function around the kernel would count the targets on
        the GPU and wait for the number; all are counted here."""
        from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

        tokens, vocabulary = logits_CV.shape
        losses_C = torch.empty(tokens, dtype=torch.float32, device=logits_CV.device)
        liger_cross_entropy_kernel[(tokens,)](
            X_ptr=logits_CV,
            X_stride=logits_CV.stride(0),
            Y_ptr=targets_C,
            Y_stride=targets_C.stride(0),
            weight_ptr=None,
            loss_ptr=losses_C,
            z_loss_ptr=None,
            loss_stride=1,
            token_accuracy_ptr=None,
            token_accuracy_stride=0,
            predicted_tokens_ptr=None,
            predicted_tokens_stride=0,
            n_cols=vocabulary,
            n_non_ignore=tokens,
            sum_non_ignore_weight=tokens,
            weight_sum=0.0,
            ignore_index=IGNORED,
            lse_square_scale=0.0,
            label_smoothing=smoothing,
            reduction="sum",
            softcap=softcap,
            RETURN_Z_LOSS=False,
            RETURN_TOKEN_ACCURACY=False,
            RETURN_PREDICTED_TOKENS=False,
            BLOCK_SIZE=min(MAX_FUSED_SIZE, 1 << (vocabulary - 1).bit_length()),
            HAS_WEIGHT=False,
            HAS_SOFTCAPPING=softcap is not None,
            HAS_GRADIENTS=wants_gradient,
            num_warps=32,
        )
        return losses_C


class OutlineKernels:
    """Allocates what Liger's kernels allocate and computes nothing, for simulated runs."""

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, form: NormForm) -> tuple[Tensor, Tensor, Any]:
        return torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32), None

    def norm_backward(
        self, grad: Tensor, x: Tensor, weight_H: Tensor, reciprocal_N: Tensor, launch: Any, trained: bool
    ) -> tuple[Tensor, Tensor | None]:
        grad_x = torch.empty_like(grad)
        if not trained:
            return grad_x, None
        return grad_x, weight_H.new_empty((MULTIPROCESSORS, len(weight_H)), dtype=torch.float32).sum(0).to(grad.dtype)

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return torch.empty_like(gate)

    def gated_backward(self, gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor]:
        return gate.view(gate.shape), up.view(up.shape)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
        q, k = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k))
        return q, k

    def token_losses(
        self, logits_CV: Tensor, targets_C: Tensor, smoothing: float, softcap: float | None, wants_gradient: bool
    ) -> Tensor:
        return logits_CV.new_empty(len(logits_CV), dtype=torch.float32)


_in_use: list[Kernels] = [LigerKernels()]
"""The last of them computes the fused operations."""


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Inside the block, `kernels` compute the fused operations."""
    _in_use.append(kernels)
    try:
        yield
    finally:
        _in_use.pop()


def in_use() -> Kernels:
    """What computes the fused operations now."""
    return _in_use[-1]
