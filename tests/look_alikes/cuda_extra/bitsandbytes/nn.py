"""A linear layer with a 4-bit weight."""

from __future__ import annotations

from typing import Any

import torch

from .functional import QuantState, dequantize_4bit, quantize_4bit


class Params4bit(torch.nn.Parameter):
    """A weight that is quantised when it is first moved to a device."""

    bnb_quantized: bool
    module: Any

    def __new__(cls, data: Any = None, requires_grad: bool = False, **options: Any) -> Params4bit:
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        defaults = {
            "quant_state": None, "blocksize": 64, "compress_statistics": True, "quant_type": "nf4",
            "quant_storage": torch.uint8, "module": None, "bnb_quantized": False,
        }  # fmt: skip
        self.__dict__.update({**defaults, **options})
        return self

    def to(self, *target: Any, **_: Any) -> Any:
        if self.bnb_quantized or str(target[0]) == "meta":
            return self
        packed, state = quantize_4bit(self.data)
        options = {**self.__dict__, "bnb_quantized": True, "quant_state": state}
        made = Params4bit(packed, **options)
        if self.module is not None:
            self.module.quant_state = state
        return made


class MatMul4Bit(torch.autograd.Function):
    """x · Wᵀ; the weight is dequantised again in backward, where only the input has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, state: QuantState, bias: Any) -> torch.Tensor:
        ctx.packed, ctx.state = packed, state
        return torch.nn.functional.linear(x, dequantize_4bit(packed, state).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return upstream[0] @ dequantize_4bit(ctx.packed, ctx.state).to(upstream[0].dtype), None, None, None


class Linear4bit(torch.nn.Linear):
    """The layer that replaces nn.Linear."""

    def __init__(
        self, input_features: int, output_features: int, bias: bool = True, compute_dtype: Any = None, **options: Any
    ) -> None:
        device = options.pop("device", None)
        super().__init__(input_features, output_features, bias, device)
        self.weight = Params4bit(self.weight.data, requires_grad=False, module=self, **options)
        self.compute_dtype, self.quant_state = compute_dtype, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        weight: Any = self.weight
        multiply: Any = MatMul4Bit.apply
        out: torch.Tensor = multiply(x.to(self.compute_dtype), weight.data, weight.quant_state, bias)
        return out.to(x.dtype)
