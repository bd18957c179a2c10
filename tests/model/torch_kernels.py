"""What Liger's kernels of decoder layers compute, by torch: lets fused modules run without a GPU. Not a test module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.model.fused import FusedModules
from engine.model.liger import LigerKernels, NormForm
from engine.model.trained import decoder_of
from engine.train.run.training_setup import TrainingSetup


class TorchKernels(LigerKernels):
    """What the kernels of decoder layers compute, by torch; with `wrong`, norms are scaled by that."""

    def __init__(self, wrong: float = 1.0) -> None:
        self.wrong, self.norms = wrong, 0

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, form: NormForm) -> tuple[Tensor, Tensor, Any]:
        self.norms += 1
        reciprocal = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
        return self.wrong * x * reciprocal[..., None] * (form.offset + weight_H), reciprocal.flatten(), form.offset

    def norm_backward(
        self, grad: Tensor, x: Tensor, weight_H: Tensor, reciprocal_N: Tensor, launch: Any, trained: bool
    ) -> tuple[Tensor, Tensor | None]:
        scale = reciprocal_N.view(*x.shape[:-1], 1)
        weighted, normed = grad * (launch + weight_H), x * scale
        grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        return grad_x, (grad * normed).flatten(0, -2).sum(0) if trained else None

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return nn.functional.silu(gate) * up

    def gated_backward(self, gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor]:
        share = torch.sigmoid(gate)
        grad_gate = grad * up * share * (1 + gate * (1 - share))
        return grad_gate, grad * gate * share

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
        sin = -sin if back else sin

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)

        return turned(q), turned(k)


def with_fused_modules(setup: TrainingSetup) -> FusedModules:
    loaded = setup.context.loaded
    loaded.fused = FusedModules(decoder_of(loaded.base))
    assert loaded.fused.norms and loaded.fused.gates and loaded.fused.rotary
    return loaded.fused
