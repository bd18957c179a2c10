"""The data set that training reads: rows of tokens and targets, from memory-mapped columns.

`TokenData` is a view that combines documents of the columns into rows: one document each, or several when packed. The
validation split and packing are views, so they copy no tokens. `engine.data.store` builds and caches the columns.

Try: `pytest tests/data/test_packing.py`
"""

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
    """Facts about the images of D documents, I in all, in the order of the documents."""

    counts: NDArray[np.int32]
    """Number of images of each document."""
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
    """T token ids."""
    targets: NDArray[np.bool_]
    """T flags, True for target tokens. Never set for a document's first token, which nothing predicts."""
    offsets: NDArray[np.int64]
    """D + 1 positions in `ids`: document d is ids[offsets[d]:offsets[d + 1]]."""
    target_counts: NDArray[np.int32]
    """Number of targets of each document."""
    sources: NDArray[np.int16]
    """Number of each document's source."""
    origins: NDArray[np.int64]
    """Number of each document's row in its source, counted from 0."""
    answer_starts: NDArray[np.int32]
    """First token of each document's last answer; of plain text, of its second half."""
    answer_ends: NDArray[np.int32]
    """The token after each document's last answer."""
    images: ImageColumns | None = None
    """None if no document has an image."""

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each document: int32[D]."""
        return np.diff(self.offsets).astype(np.int32)


class PixelReader(Protocol):
    """Reads images when a micro-batch is made (`engine.data.images`)."""

    def inputs(self, wanted: Sequence[tuple[int, int, Sequence[int]]], ids_BS: Tensor) -> dict[str, Tensor]:
        """The model's inputs, by name, for the images of some samples; empty if they have none. `ids_BS` are the
        samples' tokens, one row for each sample in `wanted`, which is (number of its source, row in its source, the
        digests of its images). Raises DataError for an image that is gone or has changed."""

    def pictures(self, source: int, origin: int) -> list[NDArray[np.uint8]]:
        """Small pictures of the images of the sample in row `origin` of a source, uint8[rows, columns, 3] each."""


@dataclass(frozen=True)
class Example:
    """One row of S tokens."""

    input_ids: NDArray[np.int32]
    """int32[S]."""
    labels: NDArray[np.int32]
    """int32[S], not shifted; -100 where the token is not a target."""
    segments: NDArray[np.int32] | None
    """int32[S]: number of the token's document within a packed row; None in data that is not packed."""


class TokenData:
    """Rows of tokens: `data[i]` is an `Example`; lengths, target counts, sources and weights are numpy columns.

    `documents` are document numbers in `columns`; `row_offsets`, int64[rows + 1], divides them into packed rows.
    `source_weights` has one number per source: how often its rows occur in an epoch. `source_fingerprints` has a hash
    of each source's rows and format, which does not depend on the tokenizer.
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

        self.limit: int | None = None
        """Tokens after which every row is cut; None leaves rows whole."""
        self._whole = self

    def shortened(self, limit: int | None) -> TokenData:
        """The same rows, each cut after `limit` tokens; uncut if `limit` is None."""
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
    def patches(self) -> NDArray[np.int64] | None:
        """Patches of all images of each row, int64[rows]; None if no document has an image. Rows are not packed."""
        found = self.columns.images
        if found is None:
            return None
        sums = np.concatenate([[0], np.cumsum(found.heights.astype(np.int64) * found.widths)])[found.offsets]
        return np.asarray(np.diff(sums)[self.documents])

    @property
    def has_images(self) -> bool:
        """Whether any row has an image."""
        return self.patches is not None and bool(self.patches.any())

    def images_of(self, rows: Sequence[int], ids_BS: Tensor) -> Mapping[str, Tensor]:
        """The model's inputs for the images of `rows`, by name; empty if there are none. `ids_BS` are the tokens of
        these rows. Rows must not be packed."""
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
        """Small pictures of the images of a row that is not packed, for display, with the bounding boxes of its answer
        drawn into the pixels; uint8[rows, columns, 3] each. Empty for rows without images."""
        if self.pixels is None or not self.has_images:
            return []
        document = int(self.documents[row])
        return self.pixels.pictures(int(self.columns.sources[document]), int(self.columns.origins[document]))

    def documents_of(self, row: int) -> NDArray[np.int64]:
        """Numbers of the documents in one row, in order."""
        return self.documents[self.row_offsets[row] : self.row_offsets[row + 1]]

    def split_question(self, row: int) -> tuple[list[int], list[int]]:
        """Split a row that is not packed into (tokens before its last answer, tokens of that answer). Of plain text,
        the second half is the answer."""
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
