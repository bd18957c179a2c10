"""LoRA dropout whose masks are keyed, so that every retry, split and recomputation draws the same ones.

An element is kept or dropped by a hash of (seed, step, sample, module, position, feature), integers only: the same on
every device, for any micro-batch and any right padding. `torch.nn.Dropout` draws from a generator instead, and its
masks change with the split. Nothing is saved for backward: the mask is computed again.

The hash is murmur3's 32-bit finaliser (Appleby 2011, public domain) over a position hash xor a feature hash, each keyed
with 32 of 64 bits that BLAKE2 makes from the rest.

Try: `python -m pytest tests/model/test_dropout.py`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

RowKey = tuple[int, int]
"""Two signed 32-bit integers: the keys of one sample in one module at one step."""


@dataclass(frozen=True)
class Draw:
    """What a forward pass is keyed with."""

    seed: int
    step: int
    sample_ids: tuple[int, ...]
    first_position: int = 0
    """Where in the samples the rows begin."""


class KeyedDropout(nn.Module):
    """Dropout on [..., S, F] with one row of samples per key. Identity in evaluation mode."""

    def __init__(self, probability: float, name: str) -> None:
        super().__init__()
        self.p = probability
        self.name = name
        self.draw: Draw | None = None

    def forward(self, input_BSF: Tensor) -> Tensor:
        """input_BSF with dropped elements at 0 and the rest scaled by 1/(1-p).

        Raises:
            RuntimeError: training without `keyed`, or a first dimension that is not the samples'.
        """
        if not self.training:
            return input_BSF
        if self.draw is None:
            raise RuntimeError(f"dropout of {self.name} ran outside engine.model.dropout.keyed")
        if input_BSF.dim() != 3 or input_BSF.shape[0] != len(self.draw.sample_ids):
            raise RuntimeError(
                f"dropout of {self.name}: expected [{len(self.draw.sample_ids)}, S, F], got {tuple(input_BSF.shape)}"
            )
        keys = [row_key(self.draw.seed, self.draw.step, sample, self.name) for sample in self.draw.sample_ids]
        apply: Callable[..., Tensor] = _Drop.apply
        return apply(input_BSF, keys, self.draw.first_position, self.p)


class _Drop(torch.autograd.Function):
    """x · mask / (1 - p), its mask computed again in backward."""

    @staticmethod
    def forward(ctx: Any, input_BSF: Tensor, keys: list[RowKey], first: int, probability: float) -> Tensor:
        ctx.drawn = keys, first, probability
        return _drop(input_BSF, *ctx.drawn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _drop(gradients[0], *ctx.drawn), None, None, None


def key_dropout(model: nn.Module) -> None:
    """Replace every active dropout of peft's adapters by the keyed one, named after its layer."""
    for name, module in model.named_modules():
        places = getattr(module, "lora_dropout", None)
        if not isinstance(places, nn.ModuleDict):
            continue
        for adapter, dropout in places.items():
            if isinstance(dropout, nn.Dropout) and dropout.p > 0:
                places[adapter] = KeyedDropout(dropout.p, name).train(dropout.training)


def keyed_dropouts(model: nn.Module) -> list[KeyedDropout]:
    """Those of `key_dropout`. To be kept: looking through a large model takes milliseconds."""
    return [module for module in model.modules() if isinstance(module, KeyedDropout)]


@contextmanager
def keyed(
    layers: Sequence[KeyedDropout], *, seed: int, step: int, sample_ids: Sequence[int], first_position: int = 0
) -> Iterator[None]:
    """Hold the draw of one micro-batch around its forward and backward (recomputation runs in the latter)."""
    draw = Draw(seed, step, tuple(int(sample) for sample in sample_ids), first_position)
    for layer in layers:
        layer.draw = draw
    try:
        yield
    finally:
        for layer in layers:
            layer.draw = None


def row_key(seed: int, step: int, sample: int, module: str) -> RowKey:
    """64 bits from everything but position and feature."""
    text = f"{seed}\x1f{step}\x1f{sample}\x1f{module}".encode()
    return struct.unpack("<ii", hashlib.blake2b(text, digest_size=8).digest())


def kept(
    key: RowKey, length: int, features: int, probability: float, device: torch.device, first: int = 0
) -> Tensor:
    """Boolean mask [S, F] of positions from `first` on: True with probability 1 - p, up to 2^-32."""
    positions_S = torch.arange(first, first + length, dtype=torch.int32, device=device)
    positions_S = _mix(positions_S.mul_(-1640531527).add_(key[0]))
    features_F = _mix(torch.arange(features, dtype=torch.int32, device=device).mul_(-1640531527).add_(key[1]))
    hash_SF = _mix(positions_S[:, None] ^ features_F[None, :])
    threshold = round(probability * 2**32) - 2**31
    return hash_SF >= threshold


def _drop(tensor_BSF: Tensor, keys: list[RowKey], first: int, probability: float) -> Tensor:
    length, features = tensor_BSF.shape[1:]
    result_BSF = torch.empty_like(tensor_BSF)
    for row, key in enumerate(keys):
        mask_SF = kept(key, length, features, probability, tensor_BSF.device, first)
        torch.mul(tensor_BSF[row], mask_SF, out=result_BSF[row])
    return result_BSF.mul_(1.0 / (1.0 - probability))


def _mix(bits: Tensor) -> Tensor:
    """murmur3's finaliser on int32, in place. Products wrap; shifts are made logical by masking the sign's copies."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= -2048144789
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= -1028477387
    bits ^= (bits >> 16) & 0xFFFF
    return bits
