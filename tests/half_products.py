"""Products of matrices in half precision, computed in fp32 and rounded, for tests that count bytes.

A processor without instructions for bfloat16 multiplies it 7 to 15 times slower than fp32, and most of the time of
such tests went there. Results have the same shapes and dtypes; the fp32 copies are made below the dispatch mode of the
metered device, which does not count them. Not for tests whose subject is a result in half precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

HALF = (torch.bfloat16, torch.float16)
aten: Any = torch.ops.aten

Product = Callable[..., Any]


def _mm(left: torch.Tensor, right: torch.Tensor) -> Any:
    if left.dtype in HALF:
        return aten.mm(left.float(), right.float()).to(left.dtype)
    return aten.mm.out(left, right, out=left.new_empty(left.shape[0], right.shape[1]))


def _bmm(left: torch.Tensor, right: torch.Tensor) -> Any:
    if left.dtype in HALF:
        return aten.bmm(left.float(), right.float()).to(left.dtype)
    return aten.bmm.out(left, right, out=left.new_empty(*left.shape[:2], right.shape[2]))


def _addmm(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if left.dtype in HALF:
        return aten.addmm(added.float(), left.float(), right.float(), beta=beta, alpha=alpha).to(left.dtype)
    out = left.new_empty(left.shape[0], right.shape[1])
    return aten.addmm.out(added, left, right, beta=beta, alpha=alpha, out=out)


def _addmm_(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if left.dtype in HALF:
        return added.copy_(aten.addmm(added.float(), left.float(), right.float(), beta=beta, alpha=alpha))
    return aten.addmm.out(added, left, right, beta=beta, alpha=alpha, out=added)


PRODUCTS: dict[str, Product] = {"mm": _mm, "bmm": _bmm, "addmm": _addmm, "addmm_": _addmm_}


@contextmanager
def in_fp32() -> Iterator[None]:
    """Within the block, compute products of half precision on the processor in fp32."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # overriding is what this does
        for name, product in PRODUCTS.items():
            library.impl(name, product, "CPU")
    try:
        yield
    finally:
        library._destroy()
