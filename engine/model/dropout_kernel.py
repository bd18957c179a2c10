"""What computes keyed dropout: the reference in torch (eleven small kernels), or one Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.model.dropout_key import RowKey


def keep_mask(
    key: RowKey, length: int, features: int, probability: float, device: torch.device, first: int = 0
) -> Tensor:
    """Boolean [S, F] for `length` positions from `first` on; True (kept) with probability 1 - p, to within 2^-32.
    murmur3's 32-bit finaliser (Appleby 2011, public domain) of a position hash xor a feature hash, in integers: equal
    on every device, for any micro-batch and any padding on the right."""
    positions_S = torch.arange(first, first + length, dtype=torch.int32, device=device)
    positions_S = _mix(positions_S.mul_(-1640531527).add_(key[0]))
    features_F = _mix(torch.arange(features, dtype=torch.int32, device=device).mul_(-1640531527).add_(key[1]))
    hash_SF = _mix(positions_S[:, None] ^ features_F[None, :])
    threshold = round(probability * 2**32) - 2**31
    return hash_SF >= threshold


def reference_drop(tensor_BSF: Tensor, keys: Sequence[RowKey], first: int, probability: float) -> Tensor:
    """tensor_BSF [B, S, F] with dropped elements set to 0 and the others scaled by 1/(1-p); `first`: position of each
    row's first token."""
    result_BSF = torch.empty_like(tensor_BSF)
    return drop_into(result_BSF, tensor_BSF, keys, first, probability)


def drop_into(result_BSF: Tensor, tensor_BSF: Tensor, keys: Sequence[RowKey], first: int, probability: float) -> Tensor:
    """Write what `reference_drop` returns into result_BSF. Two rows' masks exist at once."""
    length, features = tensor_BSF.shape[1:]
    for row, key in enumerate(keys):
        mask_SF = keep_mask(key, length, features, probability, tensor_BSF.device, first)
        torch.mul(tensor_BSF[row], mask_SF, out=result_BSF[row])
    return result_BSF.mul_(1.0 / (1.0 - probability))


def _mix(bits: Tensor) -> Tensor:
    """murmur3's finaliser on int32, in place; 0xFFFF and 0x7FFFF make the arithmetic shifts logical."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= -2048144789
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= -1028477387
    bits ^= (bits >> 16) & 0xFFFF
    return bits


Drop = Callable[[Tensor, Sequence[RowKey], int, float], Tensor]
"""(rows [R, S, F], a key per row, position of each row's first token, probability) → rows after dropout."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPARED_SHAPES = ((3, 37, 50), (2, 5, 1031))
"""Shapes [R, S, F] compared: rows are no multiples of the kernel's block; the second shape's are longer."""

_in_use: dict[str, Drop] = {}
"""The kernel that is used instead of the reference, by device type."""


def drop(rows_RSF: Tensor, keys: Sequence[RowKey], first: int, probability: float) -> Tensor:
    """rows_RSF [R, S, F] after dropout, by the kernel in use on this type of device, else by `reference_drop`."""
    return _in_use.get(rows_RSF.device.type, reference_drop)(rows_RSF, keys, first, probability)


def use_kernel(device: torch.device) -> str | None:
    """Use Triton's kernel on this type of device if it equals `reference_drop` to the bit; returns why not, else None.
    Raises torch.OutOfMemoryError if there was no memory for the comparison."""
    try:
        from engine.model.triton_dropout import drop as kernel

        problem = difference(kernel, reference_drop, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (Triton compiles with what the machine has; the reference remains)
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem is None:
        _in_use[device.type] = kernel
    return problem


def kernel_in_use(device: torch.device) -> Drop | None:
    """None if `reference_drop` is used."""
    return _in_use.get(device.type)


def stop_using(device: torch.device) -> None:
    _in_use.pop(device.type, None)


@contextmanager
def using(kernel: Drop, device_type: str) -> Iterator[None]:
    """Inside the block, `kernel` is used on devices of this type without a comparison."""
    former = dict(_in_use)
    _in_use[device_type] = kernel
    try:
        yield
    finally:
        _in_use.clear()
        _in_use.update(former)


def difference(
    kernel: Drop,
    reference: Drop,
    device: torch.device,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    probabilities: Sequence[float] = (0.1, 0.9),
) -> str | None:
    """A sentence on what differs between two kernels, None if all is equal to the bit. Rows begin at position 0 with
    the first of `probabilities`, later with the second."""
    generator = torch.Generator().manual_seed(0)
    for shape in COMPARED_SHAPES:
        values = torch.randn(shape, generator=generator)
        keys = [(71 * row - 2**31, 2**31 - 1 - row) for row in range(shape[0])]
        for dtype in dtypes:
            rows = values.to(device=device, dtype=dtype)
            for first, probability in zip((0, 4096), probabilities, strict=True):
                right, found = (each(rows, keys, first, probability) for each in (reference, kernel))
                if not torch.equal(right, found):
                    share = float((right != found).float().mean())
                    return f"{100 * share:.1f} % of the values differ, for {list(shape)} in {dtype}, p = {probability}"
    return None
