"""The report on prepared data: rows read, kept and dropped by reason, tokens, lengths; and at a glance: padding and
packing, ends of answers, duplicates."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from engine.data.chat_template import special_ids
from engine.data.end_tokens import end_ids, ends_text
from engine.data.order import SampleOrder, pack
from engine.data.tokens import TokenData
from engine.data.workers import SourceCount

PERCENTILES = (5, 25, 50, 75, 95, 100)
"""Reported percentiles of the lengths."""

BARS = 12
"""Bars of a histogram."""

CHAT_FACTS = {
    "per_conversation": "conversations rendered as one row each: {:,}",
    "per_turn": (
        "conversations rendered as one row per assistant turn, because the chat template rewrites finished turns: {:,}"
    ),
    "turn_rows": "rows with one assistant turn: {:,}",
    "reshaped": "conversations converted to the structure that the chat template expects (content as a list of "
    "parts, tool arguments as objects or text): {:,}",
    "unprompted": "answers without the full inference prompt, because the chat template leaves part of it, such as "
    "the start of thinking, out of finished turns: {:,}",
    "context_only": "answers used as context without target tokens, because the chat template does not allow a "
    "conversation to end with them: {:,}",
    "unclosed": "conversations without the end-of-sequence token that the chat template writes after the last turn, "
    "because a generated answer ends before it: {:,}",
    "from_pair": 'prompts and completions rendered with the chat template (template = "none" in the source keeps them '
    "plain): {:,}",
    "marked": "prompts and completions that already contain the chat template's markers, left unchanged: {:,}",
    "split": "documents longer than data.max_length, split into pieces: {:,}",
    "pieces": "pieces: {:,}",
    "system_folded": "system turns moved to the start of the first user turn, because the chat template has no "
    "system turn: {:,}",
    "untrained": "answers used as context without target tokens, as set in the message (weight, train): {:,}",
    "part_context": "answers partly used as context, as set in the part or message (weight, train, train_detail): {:,}",
    "asked": "turns of other roles marked for training (weight, train), which stay context: {:,}",
    "stops_at_marker": "answers that end with the marker of the next turn, because the chat template writes no end "
    "token and the model stops at that marker: {:,}",
    "dialogues": "pairs of whole dialogues, kept as plain text, where the answer starts after the last label that both "
    "share: {:,}",
    "rendered": "texts that already begin or end with the tokenizer's special tokens, which are not added again: {:,}",
    "tools_wrapped": "conversations whose tools or tool calls are converted to the structure used by inference "
    "servers: {:,}",
    "tools_left_out": "conversations without their tools, because the chat template does not write tools: {:,}",
    "thinking_left_out": "answers trained without their thinking, because the chat template leaves it out: {:,}",
}
"""How conversations are rendered (`SourceCount.chat`), and the sentence that reports it."""


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
    overlaps: list[str] = field(default_factory=list)
    """What the held-out rows have in common with the training rows."""

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
        return lines + self.notices + self.overlaps

    def as_json(self) -> dict[str, Any]:
        return {
            "sources": [asdict(count) for count in self.sources],
            "validation_sources": [asdict(count) for count in self.validation_sources],
            "parts": [{**asdict(part), "target_share": part.target_share} for part in self.parts],
            "notices": self.notices,
            "accounts": self.accounts(),
            "overlaps": self.overlaps,
        }

    def accounts(self) -> list[str]:
        """Return one line for each source: what became of its rows, columns and tokens."""
        return [account_line(count) for count in (*self.sources, *self.validation_sources)]


WARNING = "WARNING: "
"""First word of a notice that must not be one line among many."""


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


ELSEWHERE = {
    "system_prompt", "functions", "thinking", "reasoning", "reasoning_content", "weight", "history", "context",
    "input", "images", "image", "videos", "audios", "tools", "system", "documents", "chat_template_kwargs", "labels",
    "input_ids",
}  # fmt: skip
"""Columns that some trainer reads."""


def account_line(count: SourceCount) -> str:
    """Return what became of each row, column and token of a source, as one line."""
    dropped = sum(count.dropped.values())
    reasons = ", ".join(f"{number:,} x {reason}" for reason, number in count.dropped.items())
    parts = [f"{count.kept:,} kept", f"{dropped:,} dropped" + (f" ({reasons})" if reasons else "")]
    parts += [f"{count.unused:,} outside limit and split"] if count.unused else []
    others = count.tokens - count.learned_tokens - count.context_tokens - count.lost_tokens
    tokens = [f"{count.learned_tokens:,} target", f"{count.context_tokens:,} prompt", f"{count.lost_tokens:,} cut"]
    tokens += [f"{others:,} in rows dropped for other reasons"] if others else []
    columns = f"columns read: {', '.join(count.columns_read) or 'none'}"
    if count.columns_not_read:
        columns += f"; not read: {', '.join(map(_not_read, count.columns_not_read))}"
    rows = f"{count.read + count.unused:,} rows in the file = {' + '.join(parts)}"
    again = f"; {count.compared:,} rows verified with a second reader" if count.compared else ""
    return f"{count.name}: {rows}; {columns}; {count.tokens:,} tokens in = {' + '.join(tokens)}{again}"


def _not_read(column: str) -> str:
    return f"{column} (used by other trainers)" if column.lower() in ELSEWHERE else column


def _source_lines(count: SourceCount, part: str) -> list[str]:
    line = f"{count.name} ({part}, {count.format}): {count.read:,} read, {count.kept:,} kept"
    if count.truncated:
        line += f", {count.truncated:,} of them cut to data.max_length"
    line += f"; dropped: {', '.join(drop_lines([count]))}" if count.dropped else ""
    return [line, *rendering_lines(count)]


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
    """Share of the answers that end with an end token; of plain text, of the documents. None without samples."""
    answers: int = 0
    """Answers, or documents, that were looked at for it."""


@dataclass(frozen=True)
class Quality:
    """Figures of the training data next to the lengths."""

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
            f"WARNING: no answer in {source.name} ends with an end token: the model would not learn to stop"
            for source in self.sources
            if source.ended == 0.0
        ]
        lines.append(f"tokens lost to data.max_length = {self.max_length:,}: {self.lost_tokens:,}")
        lines.append(f"padding, with each step's sequences padded to the longest: {100 * self.padding:.1f} %")
        if self.packed_rows is not None:
            lines.append(f"with data.packing: {self.packed_rows:,} sequences, {100 * self.packed_fill:.0f} % full")
        else:
            lines.append(f"sequences are {100 * self.packed_fill:.0f} % full")
        for source in self.sources:
            of = f" of {source.answers:,} answers" if source.answers > source.samples else ""
            ended = "" if source.ended is None else f", {100 * source.ended:.1f} %{of} end with an end token"
            lines.append(f"{source.name}: {source.samples:,} samples, {source.duplicates:,} duplicates{ended}")
        return lines


def quality(
    data: TokenData,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    batch_size: int,
    lost_tokens: int,
    counts: Sequence[SourceCount],
) -> Quality:
    """`batch_size`: sequences of an optimizer step; `lost_tokens` as counted while tokenising; `counts` of the sources
    of `data`, in their order."""
    documents = data.documents
    lengths, sources = data.columns.lengths[documents], data.columns.sources[documents]
    repeated, ends = _repeated(data, documents), _ended(data, documents, tokenizer, counts)
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
    return SourceQuality(name, int(own.sum()), int(repeated[own].sum()), share, len(found or ()))


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


def _ended(
    data: TokenData,
    documents: NDArray[np.int64],
    tokenizer: PreTrainedTokenizerBase,
    counts: Sequence[SourceCount],
) -> dict[int, list[bool]]:
    """By source: whether each answer ends with an end token; of plain text, each document, with its last piece."""
    columns, marks, special = data.columns, frozenset(end_ids(tokenizer)), special_ids(tokenizer)
    ordered = np.sort(documents)
    last = _last_of_row(columns.sources[ordered], columns.origins[ordered])
    in_pieces = [count.format == "text" or bool(count.chat.get("split")) for count in counts]
    of_text = np.array(in_pieces, np.bool_)[columns.sources[ordered]]
    chosen = ordered[last | ~of_text]
    found: dict[int, list[bool]] = {}
    for document in chosen[:: max(1, -(-len(chosen) // MOST_ENDS))]:
        source = int(columns.sources[document])
        span = slice(int(columns.offsets[document]), int(columns.offsets[document + 1]))
        ids, targets = columns.ids[span], columns.targets[span]
        edges = np.flatnonzero(np.diff(targets.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        if counts[source].chat.get("part_context"):
            # Context inside an answer has no special token, which the start of another turn has.
            edges = _merged(edges, ids, special.union(marks))
        ends = [ends_text(tokenizer, ids[start:stop].tolist(), marks) for start, stop in edges]
        found.setdefault(source, []).extend(ends[-1:] if counts[source].format == "text" else ends)
    return found


def _merged(edges: NDArray[np.int64], ids: NDArray[np.int32], special: set[int]) -> NDArray[np.int64]:
    """The stretches of targets, with those joined between which no special token is."""
    joined = [edges[0].tolist()]
    for start, stop in edges[1:].tolist():
        if special.isdisjoint(ids[joined[-1][1] : start].tolist()) and int(ids[joined[-1][1] - 1]) not in special:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return np.array(joined)


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
