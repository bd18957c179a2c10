"""The tensors of one micro-batch, made from samples.

Shapes: B rows, S tokens in the longest of them. Tensors are made on the host, in int64 unless an attribute says
otherwise; `Batch.moved` copies them to a device.

Try: `pytest tests/data/test_prepare.py -k collate`
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
class Documents:
    """Where the documents of a micro-batch begin once its rows are concatenated to one row. Flash kernels with
    variable lengths take these numbers. They are computed on the host, so that no layer reads them back from the
    device."""

    starts_D1: Tensor | None
    """Position at which each document begins, and last the number of all positions: int32[documents + 1]. None for
    attention kernels that do not need it."""
    longest: int
    """Positions of the longest document."""
    one_per_row: bool
    """Whether every row is a single document, so that causal attention needs no further separation."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Documents:
        """The same documents with `move` applied to `starts_D1`."""
        return replace(self, starts_D1=None if self.starts_D1 is None else move(self.starts_D1))


@dataclass(frozen=True)
class Batch:
    """One micro-batch, or a rank's slice of one (`engine.data.slices`). Tokens that are not targets have label -100."""

    input_ids_BS: Tensor
    labels_BS: Tensor
    attention_mask_BS: Tensor | None
    """None when no row is padded, and for packed rows, whose position ids separate documents and padding. Causal models
    run without it (`engine.model.decoder.hidden_states`)."""
    position_ids_BS: Tensor | None
    """Only for packed rows, where positions restart at 0 with every document, and for slices, as [1, S]."""
    sample_ids: tuple[int, ...]
    """Index in the data of each row. Dropout masks depend on it."""
    target_tokens: int
    """Number of target tokens, after the causal shift."""
    images: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs of a vision-language model, by the names that its processor gives them: pixel values, the grid of
    patches, and each token's type, or positions that replace `position_ids_BS`. Empty without images."""
    labels_shifted: bool = False
    """True in slices: the label of a position is the token after it. False: it is the token itself."""
    first_position: int = 0
    """Position in the row at which a slice begins."""
    documents: Documents | None = None
    """None for a slice, which holds only parts of documents. The padding of a row belongs to the document before it,
    or in packed rows is one more document."""
    row_tokens_B: Tensor | None = None
    """Number of tokens of each row, without its padding; None unless `collate` was told to set it."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The same micro-batch with `move` applied to every tensor."""
        mask_BS, positions_BS, documents = self.attention_mask_BS, self.position_ids_BS, self.documents
        tokens_B = self.row_tokens_B
        return replace(
            self,
            input_ids_BS=move(self.input_ids_BS),
            labels_BS=move(self.labels_BS),
            attention_mask_BS=None if mask_BS is None else move(mask_BS),
            position_ids_BS=None if positions_BS is None else move(positions_BS),
            images={name: move(tensor) for name, tensor in self.images.items()},
            documents=documents and documents.moved(move),
            row_tokens_B=None if tokens_B is None else move(tokens_B),
        )


def collate(
    data: TokenData,
    indices: Sequence[int] | NDArray[np.int64],
    *,
    pad_id: int,
    with_starts: bool = False,
    with_row_tokens: bool = False,
) -> Batch:
    """The micro-batch of the samples `indices`, padded on the right with `pad_id` to the longest of them.

    `with_starts`: set `documents.starts_D1`, for attention kernels that take the positions at which documents begin.
    `with_row_tokens`: set `row_tokens_B`, the number of tokens of each row.

    Packed rows get no attention mask: only without one does transformers separate documents where positions restart
    (`masking_utils._preprocess_mask_arguments`). Positions also restart where the padding of a packed row begins, so
    transformers treats the padding as one more document.
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
    tokens_BS = torch.from_numpy(ids_BS)
    return Batch(
        tokens_BS,
        torch.from_numpy(labels_BS),
        torch.from_numpy(mask_BS) if ragged and not data.packed else None,
        torch.from_numpy(positions_BS) if data.packed else None,
        tuple(rows),
        int((labels_BS[:, 1:] != IGNORED).sum()),
        images=data.images_of(rows, tokens_BS),
        documents=_documents(positions_BS if data.packed else None, shape, with_starts),
        row_tokens_B=torch.from_numpy(mask_BS.sum(1)) if with_row_tokens else None,
    )


def _documents(positions_BS: NDArray[np.int64] | None, shape: tuple[int, int], with_starts: bool) -> Documents:
    """Find the documents of rows of `shape` [B, S]: one for each 0 in `positions_BS`, or one for each row if that is
    None. `with_starts`: set `starts_D1`."""
    rows, length = shape
    starts = np.arange(0, rows * length, length) if positions_BS is None else np.flatnonzero(positions_BS == 0)
    bounds = np.append(starts, rows * length).astype(np.int32)
    starts_D1 = torch.from_numpy(bounds) if with_starts else None
    return Documents(starts_D1, int(np.diff(bounds).max()), len(starts) == rows)


def _positions(example: Example, width: int) -> NDArray[np.int64]:
    """Positions of one packed row, int64[width]: they restart at 0 in every document and in the padding."""
    length = len(example.input_ids)
    starts = np.zeros(width, np.int64)
    if length < width:
        starts[length] = length
    if example.segments is not None:
        first = np.flatnonzero(np.diff(example.segments)) + 1
        starts[first] = first
    return np.arange(width) - np.maximum.accumulate(starts)
