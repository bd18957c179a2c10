"""The data set that training reads: rows of tokens and targets, from memory-mapped columns. `TokenData` is a view that
combines documents to rows, so validation split and packing copy no tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100
"""Label of a token that is not a target (torch's `ignore_index`)."""


@dataclass(frozen=True)
class ImageColumns:
    """The images of D documents, I in all, in the order of the documents."""

    counts: NDArray[np.int32]
    """Images of each document."""
    heights: NDArray[np.int32]
    """Patches of each image from top to bottom."""
    widths: NDArray[np.int32]
    """Patches of each image from left to right."""
    digests: NDArray[np.uint64]
    """Hash of each image's file."""

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """D + 1 positions: the images of document d are offsets[d] to offsets[d + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])


@dataclass(frozen=True)
class Columns:
    """Tokens of D documents, concatenated to T tokens, and facts about each document."""

    ids: NDArray[np.int32]
    targets: NDArray[np.bool_]
    """T flags. Never set for a document's first token, which nothing predicts."""
    offsets: NDArray[np.int64]
    """D + 1 positions in `ids`: document d is ids[offsets[d]:offsets[d + 1]]."""
    target_counts: NDArray[np.int32]
    sources: NDArray[np.int16]
    """Number of each document's source."""
    origins: NDArray[np.int64]
    """Row of each document in its source, counted from 0."""
    answer_starts: NDArray[np.int32]
    """First token of each document's last answer; of plain text, of its second half."""
    answer_ends: NDArray[np.int32]
    """The token after each document's last answer."""
    desirable: NDArray[np.bool_]
    """Whether each document's answer is one to learn; false for rejected and undesirable ones."""
    images: ImageColumns | None = None

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.diff(self.offsets).astype(np.int32)


class PixelReader(Protocol):
    """Reads images when a micro-batch is made (`engine.data.images`)."""

    part_id: int | None
    """Token for a part of an image, by which images are measured that have no patches; None where they have."""

    def inputs(self, wanted: Sequence[tuple[int, int, Sequence[int]]], ids_BS: Tensor) -> dict[str, Tensor]:
        """The model's inputs, by name, for the images of `wanted`: (number of the source, row there, digests of its
        images) of each sample, whose tokens are `ids_BS`. Raises DataError for an image that is gone or has changed."""

    def pictures(self, source: int, origin: int) -> list[NDArray[np.uint8]]:
        """Small pictures of the images of the sample in row `origin` of a source, uint8[rows, columns, 3] each."""


@dataclass(frozen=True)
class Example:
    """One row of S tokens."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    """Not shifted; -100 where the token is not a target."""
    segments: NDArray[np.int32] | None
    """Number of the token's document within a packed row; None in data that is not packed."""


class TokenData:
    """Rows of tokens: `data[i]` is an `Example`; lengths, target counts, sources and weights are numpy columns.

    `documents` are document numbers in `columns`; `row_offsets`, int64[rows + 1], divides them into packed rows.
    `source_weights`: how often a source's rows occur in an epoch. `source_fingerprints` hash each source's rows and
    format, whatever the tokenizer.
    """

    def __init__(
        self,
        columns: Columns,
        documents: NDArray[np.int64],
        *,
        row_offsets: NDArray[np.int64] | None = None,
        source_names: Sequence[str] = (),
        source_weights: Sequence[float] = (),
        source_fingerprints: Sequence[str] = (),
        images: PixelReader | None = None,
        in_pairs: bool = False,
    ) -> None:
        self.columns, self.documents, self.pixels = columns, documents, images
        self.packed = row_offsets is not None
        self.row_offsets = np.arange(len(documents) + 1) if row_offsets is None else row_offsets
        self.source_names, self.source_fingerprints = list(source_names), list(source_fingerprints)
        self.lengths = self._per_row(columns.lengths)
        self.target_counts = self._per_row(columns.target_counts)
        self.source_of = columns.sources[documents[self.row_offsets[:-1]]]
        """Source of each row; of a packed row, the source of its first document."""
        weights = np.asarray(source_weights, float)
        self.weights = weights[self.source_of] if len(weights) else np.ones(len(self))
        """How often each row occurs in an epoch: float64[rows]."""

        self.in_pairs = in_pairs
        """Whether rows 2·p and 2·p + 1 are the chosen and the rejected sequence of a pair."""
        self.mismatched: TokenData | None = None
        """For KTO: row i is the prompt of row i with the answer of another (`engine.data.preferences`)."""
        self.limit: int | None = None
        """Tokens after which every row is cut; None leaves rows whole."""
        self._whole = self

    def shortened(self, limit: int | None) -> TokenData:
        """The same rows, each cut after `limit` tokens."""
        whole = self._whole
        if limit is None:
            return whole
        view = copy(whole)
        view.limit, view.lengths = limit, np.minimum(whole.lengths, limit).astype(np.int32)
        view.target_counts = whole.target_counts.copy()
        for row in np.flatnonzero(whole.lengths > limit):
            view.target_counts[row] = np.count_nonzero(whole[int(row)].labels[:limit] != IGNORED)
        return view

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def __iter__(self) -> Iterator[Example]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> Example:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        pieces = [self._document(document) for document in self.documents_of(row)]
        cut = slice(self.limit)
        ids = np.concatenate([ids for ids, _ in pieces])[cut]
        labels = np.where(np.concatenate([targets for _, targets in pieces])[cut], ids, np.int32(IGNORED))
        if not self.packed:
            return Example(ids, labels, None)
        segments = np.repeat(np.arange(len(pieces), dtype=np.int32), [len(ids) for ids, _ in pieces])
        return Example(ids, labels, segments[cut])

    @cached_property
    def desirable(self) -> NDArray[np.bool_]:
        """Of each row, by its first document."""
        return self.columns.desirable[self.documents[self.row_offsets[:-1]]]

    @cached_property
    def patches(self) -> NDArray[np.int64] | None:
        """Patches of all images of each row, int64[rows]; tokens for their parts where the model's own processor reads
        them. None if no document has an image. Rows are not packed."""
        found = self.columns.images
        if found is None:
            return None
        if self.pixels is not None and self.pixels.part_id is not None:
            parts = np.concatenate([[0], np.cumsum(self.columns.ids == self.pixels.part_id)])[self.columns.offsets]
            return np.asarray(np.diff(parts)[self.documents])
        sums = np.concatenate([[0], np.cumsum(found.heights.astype(np.int64) * found.widths)])[found.offsets]
        return np.asarray(np.diff(sums)[self.documents])

    @property
    def has_images(self) -> bool:
        return self.patches is not None and bool(self.patches.any())

    def images_of(self, rows: Sequence[int], ids_BS: Tensor) -> Mapping[str, Tensor]:
        """The model's inputs for the images of `rows`, whose tokens are `ids_BS`. Rows must not be packed."""
        if self.pixels is None or self.columns.images is None:
            return {}
        found = self.columns.images
        wanted = []
        for row in rows:
            document = int(self.documents[row])
            span = slice(int(found.offsets[document]), int(found.offsets[document + 1]))
            digests = found.digests[span].tolist()
            wanted.append((int(self.columns.sources[document]), int(self.columns.origins[document]), digests))
        return self.pixels.inputs(wanted, ids_BS)

    def pictures_of(self, row: int) -> list[NDArray[np.uint8]]:
        """Small pictures of the images of a row that is not packed, with the bounding boxes of its answer drawn into
        the pixels; uint8[rows, columns, 3] each."""
        if self.pixels is None or not self.has_images:
            return []
        document = int(self.documents[row])
        return self.pixels.pictures(int(self.columns.sources[document]), int(self.columns.origins[document]))

    def documents_of(self, row: int) -> NDArray[np.int64]:
        return self.documents[self.row_offsets[row] : self.row_offsets[row + 1]]

    def document_lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each document of these rows, without what `limit` cuts off: int64[documents]."""
        lengths = []
        for row in rows:
            ends = np.cumsum(self.columns.lengths[self.documents_of(int(row))], dtype=np.int64)
            lengths.append(np.diff(np.minimum(ends, self.lengths[row]), prepend=0))
        return np.concatenate(lengths)

    def split_question(self, row: int) -> tuple[list[int], list[int]]:
        """(tokens before the last answer, tokens of that answer) of an unpacked row; of plain text, its halves."""
        document = int(self.documents_of(row)[0])
        start, end = int(self.columns.answer_starts[document]), int(self.columns.answer_ends[document])
        ids = self[row].input_ids
        return ids[:start].tolist(), ids[start:end].tolist()

    def _document(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        span = slice(int(self.columns.offsets[document]), int(self.columns.offsets[document + 1]))
        return self.columns.ids[span], self.columns.targets[span]

    def _per_row(self, per_document: NDArray[np.int32]) -> NDArray[np.int32]:
        sums = np.concatenate([[0], np.cumsum(per_document[self.documents], dtype=np.int64)])
        return np.diff(sums[self.row_offsets]).astype(np.int32)
