"""Slices of a micro-batch for sequence parallelism: each rank gets an equal range of positions of every row.

Labels are shifted before slicing, because the target of a slice's last position is the first token of the next slice.
Positions are explicit: otherwise every rank would count from 0, which changes the loss a little and makes the gradient
wrong.

Try: `pytest tests/data/test_slices.py`
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.data.batch import Batch
from engine.data.tokens import IGNORED


def slice_of(batch: Batch, place: int, places: int, *, pad_id: int) -> Batch:
    """Slice number `place` (from 0) of `places` equal slices of a micro-batch, after padding its rows with `pad_id` to
    a length that `places` divides.

    Packed rows and rows with images cannot be sliced; recipes that would need it are refused before a run starts.
    """
    length = batch.input_ids_BS.shape[1]
    width = -(-length // places)
    first = place * width
    labels_BS = _range(batch.labels_BS[:, 1:], first, width, IGNORED)
    positions_S = torch.arange(first, first + width).clamp_(max=length - 1)
    return replace(
        batch,
        input_ids_BS=_range(batch.input_ids_BS, first, width, pad_id),
        labels_BS=labels_BS,
        labels_shifted=True,
        attention_mask_BS=None,
        documents=None,
        position_ids_BS=positions_S[None],
        first_position=first,
        row_tokens_B=None if batch.row_tokens_B is None else (batch.row_tokens_B - first).clamp_(0, width),
        target_tokens=int((labels_BS != IGNORED).sum()),
    )


def _range(tensor_BS: Tensor, first: int, width: int, pad_value: int) -> Tensor:
    """Columns [first, first + width) of a tensor, filled with `pad_value` beyond the end of its rows."""
    range_BS = tensor_BS[:, first : first + width]
    return torch.nn.functional.pad(range_BS, (0, width - range_BS.shape[1]), value=pad_value).contiguous()
