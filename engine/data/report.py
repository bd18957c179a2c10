"""The report on prepared data: rows read, kept and dropped by reason, tokens, lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.pieces import SourceCount
from engine.data.tokens import TokenData

PERCENTILES = (5, 25, 50, 75, 95, 100)
"""Reported percentiles of the lengths."""

BARS = 12
"""Bars of a histogram."""

CHAT_FACTS = {
    "per_conversation": "conversations that are one row each: {:,}",
    "per_turn": "conversations that are one row per assistant turn, as the chat template rewrites finished turns: {:,}",
    "turn_rows": "rows of one assistant turn: {:,}",
    "reshaped": "conversations given in the shape that the chat template reads (content as a list of parts, tool "
    "arguments as objects or as text): {:,}",
    "unprompted": "answers without the whole prompt of inference, as the chat template leaves a part of it, such as "
    "the start of thinking, out of finished turns: {:,}",
    "context_only": "answers that are context, without target tokens, as the chat template lets no conversation end "
    "with them: {:,}",
    "unclosed": "conversations without the end of sequence that the chat template writes behind their last turn, as a "
    "generated answer ends before it: {:,}",
    "from_pair": 'prompts and completions inside the chat template, which the source\'s template = "none" leaves '
    "plain: {:,}",
    "marked": "prompts and completions that carry the chat template's markers already, left as they are: {:,}",
    "split": "documents longer than data.max_length, split into pieces: {:,}",
    "pieces": "pieces of them: {:,}",
    "system_folded": "system turns written at the start of the first user turn, as the chat template has none: {:,}",
    "untrained": "answers that are context, without target tokens, as their message says (weight, train): {:,}",
    "tools_left_out": "conversations without their tools, which the chat template does not write: {:,}",
    "thinking_left_out": "answers learned without their thinking, as the chat template leaves it out: {:,}",
}
"""How conversations are rendered (`SourceCount.chat`), and the sentence that says so."""


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
        return self.target_tokens / self.tokens


@dataclass(frozen=True)
class DataReport:
    """The report, as `tunedeck data` prints it and the journal records it."""

    sources: list[SourceCount]
    validation_sources: list[SourceCount]
    parts: list[PartReport]
    notices: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        lines = [line for count in self.sources for line in _source_lines(count, "train")]
        lines += [line for count in self.validation_sources for line in _source_lines(count, "validation")]
        for part in self.parts:
            packed = f" (packed from {part.documents:,} samples)" if part.packed else ""
            lengths = ", ".join(f"p{share} {length:,}" for share, length in part.percentiles.items())
            lines.append(
                f"{part.part}: {part.rows:,} sequences{packed}, {part.tokens:,} tokens, "
                f"{part.target_tokens:,} target tokens ({100 * part.target_share:.0f} %); lengths {lengths}"
            )
        return lines + self.notices

    def as_json(self) -> dict[str, Any]:
        return {
            "sources": [asdict(count) for count in self.sources],
            "validation_sources": [asdict(count) for count in self.validation_sources],
            "parts": [{**asdict(part), "target_share": part.target_share} for part in self.parts],
            "notices": self.notices,
        }


def describe(part: str, data: TokenData) -> PartReport:
    """`part` is "train" or "validation"."""
    return PartReport(
        part,
        len(data),
        len(data.documents),
        int(data.lengths.sum(dtype=np.int64)),
        int(data.target_counts.sum(dtype=np.int64)),
        {share: int(np.percentile(data.lengths, share, method="inverted_cdf")) for share in PERCENTILES},
        histogram(data.lengths),
        data.packed,
    )


def histogram(lengths: NDArray[np.int32], bars: int = BARS) -> list[tuple[int, int, int]]:
    """Bars of equal width as (first length, last length, sequences); both ends included."""
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // bars)
    counts = np.bincount((lengths - low) // width)
    return [(low + k * width, low + (k + 1) * width - 1, int(count)) for k, count in enumerate(counts)]


def drop_lines(counts: Sequence[SourceCount]) -> list[str]:
    """Most frequent reason first, each with the number of rows and where the first of them are."""
    total: Counter[str] = sum((Counter(count.dropped) for count in counts), start=Counter())
    return [f"{number:,} x {reason}{_places_text(counts, reason)}" for reason, number in total.most_common()]


def _places_text(counts: Sequence[SourceCount], reason: str) -> str:
    places = [place for count in counts for place in count.dropped_at.get(reason, ())]
    more = sum(count.dropped.get(reason, 0) for count in counts) > len(places)
    return f" ({', '.join(places)}{', …' if more else ''})" if places else ""


def rendering_lines(count: SourceCount) -> list[str]:
    """How conversations were rendered, and dropped turns, as one sentence each."""
    lines = [sentence.format(count.chat[fact]) for fact, sentence in CHAT_FACTS.items() if count.chat.get(fact)]
    lines += [f"assistant turns dropped, {reason}: {number:,}" for reason, number in count.dropped_turns.items()]
    return [f"{count.name}: {line}" for line in lines]


def _source_lines(count: SourceCount, part: str) -> list[str]:
    line = f"{count.name} ({part}, {count.format}): {count.read:,} read, {count.kept:,} kept"
    if count.truncated:
        line += f", {count.truncated:,} of them cut to data.max_length"
    line += f"; dropped: {', '.join(drop_lines([count]))}" if count.dropped else ""
    return [line, *rendering_lines(count)]
