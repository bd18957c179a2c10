"""What the prepared training data look like at a glance: padding and packing, ends of answers, duplicates."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from engine.data.chat_template import special_ids
from engine.data.order import SampleOrder, pack
from engine.data.tokens import TokenData

MOST_PACKED = 500_000
"""Samples that packing is tried on; more give the same shares."""

MOST_ENDS = 20_000
"""Samples of which the last target token is looked at, evenly over the data."""


@dataclass(frozen=True)
class SourceQuality:
    """Figures of one source's training samples."""

    name: str
    samples: int
    duplicates: int
    """Samples with the tokens of an earlier one."""
    ended: float | None
    """Share of samples whose last target is an end token; None without samples."""


@dataclass(frozen=True)
class Quality:
    """Figures of the training data beside the lengths."""

    max_length: int
    lost_tokens: int
    """Tokens of samples that were dropped or cut because they are longer than data.max_length."""
    padding: float
    """Share of padding where the sequences of each optimizer step are padded to its longest."""
    packed_rows: int | None
    """Sequences that packing gives; None for images and preferences, and where the data are packed."""
    packed_fill: float
    """Share of max_length that tokens fill in packed sequences, or in the sequences as they are."""
    sources: list[SourceQuality]

    def lines(self) -> list[str]:
        """Sentences for a terminal, warnings first."""
        lines = [
            f"WARNING: no sample of {source.name} ends its answer with an end token: the model would not learn to stop"
            for source in self.sources
            if source.ended == 0.0
        ]
        lines.append(f"tokens lost to data.max_length = {self.max_length:,}: {self.lost_tokens:,}")
        lines.append(f"padding, where each step's sequences are padded to its longest: {100 * self.padding:.1f} %")
        if self.packed_rows is not None:
            lines.append(f"data.packing would give {self.packed_rows:,} sequences, {100 * self.packed_fill:.0f} % full")
        else:
            lines.append(f"sequences are {100 * self.packed_fill:.0f} % full")
        for source in self.sources:
            ended = "" if source.ended is None else f", {100 * source.ended:.1f} % end with an end token"
            lines.append(f"{source.name}: {source.samples:,} samples, {source.duplicates:,} duplicates{ended}")
        return lines


def quality(
    data: TokenData, tokenizer: PreTrainedTokenizerBase, *, max_length: int, batch_size: int, lost_tokens: int
) -> Quality:
    """`batch_size`: sequences of an optimizer step; `lost_tokens` as counted while tokenising."""
    documents = data.documents
    lengths, sources = data.columns.lengths[documents], data.columns.sources[documents]
    repeated, ends = _repeated(data, documents), _ended(data, documents, tokenizer)
    packs = not (data.packed or data.has_images or data.in_pairs or data.mismatched is not None)
    tried = lengths[:: max(1, -(-len(lengths) // MOST_PACKED))]
    rows = len(pack(tried, max_length)) if packs else len(data)
    fill = float((tried if packs else data.lengths).sum(dtype=np.int64) / (rows * max_length))
    return Quality(
        max_length, lost_tokens, _padding(data, batch_size),
        round(rows * len(lengths) / len(tried)) if packs else None, fill,
        [_of_source(number, name, sources, repeated, ends) for number, name in enumerate(data.source_names)],
    )  # fmt: skip


def _of_source(
    number: int, name: str, sources: NDArray[np.int16], repeated: NDArray[np.bool_], ends: dict[int, list[bool]]
) -> SourceQuality:
    found = ends.get(number)
    share = sum(found) / len(found) if found else None
    own = sources == number
    return SourceQuality(name, int(own.sum()), int(repeated[own].sum()), share)


def _padding(data: TokenData, batch_size: int) -> float:
    """In the order of a first epoch."""
    order = SampleOrder(len(data), seed=0, shuffle=True, batch_size=batch_size).epoch(0)
    lengths = data.lengths[order].astype(np.int64)
    starts = np.arange(0, len(lengths), batch_size)
    longest = np.maximum.reduceat(lengths, starts)
    places = int((longest * np.diff([*starts, len(lengths)])).sum())
    return 1 - int(lengths.sum()) / places


def _repeated(data: TokenData, documents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each document has the tokens of an earlier one, bool[documents]."""
    ids, offsets = data.columns.ids, data.columns.offsets
    hashes = np.fromiter((_hash(ids[offsets[number] : offsets[number + 1]]) for number in documents), np.uint64)
    _, first = np.unique(hashes, return_index=True)
    repeated = np.ones(len(documents), np.bool_)
    repeated[first] = False
    return repeated


def _hash(ids: NDArray[np.int32]) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


def _ended(data: TokenData, documents: NDArray[np.int64], tokenizer: PreTrainedTokenizerBase) -> dict[int, list[bool]]:
    """By source: whether the last target of a row's last document is an end token."""
    columns, marks = data.columns, special_ids(tokenizer)
    ordered = np.sort(documents)
    last = _last_of_row(columns.sources[ordered], columns.origins[ordered])
    chosen = ordered[last]
    found: dict[int, list[bool]] = {}
    for document in chosen[:: max(1, -(-len(chosen) // MOST_ENDS))]:
        span = slice(int(columns.offsets[document]), int(columns.offsets[document + 1]))
        place = int(np.flatnonzero(columns.targets[span])[-1])
        found.setdefault(int(columns.sources[document]), []).append(int(columns.ids[span][place]) in marks)
    return found


def _last_of_row(sources: NDArray[np.int16], origins: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the next document is of another row: pieces of a split text end with its last one."""
    if not len(sources):
        return np.empty(0, np.bool_)
    changed = (np.diff(sources) != 0) | (np.diff(origins) != 0)
    return np.append(changed, True)


def find_rows(data: TokenData, tokenizer: PreTrainedTokenizerBase, text: str, most: int, first: int = 0) -> list[int]:
    """Up to `most` rows, from row `first` on, whose text with its special tokens contains `text`."""
    found: list[int] = []
    for row in range(first, len(data)):
        if len(found) >= most:
            break
        if text in _text(data[row].input_ids.tolist(), tokenizer):
            found.append(row)
    return found


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
