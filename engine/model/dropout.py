"""LoRA dropout with masks that depend on a key, so that every retry, split and recomputation uses the same masks.

A hash of the integers (seed, step, sample, module, position, feature) decides whether an element is kept: the same on
every device, for any micro-batch and any padding on the right. `torch.nn.Dropout` uses a random generator, so its masks
change with the split. Nothing is saved for backward; the mask is computed again.

The hash is murmur3's 32-bit finaliser (Appleby 2011, public domain) of a position hash xor a feature hash. Each of the
two is keyed with 32 bits of a BLAKE2 hash of seed, step, sample and module.

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
"""Two signed 32-bit integers that determine the mask of one sample in one module at one step."""


@dataclass(frozen=True)
class DropoutKey:
    """The values, besides module, position and feature, that determine the dropout masks of one forward pass."""

    seed: int
    step: int
    sample_ids: tuple[int, ...]
    first_position: int = 0
    """Position in its sample of the first token of each row; above 0 only in slices of sequence parallelism."""


class KeyedDropout(nn.Module):
    """Dropout on [B, S, F] whose masks, one per sample, are determined by a `DropoutKey`. Identity in evaluation
    mode."""

    def __init__(self, probability: float, name: str) -> None:
        super().__init__()
        self.p = probability
        self.name = name
        self.key: DropoutKey | None = None

    def forward(self, input_BSF: Tensor) -> Tensor:
        """Return input_BSF with dropped elements set to 0 and the others scaled by 1/(1-p).

        Raises:
            RuntimeError: used in training outside `keyed`, or the first dimension is not the number of samples.
        """
        if not self.training:
            return input_BSF
        if self.key is None:
            raise RuntimeError(f"dropout of {self.name} ran outside engine.model.dropout.keyed")
        if input_BSF.dim() != 3 or input_BSF.shape[0] != len(self.key.sample_ids):
            raise RuntimeError(
                f"dropout of {self.name}: expected [{len(self.key.sample_ids)}, S, F], got {tuple(input_BSF.shape)}"
            )
        keys = [row_key(self.key.seed, self.key.step, sample, self.name) for sample in self.key.sample_ids]
        apply: Callable[..., Tensor] = _Drop.apply
        return apply(input_BSF, keys, self.key.first_position, self.p)


class _Drop(torch.autograd.Function):
    """Computes x · mask / (1 - p). Backward computes the mask again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, input_BSF: Tensor, keys: list[RowKey], first: int, probability: float) -> Tensor:
        ctx.drawn = keys, first, probability
        return _drop(input_BSF, *ctx.drawn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _drop(gradients[0], *ctx.drawn), None, None, None


def key_dropout(model: nn.Module) -> None:
    """Replace every active dropout of peft's adapters by a KeyedDropout named after its layer."""
    for name, module in model.named_modules():
        places = getattr(module, "lora_dropout", None)
        if not isinstance(places, nn.ModuleDict):
            continue
        for adapter, dropout in places.items():
            if isinstance(dropout, nn.Dropout) and dropout.p > 0:
                places[adapter] = KeyedDropout(dropout.p, name).train(dropout.training)


def keyed_dropouts(model: nn.Module) -> list[KeyedDropout]:
    """Return the KeyedDropout modules of a model. Reuse the list: searching a large model takes milliseconds."""
    return [module for module in model.modules() if isinstance(module, KeyedDropout)]


@contextmanager
def keyed(
    layers: Sequence[KeyedDropout], *, seed: int, step: int, sample_ids: Sequence[int], first_position: int = 0
) -> Iterator[None]:
    """Inside the block, `layers` use the dropout masks of the micro-batch with these samples. Run both forward and
    backward inside the block: with checkpointing, backward computes the layers again."""
    key = DropoutKey(seed, step, tuple(int(sample) for sample in sample_ids), first_position)
    for layer in layers:
        layer.key = key
    try:
        yield
    finally:
        for layer in layers:
            layer.key = None


def row_key(seed: int, step: int, sample: int, module: str) -> RowKey:
    """Compute a 64-bit hash of seed, step, sample and module name."""
    text = f"{seed}\x1f{step}\x1f{sample}\x1f{module}".encode()
    return struct.unpack("<ii", hashlib.blake2b(text, digest_size=8).digest())


def keep_mask(
    key: RowKey, length: int, features: int, probability: float, device: torch.device, first: int = 0
) -> Tensor:
    """Compute a boolean mask [S, F] for positions from `first` on: True with probability 1 - p, to within 2^-32."""
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
