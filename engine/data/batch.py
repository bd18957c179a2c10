"""The tensors of a micro-batch: padded or packed rows, and the slice of each row that a rank holds in sequence
parallelism."""

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
    """The positions at which documents begin once a micro-batch's rows are concatenated (variable-length flash
    attention). They are computed on the host, so that no layer reads them back from the device."""

    starts_D1: Tensor | None
    """int32[documents + 1]: position at which each document begins, and last the number of all positions. None for
    attention kernels that do not need it."""
    longest: int
    one_per_row: bool
    """Causal attention then needs no further separation."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Documents:
        return replace(self, starts_D1=None if self.starts_D1 is None else move(self.starts_D1))


@dataclass(frozen=True)
class Batch:
    """One micro-batch, or a rank's slice of one (`slice_of`). Tokens that are not targets have label -100. Shapes: B
    rows, S tokens in the longest of them. Made on the host, in int64 unless an attribute says otherwise."""

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
    """Inputs of a vision-language model, by its processor's names: pixel values, the grid of patches, and each token's
    type, or positions that replace `position_ids_BS`."""
    labels_shifted: bool = False
    """True in slices: the label of a position is the token after it. False: it is the token itself."""
    first_position: int = 0
    """Position in the row at which a slice begins."""
    documents: Documents | None = None
    """None for a slice, which holds only parts of documents. The padding of a row belongs to the document before it, or
    in packed rows is one more document."""
    row_tokens_B: Tensor | None = None
    """Tokens of each row, without its padding; None unless `collate` was told to set it."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
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
    width: Callable[[int], int] | None = None,
) -> Batch:
    """The micro-batch of the samples `indices`, padded on the right with `pad_id` to the longest of them, or to as many
    tokens as `width` says for its length. `with_starts` and `with_row_tokens` set `documents.starts_D1` and
    `row_tokens_B`.

    Packed rows get no attention mask: only without one does transformers separate documents where positions restart
    (`masking_utils._preprocess_mask_arguments`), which includes the padding of a packed row.
    """
    rows = [int(index) for index in indices]
    examples = [data[row] for row in rows]
    longest = max(len(example.input_ids) for example in examples)
    shape = (len(rows), longest if width is None else width(longest))
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
    """One document for each 0 in `positions_BS`, or for each row of `shape` [B, S] if that is None."""
    rows, length = shape
    starts = np.arange(0, rows * length, length) if positions_BS is None else np.flatnonzero(positions_BS == 0)
    bounds = np.append(starts, rows * length).astype(np.int32)
    starts_D1 = torch.from_numpy(bounds) if with_starts else None
    return Documents(starts_D1, int(np.diff(bounds).max()), len(starts) == rows)


def _positions(example: Example, width: int) -> NDArray[np.int64]:
    """int64[width]: positions restart at 0 in every document of a packed row, and in the padding."""
    length = len(example.input_ids)
    starts = np.zeros(width, np.int64)
    if length < width:
        starts[length] = length
    if example.segments is not None:
        first = np.flatnonzero(np.diff(example.segments)) + 1
        starts[first] = first
    return np.arange(width) - np.maximum.accumulate(starts)


def slice_of(batch: Batch, place: int, places: int, *, pad_id: int) -> Batch:
    """Slice number `place` (from 0) of `places`, after padding rows with `pad_id` to a length that `places` divides.
    Packed rows and rows with images cannot be sliced; recipes that would need it are refused before a run starts.
    Labels are shifted before slicing, because the target of a slice's last position is the first token of the next
    slice. Positions are explicit: otherwise every rank would count from 0, which changes the loss a little and makes
    the gradient wrong."""
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
    """Columns [first, first + width), filled with `pad_value` beyond the end of the rows."""
    range_BS = tensor_BS[:, first : first + width]
    return torch.nn.functional.pad(range_BS, (0, width - range_BS.shape[1]), value=pad_value).contiguous()
