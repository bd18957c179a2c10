"""The report on prepared data: rows read, kept and dropped by reason, tokens, lengths.

Try: `tunedeck data -r demo`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.store import SourceCount
from engine.data.tokens import TokenData

PERCENTILES = (5, 25, 50, 75, 95, 100)
"""Reported percentiles of the lengths."""

BARS = 12
"""Bars of a histogram."""


@dataclass(frozen=True)
class PartReport:
    """Figures of the training data or of the validation data."""

    part: str
    rows: int
    """Sequences, after packing."""
    documents: int
    """Samples, before packing."""
    tokens: int
    target_tokens: int
    percentiles: dict[int, int]
    """Tokens per sequence at each percentile."""
    histogram: list[tuple[int, int, int]]
    """First and last length of each bar, and the number of sequences in it."""
    packed: bool

    @property
    def target_share(self) -> float:
        """Share of the tokens that are learned."""
        return self.target_tokens / self.tokens


@dataclass(frozen=True)
class DataReport:
    """The whole report, as `tunedeck data` prints it and the journal records it."""

    sources: list[SourceCount]
    validation_sources: list[SourceCount]
    parts: list[PartReport]
    notices: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as plain lines."""
        lines = [_source_line(count, "train") for count in self.sources]
        lines += [_source_line(count, "validation") for count in self.validation_sources]
        for part in self.parts:
            packed = f" (packed from {part.documents:,} samples)" if part.packed else ""
            lengths = ", ".join(f"p{share} {length:,}" for share, length in part.percentiles.items())
            lines.append(
                f"{part.part}: {part.rows:,} sequences{packed}, {part.tokens:,} tokens, "
                f"{part.target_tokens:,} learned ({part.target_share:.0%}); lengths {lengths}"
            )
        return lines + self.notices

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "sources": [asdict(count) for count in self.sources],
            "validation_sources": [asdict(count) for count in self.validation_sources],
            "parts": [{**asdict(part), "target_share": part.target_share} for part in self.parts],
            "notices": self.notices,
        }


def describe(part: str, data: TokenData) -> PartReport:
    """Figures of the `part` "train" or "validation"."""
    return PartReport(
        part, len(data), len(data.documents), int(data.lengths.sum(dtype=np.int64)),
        int(data.target_counts.sum(dtype=np.int64)),
        {share: int(np.percentile(data.lengths, share, method="inverted_cdf")) for share in PERCENTILES},
        histogram(data.lengths), data.packed,
    )


def histogram(lengths: NDArray[np.int32], bars: int = BARS) -> list[tuple[int, int, int]]:
    """Bars of equal width from the shortest to the longest length, as (first, last, sequences); both ends included."""
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // bars)
    counts = np.bincount((lengths - low) // width)
    return [(low + k * width, low + (k + 1) * width - 1, int(count)) for k, count in enumerate(counts)]


def dropped_text(counts: Sequence[SourceCount]) -> str:
    """Reasons for dropping rows of several sources, most frequent first, as text."""
    total: Counter[str] = sum((Counter(count.dropped) for count in counts), start=Counter())
    return ", ".join(f"{number:,} x {reason}" for reason, number in total.most_common())


def _source_line(count: SourceCount, part: str) -> str:
    line = f"{count.name} ({part}, {count.format}): {count.read:,} read, {count.kept:,} kept"
    if count.truncated:
        line += f", {count.truncated:,} of them cut to data.max_length"
    return line + (f"; dropped: {dropped_text([count])}" if count.dropped else "")
