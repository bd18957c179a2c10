"""Bit arithmetic between fp32 and bf16: exact splitting into a bf16 weight and a remainder, and stochastic rounding.

A bf16 number is the upper half of an fp32 number, so an update smaller than 2^-9 of a weight is lost when the result is
rounded to bf16. Two remedies:

- Exact: `split_` keeps the lower 16 bits of the fp32 weight beside the bf16 weight; `join_` puts them together again,
  bit for bit. The bf16 weight is the fp32 weight rounded half up in magnitude, not half to even: then the lower half,
  read as a signed integer, is always the difference between the two.
- Stochastic: `round_stochastically_` rounds up with the probability of the fraction that is cut off, so the expected
  value is the fp32 number (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3). The random
  bits are a hash of (seed, step, tensor, element), so they are the same on any number of ranks and after a retry.

All functions work in place on memory that exists already: nothing here may fail in the middle of an update. Tensors are
flat, of N elements.

Try: `pytest tests/train/test_rounding.py`
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.dropout_masks import row_key

HALF = 0x8000
"""Half of a unit in the last place of bf16, in the bits of fp32."""
LOWER = 0xFFFF
"""The bits of fp32 that bf16 does not have."""
INDEX_LIMIT = 2**31
"""Elements are numbered in int32; tensors are cut at its multiples, which enter the key."""


def split_(bits: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Split fp32 numbers into bf16 weights and remainders: their bits are weight bits · 2^16 + remainder.

    Args:
        bits: int32 view of the fp32 numbers; overwritten.
        weight: bf16 result.
        remainder: int16 result.
    """
    remainder.copy_(bits)  # to a narrower integer: the lower half
    bits.add_(HALF).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(bits)


def join_(weight: Tensor, remainder: Tensor, bits: Tensor) -> None:
    """The inverse of `split_`: write the fp32 numbers of bf16 `weight` and int16 `remainder` into the int32 view
    `bits`."""
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16)
    bits.add_(remainder)


def noise_(bits: Tensor, spare: Tensor, *, seed: int, step: int, name: str, first: int) -> None:
    """Fill the int32 tensor `bits` with independent uniform integers from 0 to 2^16 - 1, each a hash of seed, step,
    name and element number.

    The hash is murmur3's 32-bit finaliser (Appleby 2011, public domain) of the element's number. Its key is 64 bits of
    a BLAKE2 hash of seed, step and `name`: half of them are added before the finaliser, half are combined with the
    result by XOR.

    Args:
        bits: int32[N], the result.
        spare: int32[N], working memory; overwritten.
        seed: the run's seed.
        step: the optimizer step, from 1.
        name: the name of the whole tensor.
        first: number, in the whole tensor, of the first element. No multiple of `INDEX_LIMIT` may lie between the
            first and the last element.
    """
    block, first = divmod(first, INDEX_LIMIT)
    before, after = row_key(seed, step, block, name)
    torch.arange(first, first + len(bits), out=bits)
    bits.mul_(-1640531527).add_(before)
    for shift, mask, factor in ((16, 0xFFFF, -2048144789), (13, 0x7FFFF, -1028477387), (16, 0xFFFF, 1)):
        # The mask makes the arithmetic shift a logical one.
        torch.bitwise_right_shift(bits, shift, out=spare)
        bits.bitwise_xor_(spare.bitwise_and_(mask)).mul_(factor)
    bits.bitwise_xor_(after).bitwise_and_(LOWER)


def round_stochastically_(bits: Tensor, noise: Tensor, result: Tensor) -> None:
    """Round fp32 numbers up or down to bf16 by chance, without bias. Numbers that bf16 can represent are unchanged.

    Args:
        bits: int32 view of the fp32 numbers; overwritten.
        noise: int32, uniform from 0 to 2^16 - 1.
        result: bf16.
    """
    bits.add_(noise).bitwise_right_shift_(16)
    result.view(torch.int16).copy_(bits)
