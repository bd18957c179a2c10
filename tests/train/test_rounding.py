"""Splitting fp32 weights into bf16 weights and remainders loses no bit, and stochastic rounding has the right mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.train.step.piecewise_update import INDEX_LIMIT, join_, noise_, round_stochastically_, split_


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    weight, remainder = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    split_(bits.clone(), weight, remainder)
    return weight, remainder


def noise(count: int, **key: Any) -> Tensor:
    bits = torch.empty(count, dtype=torch.int32)
    noise_(bits, torch.empty_like(bits), **{"seed": 1, "step": 1, "name": "w", "first": 0, **key})
    return bits


def test_a_weight_and_its_remainder_are_the_fp32_weight_bit_for_bit() -> None:
    torch.manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31 - 1, (500_000,), dtype=torch.int64).to(torch.int32)
    around_zero = torch.arange(-(2**17), 2**17, dtype=torch.int32)
    ties = (torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16) + 0x8000
    bits = torch.cat([drawn, around_zero, ties])
    weight, remainder = halves(bits)
    back = torch.empty_like(bits)
    join_(weight, remainder, back)
    assert torch.equal(back, bits)


def test_the_weight_is_the_nearest_bf16_number() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    weight, _ = halves(values.view(torch.int32))
    nearest = values.bfloat16()
    assert torch.equal((weight.float() - values).abs(), (nearest.float() - values).abs())  # ties may go the other way


def test_stochastic_rounding_is_right_on_average_and_leaves_bf16_numbers_alone() -> None:
    between = 1.0 + 2.0**-10  # an eighth of the way to the next bf16 number
    values = torch.full((200_000,), between)
    rounded = torch.empty(len(values), dtype=torch.bfloat16)
    round_stochastically_(values.view(torch.int32), noise(len(values)), rounded)
    assert rounded.unique().tolist() == [1.0, 1.0 + 2.0**-7]
    share = float((rounded > 1.0).float().mean())
    assert abs(share - 0.125) < 5 * (0.125 * 0.875 / len(values)) ** 0.5
    exact = torch.randn(10_000).bfloat16()
    round_stochastically_(exact.float().view(torch.int32), noise(len(exact)), rounded[: len(exact)])
    assert torch.equal(rounded[: len(exact)], exact)


def test_noise_is_uniform_and_belongs_to_its_element_whatever_part_of_the_tensor_is_asked_for() -> None:
    whole = noise(400_000)
    assert int(whole.min()) >= 0 and int(whole.max()) < 2**16
    counts = torch.bincount(whole >> 8, minlength=256).double()
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 255 + 5 * 510**0.5  # chi-squared
    assert torch.equal(noise(1000, first=12_345), whole[12_345:13_345])
    for other in ({"seed": 2}, {"step": 2}, {"name": "v"}, {"first": INDEX_LIMIT}):
        share = float((noise(400_000, **other) == whole).float().mean())
        assert share < 1e-4, other  # 2^-16 by chance
