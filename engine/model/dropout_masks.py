"""The masks of keyed dropout, computed with torch: the reference, on every device.

A hash of the integers (seed, step, sample, module, position, feature) decides whether an element is kept: the same on
every device, for any micro-batch and any padding on the right. It is murmur3's 32-bit finaliser (Appleby 2011, public
domain) of a position hash xor a feature hash. Each of the two is keyed with 32 bits of a BLAKE2 hash of seed, step,
sample and module.

Try: `python -m pytest tests/model/test_dropout.py`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

RowKey = tuple[int, int]
"""Two signed 32-bit integers that determine the mask of one sample in one module at one step."""


def row_key(seed: int, step: int, sample: int, module: str) -> RowKey:
    """Compute the key of one row's masks: a 64-bit hash of the seed, the optimizer step, the sample's id and the
    module's name, as two 32-bit integers."""
    text = f"{seed}\x1f{step}\x1f{sample}\x1f{module}".encode()
    return struct.unpack("<ii", hashlib.blake2b(text, digest_size=8).digest())


def keep_mask(
    key: RowKey, length: int, features: int, probability: float, device: torch.device, first: int = 0
) -> Tensor:
    """Compute a boolean mask [S, F] for the S = `length` positions from `first` on and F = `features` features. An
    element is True (kept) with probability 1 - `probability`, to within 2^-32."""
    positions_S = torch.arange(first, first + length, dtype=torch.int32, device=device)
    positions_S = _mix(positions_S.mul_(-1640531527).add_(key[0]))
    features_F = _mix(torch.arange(features, dtype=torch.int32, device=device).mul_(-1640531527).add_(key[1]))
    hash_SF = _mix(positions_S[:, None] ^ features_F[None, :])
    threshold = round(probability * 2**32) - 2**31
    return hash_SF >= threshold


def reference_drop(tensor_BSF: Tensor, keys: Sequence[RowKey], first: int, probability: float) -> Tensor:
    """Return tensor_BSF [B, S, F] with dropped elements set to 0 and the others scaled by 1/(1-p). `keys`: one for each
    row; `first`: position of each row's first token; p is `probability`."""
    result_BSF = torch.empty_like(tensor_BSF)
    return drop_into(result_BSF, tensor_BSF, keys, first, probability)


def drop_into(result_BSF: Tensor, tensor_BSF: Tensor, keys: Sequence[RowKey], first: int, probability: float) -> Tensor:
    """Write into result_BSF what `reference_drop` returns for the other arguments, and return it. Allocates the mask of
    a row while that of the row before it exists."""
    length, features = tensor_BSF.shape[1:]
    for row, key in enumerate(keys):
        mask_SF = keep_mask(key, length, features, probability, tensor_BSF.device, first)
        torch.mul(tensor_BSF[row], mask_SF, out=result_BSF[row])
    return result_BSF.mul_(1.0 / (1.0 - probability))


def _mix(bits: Tensor) -> Tensor:
    """Apply murmur3's finaliser to int32 values, in place. Products wrap around, and the constants 0xFFFF and 0x7FFFF
    turn arithmetic shifts into logical shifts."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= -2048144789
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= -1028477387
    bits ^= (bits >> 16) & 0xFFFF
    return bits
