"""Dropout in a simulation: the allocations of `engine.model.dropout_kernel.drop`, without the operations that allocate
nothing new.

Try: `python -m pytest tests/train/test_own_dropout_runs.py`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.model.dropout_kernel import using
from engine.model.dropout_masks import RowKey, drop_into


@contextmanager
def simulated_dropout(device_kind: str) -> Iterator[None]:
    """Context manager: inside the block, dropout allocates what it allocates on a device of this kind ("cuda",
    "metered", "cpu")."""
    with using(_output if device_kind == "cuda" else _two_rows, "cpu"):
        yield


def _output(rows_RSF: Tensor, *_: object) -> Tensor:
    """On CUDA one kernel computes dropout, and allocates nothing but its output."""
    return torch.empty_like(rows_RSF)


def _two_rows(rows_RSF: Tensor, keys: Sequence[RowKey], first: int, probability: float) -> Tensor:
    """The reference needs the memory of two masks at most, the one it computes and the one before it: further rows
    repeat the same allocations. Of the eight rows of attention with two samples and four heads, six are left out."""
    result_RSF = torch.empty_like(rows_RSF)
    drop_into(result_RSF[:2], rows_RSF[:2], keys[:2], first, probability)
    return result_RSF
