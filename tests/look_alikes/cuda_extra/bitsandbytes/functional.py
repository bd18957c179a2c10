"""Quantises and dequantises blocks of 64 values, each as one operation, so that nothing in between counts as memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 64
CODES = torch.tensor(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
     0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
)  # fmt: skip
"""The 16 values of NF4 (Dettmers et al. 2023, appendix E)."""


@dataclass
class QuantState:
    """The data from which, together with the 4-bit values, the weights are computed again."""

    absmax: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype


def quantize_4bit(weight: torch.Tensor) -> tuple[torch.Tensor, QuantState]:
    """The 4-bit values, two in each byte of a uint8 tensor [N / 2, 1], and the state that `dequantize_4bit` needs. N,
    the number of weights, must be a multiple of 64."""
    blocks = weight.detach().float().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    nearest = (blocks / absmax[:, None])[..., None].sub(CODES).abs().argmin(-1).to(torch.uint8).flatten()
    packed = (nearest[::2] << 4 | nearest[1::2])[:, None]
    return packed, QuantState(absmax, weight.shape, weight.dtype)


@torch.library.custom_op("look_alike::dequantize_4bit", mutates_args=())
def _dequantize(packed: torch.Tensor, absmax: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    both = torch.stack([packed[:, 0] >> 4, packed[:, 0] & 15], 1).flatten().long()
    return (CODES[both].view(-1, BLOCK) * absmax[:, None]).reshape(shape).to(dtype)


def dequantize_4bit(packed: torch.Tensor, quant_state: QuantState) -> torch.Tensor:
    """The weight computed from the 4-bit values, in its original dtype and shape."""
    weight: torch.Tensor = _dequantize(packed, quant_state.absmax, list(quant_state.shape), quant_state.dtype)
    return weight
