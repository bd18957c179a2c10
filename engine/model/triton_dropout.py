"""The Triton kernel of keyed dropout; importing this file needs Triton. Letters: R rows, S positions, F features.

Triton evaluates the annotations of its functions and knows no type but its own, so arguments have none here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.dropout_key import RowKey

BLOCK = 1024
"""Elements that a program computes."""


@triton.jit
def _mix(bits):
    """murmur3's finaliser on uint32, equal to that of `engine.model.dropout_kernel` on int32."""
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    bits ^= bits >> 16
    return bits


@triton.jit
def _kernel(rows_ptr, result_ptr, keys_ptr, length, features, first, threshold, scale, block: tl.constexpr):
    """Write one block of one row: 0 where dropped, else the value times `scale`. `keys_ptr` has two int32 per row;
    `length` and `features` are S and F; an element is kept if its signed hash is at least `threshold`."""
    blocks = tl.cdiv(length * features, block)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    place = (tl.program_id(0) % blocks) * block + tl.arange(0, block)
    inside = place < length * features
    position = (place // features + first).to(tl.uint32, bitcast=True)
    feature = (place % features).to(tl.uint32, bitcast=True)
    position_key = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
    feature_key = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
    hashed = _mix(_mix(position * 0x9E3779B9 + position_key) ^ _mix(feature * 0x9E3779B9 + feature_key))
    kept = (hashed.to(tl.int32, bitcast=True) >= threshold).to(tl.float32)
    offset = row * length * features + place
    value = tl.load(rows_ptr + offset, mask=inside, other=0.0)
    result = value.to(tl.float32) * kept * scale
    tl.store(result_ptr + offset, result.to(value.dtype, fp_downcast_rounding="rtne"), mask=inside)


def drop(rows_RSF: Tensor, keys: Sequence[RowKey], first: int, probability: float) -> Tensor:
    """As `engine.model.dropout_kernel.reference_drop`."""
    rows_RSF = rows_RSF.contiguous()
    result_RSF = torch.empty_like(rows_RSF)
    rows, length, features = rows_RSF.shape
    keys_R2 = torch.tensor(keys, dtype=torch.int32)
    if rows_RSF.is_cuda:
        # Pinned, so that the host does not wait for the copy.
        keys_R2 = keys_R2.pin_memory().to(rows_RSF.device, non_blocking=True)
    programs = rows * triton.cdiv(length * features, BLOCK)
    threshold = round(probability * 2**32) - 2**31
    _kernel[(programs,)](
        rows_RSF, result_RSF, keys_R2, length, features, first, threshold, 1.0 / (1.0 - probability), block=BLOCK
    )
    return result_RSF
