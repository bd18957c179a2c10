"""Liger's kernels under Triton's interpreter, which knows neither CUDA's functions nor scalars with a method. Not a
test module; it is imported in a process that interprets."""

from __future__ import annotations

import sys
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from engine.model.liger import LigerKernels, NormForm


class Scalar(float):
    """A number that a kernel may cast."""

    def to(self, _dtype: Any) -> Scalar:
        return self


@triton.jit
def _rsqrt(x):
    return 1.0 / tl.sqrt(x)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


def patch() -> None:
    """Give Liger's modules functions that the interpreter knows."""
    modules: dict[str, Any] = sys.modules
    modules["liger_kernel.ops.rms_norm"].rsqrt = _rsqrt
    modules["liger_kernel.ops.geglu"].tanh = _tanh
    modules["liger_kernel.ops.swiglu"].float = Scalar


class Interpreted(LigerKernels):
    """Passes numbers as scalars that can be cast."""

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, form: NormForm) -> tuple[Tensor, Tensor, Any]:
        return super().norm(x, weight_H, Scalar(eps), NormForm(Scalar(form.offset), form.casting))

    def norm_backward(
        self, grad: Tensor, x: Tensor, weight_H: Tensor, reciprocal_N: Tensor, launch: Any, trained: bool
    ) -> tuple[Tensor, Tensor | None]:
        return super().norm_backward(grad, x, weight_H, reciprocal_N, (Scalar(launch[0]), *launch[1:]), trained)
