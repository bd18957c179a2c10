"""The part of a micro-batch that one of several ranks holds: an equal run of positions of every row.

Labels are shifted first, so that the target of a run's last position, the first token of the next run, is not lost.
Positions are explicit: without them every rank would count from 0, which changes the loss by little and the gradient
altogether.

Try: `pytest tests/data/test_slices.py`
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.data.batch import Batch
from engine.data.tokens import IGNORED


def slice_of(batch: Batch, place: int, places: int, *, pad_id: int) -> Batch:
    """The positions of `batch` that belong to `place` of `places`; padded on the right where they do not divide.

    Of packed rows, or rows with images, there are no slices: `engine.budget.slicing` refuses them.
    """
    length = batch.input_ids_BS.shape[1]
    width = -(-length // places)
    first = place * width
    labels_BS = _run(batch.labels_BS[:, 1:], first, width, IGNORED)
    positions_S = torch.arange(first, first + width).clamp_(max=length - 1)
    return replace(
        batch,
        input_ids_BS=_run(batch.input_ids_BS, first, width, pad_id),
        labels_BS=labels_BS,
        labels_shifted=True,
        attention_mask_BS=None,
        position_ids_BS=positions_S[None],
        first_position=first,
        target_tokens=int((labels_BS != IGNORED).sum()),
    )


def _run(tensor_BS: Tensor, first: int, width: int, filling: int) -> Tensor:
    """Positions [first, first + width), those beyond the end filled up."""
    run_BS = tensor_BS[:, first : first + width]
    return torch.nn.functional.pad(run_BS, (0, width - run_BS.shape[1]), value=filling).contiguous()
