"""Chooses what computes keyed dropout: the reference (eleven small kernels), or one Triton kernel.

Kernel and reference compute the same integers from the same keys, so their results are equal to the bit. The kernel
draws masks in registers; the reference needs 13 bytes per value of a sample's mask. A kernel is used once it has been
compared with the reference on the device of the run (`use_kernel`). Triton comes with torch's CUDA builds.

Try: `TRITON_INTERPRET=1 python -m pytest tests/model/test_dropout_kernel.py`, where Triton is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.model.dropout_masks import RowKey, reference_drop

Drop = Callable[[Tensor, Sequence[RowKey], int, float], Tensor]
"""Takes rows [R, S, F], a key for each row, the position of each row's first token and the probability of dropping;
returns the rows with dropped elements set to 0 and the others scaled by 1/(1-p)."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPARED_SHAPES = ((3, 37, 50), (2, 5, 1031))
"""Shapes [R, S, F] on which a kernel is compared. The rows are no multiples of the kernel's block, and those of the
second shape are longer than a block."""

_in_use: dict[str, Drop] = {}
"""The kernel that is used instead of the reference, by device type."""


def drop(rows_RSF: Tensor, keys: Sequence[RowKey], first: int, probability: float) -> Tensor:
    """Return rows_RSF [R, S, F] with dropped elements set to 0 and the others scaled by 1/(1-p), where p is
    `probability`. `keys`: one for each row; `first`: position of each row's first token. Computed by the kernel in use
    for this type of device, else by `reference_drop`."""
    return _in_use.get(rows_RSF.device.type, reference_drop)(rows_RSF, keys, first, probability)


def use_kernel(device: torch.device) -> str | None:
    """Compare Triton's dropout kernel with `reference_drop` on `device`; if they are equal to the bit, use the kernel
    on this type of device from now on. Returns why the kernel is not used, or None if it is.

    Raises:
        torch.OutOfMemoryError: there was no memory for the comparison.
    """
    try:
        kernel: Drop = importlib.import_module("engine.model.triton_dropout").drop
        problem = difference(kernel, reference_drop, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (Triton compiles with what the machine has; the reference remains)
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem is None:
        _in_use[device.type] = kernel
    return problem


def kernel_in_use(device: torch.device) -> Drop | None:
    """Return the dropout kernel in use on this type of device; None if `reference_drop` is used."""
    return _in_use.get(device.type)


def stop_using(device: torch.device) -> None:
    """Use no dropout kernel, but `reference_drop`, on this type of device from now on."""
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
    """Compare the dropout of `kernel` with that of `reference` on a device, in each of `dtypes`. Returns a sentence on
    what differs, or None if all results are equal to the bit. The rows begin at position 0 with the first of
    `probabilities`, and at a later position with the second."""
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
                    return f"{share:.1%} of the values differ, for {list(shape)} in {dtype}, p = {probability}"
    return None
