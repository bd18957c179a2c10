"""Turns records into tokens and their label mask (target tokens): adds beginning- and end-of-sequence, splits, cuts or
drops."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from engine.config.schema.data import Data
from engine.config.schema.run import DATA_VERSION
from engine.data.bounds import CHARACTERS_PER_TOKEN, TOO_MANY_CHARACTERS
from engine.data.chat import ChatRenderer, RenderedRows, TokenRow
from engine.data.chat_template import ChatTemplate, Span, answer_opening, markers_of
from engine.data.conversations import LEFT_OUT
from engine.data.end_tokens import end_ids, ends_text
from engine.data.formats import Format
from engine.data.image_formats import DetectionRecord
from engine.data.images import ImageFacts, ImageProcessor, facts_of, place_images, references_of
from engine.data.preferences import JudgedRecord, LabelledRecord, PreferenceRecord
from engine.data.records import NO_TARGET, ChatRecord, Dropped, PairRecord, Record, TextRecord, TokenRecord
from engine.errors import DataError

TOO_LONG = "longer than data.max_length"
CUT_AWAY = f"{NO_TARGET} once cut to data.max_length"
NO_PROCESSOR = "the model takes no images"
SEVERAL_ANSWERS = "has several answers, which the chat template renders one by one"
"""Reasons for which the tokeniser drops a row."""


TOGETHER = 1 << 16
"""Characters of the longest text that is tokenised together with others: a tokenizer's results take some hundred bytes
a token."""


@dataclass(frozen=True)
class Document:
    """One sample of S tokens."""

    ids: NDArray[np.int32]
    targets: NDArray[np.bool_]
    answer: tuple[int, int]
    """(first token of the last answer, the token after it); for plain text, the second half counts as the answer."""
    origin: int
    """Row of the source, counted from 0."""
    cut: int
    """Tokens behind its end that data.max_length has no room for."""
    images: tuple[ImageFacts, ...] = ()
    desirable: bool = True


@dataclass(frozen=True)
class RowResult:
    """The documents made from one row of a source, and the reasons for what was dropped of it."""

    documents: list[Document]
    dropped: list[str]
    """Reasons for dropping the row, or single turns of its conversation."""
    facts: Counter[str] = field(default_factory=Counter)
    """Counts by the names in `engine.data.report.CHAT_FACTS`."""
    lost: int = 0
    """Tokens that data.max_length has no room for."""
    tokens: int = 0
    """Tokens of the row before anything of it was cut or dropped."""


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything in a tokenizer that changes tokens: vocabulary, rules, special tokens, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    # The backend stores padding and truncation of its last call; they do not change the vocabulary or the rules.
    rules = _without_call_settings(rules) if backend is not None else rules
    text = "\x00".join([type(tokenizer).__name__, rules, repr(special), repr(tokenizer.chat_template)])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _without_call_settings(rules: str) -> str:
    parsed = json.loads(rules)
    parsed["padding"] = parsed["truncation"] = None
    return json.dumps(parsed, sort_keys=True)


def _last_stretch(targets: NDArray[np.bool_]) -> Span:
    """The last contiguous targets: first token and the token after it."""
    last = int(np.flatnonzero(targets)[-1])
    before = np.flatnonzero(~targets[: last + 1])
    return (int(before[-1]) + 1 if len(before) else 0), last + 1


def _within(answer: Span, length: int) -> Span:
    """`answer` within a document, after its first token (the prompt); the second half if nothing is left."""
    start, end = max(1, answer[0]), min(length, answer[1])
    return (start, end) if start < end else (max(1, length // 2), length)


def piece_spans(count: int, most: int, overlap: int) -> list[Span]:
    """Cut `count` tokens into pieces of `most` or less, each with the last `overlap` tokens of the one before. No piece
    is a single token, of which nothing could be learned."""
    spans, start = [], 0
    while start + most < count:
        stop = start + most - (count - start - most + overlap == 1)
        spans.append((start, stop))
        start = stop - overlap
    return [*spans, (start, count)]


def _answer_of(record: Record | Dropped, row: TokenRow, rendered: RenderedRows, most: int) -> Span | None:
    """Of plain text, the second half of each piece, which has at most `most` tokens."""
    is_text = isinstance(record, TextRecord) or (isinstance(record, TokenRecord) and all(record.targets))
    return (min(len(row[0]), most) // 2, len(row[0])) if is_text else rendered.answer


def _lost(row: TokenRow | Dropped, made: Document | Dropped) -> int:
    """Tokens of `row` that `made` lacks because of data.max_length."""
    if isinstance(row, Dropped):
        return 0
    if isinstance(made, Document):
        return made.cut
    return len(row[0]) if made.reason.startswith(TOO_LONG) else 0


def _tokens(row: TokenRow | Dropped, made: Document | Dropped) -> int:
    """Return the tokens of `row`; with images, those that their places take in `made`."""
    if isinstance(made, Document) and made.images:
        return len(made.ids) + made.cut
    return 0 if isinstance(row, Dropped) else len(row[0])


def _characters(record: Record | DetectionRecord) -> int:
    """Of all texts in a record."""
    if isinstance(record, TextRecord):
        return len(record.text)
    if isinstance(record, PairRecord):
        return len(record.prompt) + len(record.completion)
    if isinstance(record, TokenRecord):
        return 0  # There is nothing to tokenise.
    if isinstance(record, DetectionRecord):
        return sum(map(len, record.labels))
    count, waiting = 0, [record.messages, record.tools]
    while waiting:
        value: Any = waiting.pop()
        count += len(value) if isinstance(value, str) else 0
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return count


class Tokeniser:
    """Turns the rows of a source into documents, as the recipe's [data] table says."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: Data,
        images: ImageProcessor | None = None,
        *,
        version: int = DATA_VERSION,
    ) -> None:
        """Rows are read as `RunSpec.data_version` = `version` says."""
        self.tokenizer, self.images, self.version = tokenizer, images, version
        self.max_length, self.truncate = data.max_length, data.over_length == "truncate"
        self.overlap, self.skip_broken = data.overlap, data.broken == "skip"
        self.split = data.over_length == "split" or (data.over_length == "auto" and version > 1)
        self.learn_all, self.system_prompt = data.loss_on == "all", data.system_prompt
        self.last_only, self.template_args = data.loss_on == "last", data.template_args
        self._chat: ChatRenderer | None = None
        self._prefix: list[int] | None = None
        self._known: dict[str, list[int]] = {}
        """Tokens of the texts of the rows at hand."""

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @cached_property
    def refuses_system(self) -> bool:
        """Whether the chat template takes a conversation, but not after a system turn."""
        return self.has_template and ChatTemplate(self.tokenizer, variables=self.template_args).refuses_system()

    @cached_property
    def markers(self) -> list[str]:
        """Texts that only a row has which went through the chat template."""
        return markers_of(self.tokenizer) if self.has_template else []

    @cached_property
    def opening(self) -> str:
        """What the chat template writes before an answer; "" without a template."""
        return answer_opening(self.tokenizer) if self.has_template else ""

    def results(self, format_: Format, rows: Sequence[dict[str, Any] | Dropped], first: int) -> list[RowResult]:
        """`first` is the row number of the first of `rows`. Raises DataError where the tokenizer cannot handle them."""
        given = [format_.record(row) for row in rows]
        records = [record if isinstance(record, JudgedRecord) else self._bounded(record) for record in given]
        self._known = self._at_once(records)
        try:
            return [self._result(record, first + place, format_) for place, record in enumerate(records)]
        finally:
            self._known = {}

    def _at_once(self, records: Sequence[Record | DetectionRecord | JudgedRecord | Dropped]) -> dict[str, list[int]]:
        """The tokens of plain texts, in one call, which takes half the time of a call for each."""
        texts = [record.text for record in records if isinstance(record, TextRecord)]
        for record in records:
            texts += [record.prompt, record.completion] if isinstance(record, PairRecord) else []
        texts = [text for text in dict.fromkeys(texts) if 0 < len(text) <= TOGETHER]
        if len(texts) < 2:
            return {}
        given = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return dict(zip(texts, given["input_ids"], strict=True))

    def _result(
        self, given: Record | DetectionRecord | JudgedRecord | Dropped, origin: int, format_: Format
    ) -> RowResult:
        if isinstance(given, PreferenceRecord):
            return self._preference(given, origin, format_)
        if isinstance(given, LabelledRecord):
            return self._labelled(given, origin, format_)
        record, images = self._opened(given, format_)
        encoded = record if isinstance(record, Dropped) else self._encode(record, f"{format_.source}, row {origin + 1}")
        rendered = RenderedRows([encoded]) if isinstance(encoded, Dropped) else encoded
        made = [
            row
            if isinstance(row, Dropped)
            else self._document(row, _answer_of(record, row, rendered, self.max_length), origin, images)
            for row in rendered.rows
        ]
        documents = [document for document in made if isinstance(document, Document)]
        if images and documents and max(len(document.images) for document in documents) < len(images):
            return RowResult([], [f"{LEFT_OUT} an image"])
        facts = Counter(turn_rows=len(documents)) if rendered.facts["per_turn"] else Counter()
        lost = sum(map(_lost, rendered.rows, made))
        dropped = [drop.reason for drop in made if isinstance(drop, Dropped)]
        tokens = sum(map(_tokens, rendered.rows, made))
        return RowResult(documents, dropped, rendered.facts + facts, lost, tokens)

    def _preference(self, given: PreferenceRecord, origin: int, format_: Format) -> RowResult:
        """Two documents, the chosen and the rejected sequence, or none."""
        sides = [self._result(self._bounded(side), origin, format_) for side in (given.chosen, given.rejected)]
        lost, tokens = sum(side.lost for side in sides), sum(side.tokens for side in sides)
        for side, name in zip(sides, ("chosen", "rejected"), strict=True):
            if side.dropped:
                return RowResult([], [f"{side.dropped[0]} ({name})"], lost=lost, tokens=tokens)
            if len(side.documents) != 1:
                return RowResult([], [f"{name} {SEVERAL_ANSWERS}"], lost=lost, tokens=tokens)
        chosen, rejected = (side.documents[0] for side in sides)
        if np.array_equal(chosen.ids, rejected.ids):
            return RowResult([], ["chosen and rejected are equal"], lost=lost, tokens=tokens)
        facts = sides[0].facts + sides[1].facts + Counter(dialogues=given.is_dialogue)
        return RowResult([chosen, replace(rejected, desirable=False)], [], facts, lost=lost, tokens=tokens)

    def _labelled(self, given: LabelledRecord, origin: int, format_: Format) -> RowResult:
        made = self._result(self._bounded(given.record), origin, format_)
        if len(made.documents) > 1:
            return replace(made, documents=[], dropped=[f"completion {SEVERAL_ANSWERS}"])
        return replace(made, documents=[replace(each, desirable=given.desirable) for each in made.documents])

    def _bounded(self, record: Record | DetectionRecord | Dropped) -> Record | DetectionRecord | Dropped:
        """Leave out or cut what data.max_length has no room for: a megabyte takes seconds to tokenise."""
        most = CHARACTERS_PER_TOKEN * self.max_length
        if isinstance(record, Dropped) or _characters(record) <= most:
            return record
        if self.split and isinstance(record, TextRecord):
            return record
        if self.truncate and isinstance(record, TextRecord):
            return TextRecord(record.text[:most])
        if self.truncate and isinstance(record, PairRecord) and len(record.prompt) < most:
            return PairRecord(record.prompt, record.completion[: most - len(record.prompt)])
        return Dropped(TOO_MANY_CHARACTERS)

    def _opened(
        self, given: Record | DetectionRecord | Dropped, format_: Format
    ) -> tuple[Record | Dropped, list[ImageFacts]]:
        """Read the images of a record. A detection record becomes a conversation, because the image's size is then
        known. A row with unreadable images becomes Dropped."""
        references = references_of(given)
        if not references or self.images is None:
            return (given if not isinstance(given, DetectionRecord) else Dropped(NO_PROCESSOR)), []
        found = facts_of(references, format_.image_root, self.images)
        if isinstance(found, Dropped):
            return found, []
        facts, sizes = found
        return (given.conversation(*sizes[0]) if isinstance(given, DetectionRecord) else given), facts

    def _document(
        self, encoded: TokenRow, answer: Span | None, origin: int, images: Sequence[ImageFacts]
    ) -> Document | Dropped:
        placed = place_images(encoded, images, self.images)
        if isinstance(placed, Dropped):
            return placed
        encoded, answer = placed.row, placed.moved(answer)
        ids, targets = np.asarray(encoded[0], np.int32), np.asarray(encoded[1], np.bool_)
        targets[:1] = False
        too_long = len(ids) > self.max_length
        if not targets.any():
            return Dropped(NO_TARGET)
        if too_long and not self.truncate:
            return Dropped(TOO_LONG)
        if placed.end > self.max_length:
            return Dropped(f"{TOO_LONG}, image tokens are not cut")
        cut = max(0, len(ids) - self.max_length)
        ids, targets = ids[: self.max_length], targets[: self.max_length]
        if not targets.any():
            return Dropped(CUT_AWAY)
        span = _within(answer or _last_stretch(targets), len(ids))
        return Document(ids, targets, span, origin, cut, tuple(images[: placed.count]))

    def _encode(self, record: Record, where: str) -> RenderedRows | Dropped:
        """`where`: the source and the row, for errors."""
        if isinstance(record, TokenRecord):
            return self._tokens(record, where)
        if isinstance(record, ChatRecord):
            if self._chat is None:
                written = self.images.written if self.images else None
                self._chat = ChatRenderer(
                    self.tokenizer, system_prompt=self.system_prompt, learn_all=self.learn_all,
                    last_only=self.last_only, written=written, variables=self.template_args,
                    folds_system=self.version > 2,
                )  # fmt: skip
            return self._chat.render(record)
        if isinstance(record, TextRecord):
            if not record.text.strip() and record.starts and record.ends:
                return Dropped("text is empty")
            return self._text(record)
        return self._pair(record)

    def _text(self, record: TextRecord) -> RenderedRows:
        """A document, in pieces where it is too long and `split` requires it; all of them hold each token once, apart
        from the overlap, which is context."""
        plain = self._plain(record.text)
        has_start = record.starts and bool(self.prefix) and plain[: len(self.prefix)] == self.prefix
        has_end = record.ends and self._ends(record.text, plain)
        starts = self.prefix if record.starts and not has_start else []
        ids = starts + plain + ([self._end()] if record.ends and not has_end else [])
        facts = Counter(rendered=1) if has_start or has_end else Counter()
        return self._pieces(ids, facts)

    def _tokens(self, record: TokenRecord, where: str) -> RenderedRows | Dropped:
        """Raises DataError for a token that the tokenizer does not have, unless broken rows are left out."""
        if not record.ids:
            return Dropped("input_ids is empty")
        wrong = next((token for token in record.ids if not 0 <= token <= self.largest_id), None)
        if wrong is not None and self.skip_broken:
            return Dropped("input_ids has a token that the tokenizer does not have")
        if wrong is not None:
            raise DataError(
                f"source {where}: input_ids has the token {wrong:,}, but the tokenizer has 0 to {self.largest_id:,}",
                expected="tokens of the model's own tokenizer",
                fix="set model.tokenizer to the one that produced these rows; or add --set data.broken=skip to "
                "leave out such rows",
            )
        if all(record.targets):
            return self._pieces(list(record.ids), Counter())
        return RenderedRows([(list(record.ids), list(record.targets))])

    @cached_property
    def largest_id(self) -> int:
        """The largest id of a token."""
        return max(self.tokenizer.get_vocab().values())

    def _pieces(self, ids: list[int], facts: Counter[str]) -> RenderedRows:
        """The tokens of a document, in pieces where they are too many and `split` requires it."""
        if not self.split or len(ids) <= self.max_length:
            return RenderedRows([(ids, [True] * len(ids))], facts=facts)
        spans = piece_spans(len(ids), self.max_length, self.overlap)
        rows: list[TokenRow | Dropped] = []
        for start, stop in spans:
            context = self.overlap if start else 0
            rows.append((ids[start:stop], [False] * context + [True] * (stop - start - context)))
        return RenderedRows(rows, facts=facts + Counter(split=1, pieces=len(rows)))

    def _pair(self, record: PairRecord) -> RenderedRows | Dropped:
        """Dropped if the completion is empty. Prompt and completion are tokenised separately, because at inference the
        model is given the prompt's tokens alone."""
        if not record.completion:
            return Dropped("completion is empty")
        prompt, completion = self._plain(record.prompt), self._plain(record.completion)
        has_start = bool(self.prefix) and prompt[: len(self.prefix)] == self.prefix
        has_end = self._ends(record.completion, completion)
        if has_end and record.has_markers:
            completion = self._plain(record.completion.rstrip())
        prompt = prompt if has_start else self.prefix + prompt
        completion = completion if has_end else [*completion, self._end()]
        facts = Counter(marked=1) if record.has_markers else Counter(rendered=has_start or has_end)
        row = prompt + completion, [self.learn_all] * len(prompt) + [True] * len(completion)
        return RenderedRows([row], answer=(len(prompt), len(row[0])), facts=+facts)

    def _ends(self, text: str, ids: list[int]) -> bool:
        """Whether a text, whose tokens are `ids`, brings its end itself: a token that ends an answer, with nothing but
        white space behind it."""
        if text[-1:].isspace():
            return ends_text(self.tokenizer, ids, self.ends)
        return bool(ids) and ids[-1] in self.ends

    @cached_property
    def ends(self) -> frozenset[int]:
        """The ids of all tokens that end an answer."""
        return frozenset(end_ids(self.tokenizer))

    @property
    def prefix(self) -> list[int]:
        """Tokens that the tokenizer adds before a text, such as beginning-of-sequence."""
        if self._prefix is None:
            full, plain = self.tokenizer("a")["input_ids"], self._plain("a")
            starts = [k for k in range(len(full) - len(plain) + 1) if full[k : k + len(plain)] == plain]
            if not starts:
                raise DataError(
                    "the tokenizer changes a text when it adds special tokens to it",
                    expected="special tokens only before and after the text",
                    fix="use conversations with a chat template, which places its own special tokens",
                )
            self._prefix = list(full[: starts[-1]])
        return self._prefix

    def _plain(self, text: str) -> list[int]:
        known = self._known.get(text)
        if known is not None:
            return list(known)
        # Long texts are cut into pieces of data.max_length, so its length needs no warning.
        given = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(given["input_ids"])

    def _end(self) -> int:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so the model could not learn where to stop",
                fix="set eos_token in the tokenizer's tokenizer_config.json",
            )
        return int(end)

    def fingerprint_parts(self) -> list[str]:
        """Everything that determines the tokens."""
        settings = (self.max_length, self.truncate, self.learn_all, self.system_prompt)
        images = [] if self.images is None else self.images.fingerprint_parts()
        # Settings at their default add nothing, so that data prepared before they existed are the same.
        added = ["last"] if self.last_only else []
        added += [json.dumps(self.template_args, sort_keys=True)] if self.template_args else []
        return [tokenizer_hash(self.tokenizer), repr(settings), *images, *added]
