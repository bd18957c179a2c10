"""From samples to the tensors of one micro-batch. The only file of this room that imports torch.

Shapes: B rows, S tokens in the longest of them. Everything is int64 and on the host; `Batch.moved` takes it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.data.tokens import IGNORED, Example, TokenData


@dataclass(frozen=True)
class Batch:
    """One micro-batch, or a slice of one (`engine.data.slices`). Masked labels are -100."""

    input_ids_BS: Tensor
    labels_BS: Tensor
    attention_mask_BS: Tensor | None
    """None when nothing is padded, and for packed rows, whose position ids keep documents and padding apart. Causal
    models are run without it (`engine.model.loss.hidden_states`)."""
    position_ids_BS: Tensor | None
    """Only for packed rows, where it restarts at 0 with every document, and for slices, [1, S]."""
    sample_ids: tuple[int, ...]
    """Index in the data of each row; dropout masks are keyed by it."""
    target_tokens: int
    """Labels that count after the causal shift."""
    images: Mapping[str, Tensor] = field(default_factory=dict)
    """What the model takes beside ids where rows hold images, by its processor's names: pixel values, the grid they
    lie on, and for each token its type, or its positions in place of `position_ids_BS`."""
    labels_shifted: bool = False
    """Whether the label of a position is the token after it, as in slices, or its own."""
    first_position: int = 0
    """Of a slice: where in the rows it begins."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The same micro-batch with every tensor passed through `move`."""
        mask_BS, positions_BS = self.attention_mask_BS, self.position_ids_BS
        return replace(
            self,
            input_ids_BS=move(self.input_ids_BS),
            labels_BS=move(self.labels_BS),
            attention_mask_BS=None if mask_BS is None else move(mask_BS),
            position_ids_BS=None if positions_BS is None else move(positions_BS),
            images={name: move(tensor) for name, tensor in self.images.items()},
        )


def collate(data: TokenData, indices: Sequence[int] | NDArray[np.int64], *, pad_id: int) -> Batch:
    """The micro-batch of the samples `indices`, padded on the right to the longest of them.

    Packed rows come without an attention mask: transformers looks for restarting positions only where there is none
    (`masking_utils._preprocess_mask_arguments`), and would otherwise let documents see each other. Their padding
    restarts the positions too, and so becomes one more document that nobody attends to.
    """
    rows = [int(index) for index in indices]
    examples = [data[row] for row in rows]
    shape = (len(rows), max(len(example.input_ids) for example in examples))
    ids_BS = np.full(shape, pad_id, np.int64)
    labels_BS = np.full(shape, IGNORED, np.int64)
    mask_BS = np.zeros(shape, np.int64)
    positions_BS = np.zeros(shape if data.packed else (0, 0), np.int64)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        ids_BS[row, :length], labels_BS[row, :length], mask_BS[row, :length] = example.input_ids, example.labels, 1
        if data.packed:
            positions_BS[row] = _positions(example, shape[1])
    ragged = bool((mask_BS == 0).any())
    return Batch(
        torch.from_numpy(ids_BS),
        torch.from_numpy(labels_BS),
        torch.from_numpy(mask_BS) if ragged and not data.packed else None,
        torch.from_numpy(positions_BS) if data.packed else None,
        tuple(rows),
        int((labels_BS[:, 1:] != IGNORED).sum()),
    )


def _positions(example: Example, width: int) -> NDArray[np.int64]:
    """Positions of one row, int64[width]: from 0 in every document, and from 0 again in the padding."""
    length = len(example.input_ids)
    starts = np.zeros(width, np.int64)
    if length < width:
        starts[length] = length
    if example.segments is not None:
        first = np.flatnonzero(np.diff(example.segments)) + 1
        starts[first] = first
    return np.arange(width) - np.maximum.accumulate(starts)
