"""Turns records into tokens and targets: adds beginning- and end-of-sequence, marks what is learned, cuts or drops.

A `Tokeniser` is small enough to be sent to worker processes. Nothing is read or written here.

Try: `tunedeck data -r demo --show 2`
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from engine.data.chat import ChatRenderer, RenderedRows, TokenRow
from engine.data.chat_template import Span
from engine.data.formats import ChatRecord, Dropped, Format, PairRecord, Record, TextRecord
from engine.errors import DataError
from engine.spec.schema.recipe import Data

TOO_LONG = "longer than data.max_length"
NO_TARGET = "no token to learn"
"""Reasons for which the tokeniser drops a row."""


@dataclass(frozen=True)
class Document:
    """One sample of S tokens."""

    ids: NDArray[np.int32]
    targets: NDArray[np.bool_]
    answer: tuple[int, int]
    """First token of the last answer, and the token after it; of plain text, its second half."""
    origin: int
    """Row of the source, counted from 0."""
    truncated: bool
    """Whether tokens were cut off."""


@dataclass(frozen=True)
class RowResult:
    """The documents made from one row of a source, and the reasons for what was dropped of it."""

    documents: list[Document]
    dropped: list[str]
    """Reasons for dropping the row, or single turns of its conversation."""
    facts: Counter[str] = field(default_factory=Counter)
    """How a conversation was rendered: counts by the names in `engine.data.report.CHAT_FACTS`."""


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Fingerprint of everything in a tokenizer that changes tokens: vocabulary, rules, special tokens, template."""
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
    """The last contiguous stretch of targets: its first token and the token after it."""
    last = int(np.flatnonzero(targets)[-1])
    before = np.flatnonzero(~targets[: last + 1])
    return (int(before[-1]) + 1 if len(before) else 0), last + 1


def _within(answer: Span, length: int) -> Span:
    """The answer within a document of `length` tokens, never its first token: a prompt has at least one. If the answer
    was cut off, it is the second half of the document."""
    start, end = max(1, answer[0]), min(length, answer[1])
    return (start, end) if start < end else (max(1, length // 2), length)


class Tokeniser:
    """Turns the rows of a source into documents, as the recipe's [data] table says."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
        self.tokenizer = tokenizer
        self.max_length, self.truncate = data.max_length, data.over_length == "truncate"
        self.learn_all, self.system_prompt = data.loss_on == "all", data.system_prompt
        self._chat: ChatRenderer | None = None
        self._prefix: list[int] | None = None

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def results(self, format_: Format, rows: Sequence[dict[str, Any]], first: int) -> list[RowResult]:
        """The result of each row. `first` is the number of the first of `rows` in its source.

        Raises DataError where the tokenizer or its template cannot handle the format.
        """
        return [self._result(format_.record(row), first + place) for place, row in enumerate(rows)]

    def _result(self, record: Record | Dropped, origin: int) -> RowResult:
        encoded = record if isinstance(record, Dropped) else self._encode(record)
        rendered = RenderedRows([encoded]) if isinstance(encoded, Dropped) else encoded
        made = [
            row if isinstance(row, Dropped) else self._document(row, rendered.answer, origin) for row in rendered.rows
        ]
        documents = [document for document in made if isinstance(document, Document)]
        facts = Counter(turn_rows=len(documents)) if rendered.facts["per_turn"] else Counter()
        return RowResult(documents, [drop.reason for drop in made if isinstance(drop, Dropped)], rendered.facts + facts)

    def _document(self, encoded: TokenRow, answer: Span | None, origin: int) -> Document | Dropped:
        ids, targets = np.asarray(encoded[0], np.int32), np.asarray(encoded[1], np.bool_)
        targets[:1] = False
        too_long = len(ids) > self.max_length
        if not targets.any():
            return Dropped(NO_TARGET)
        if too_long and not self.truncate:
            return Dropped(TOO_LONG)
        ids, targets = ids[: self.max_length], targets[: self.max_length]
        if not targets.any():
            return Dropped(f"{NO_TARGET} once cut to data.max_length")
        return Document(ids, targets, _within(answer or _last_stretch(targets), len(ids)), origin, too_long)

    def _encode(self, record: Record) -> RenderedRows | Dropped:
        if isinstance(record, ChatRecord):
            if self._chat is None:
                self._chat = ChatRenderer(self.tokenizer, system_prompt=self.system_prompt, learn_all=self.learn_all)
            return self._chat.render(record)
        if isinstance(record, TextRecord):
            if not record.text.strip():
                return Dropped("text is empty")
            ids = self.prefix + self._plain(record.text) + [self._end()]
            return RenderedRows([(ids, [True] * len(ids))], answer=(min(len(ids), self.max_length) // 2, len(ids)))
        return self._pair(record)

    def _pair(self, record: PairRecord) -> RenderedRows | Dropped:
        """Tokenise prompt and completion separately: at inference the model is given the prompt's tokens alone."""
        if not record.completion:
            return Dropped("completion is empty")
        prompt = self.prefix + self._plain(record.prompt)
        completion = [*self._plain(record.completion), self._end()]
        row = prompt + completion, [self.learn_all] * len(prompt) + [True] * len(completion)
        return RenderedRows([row], answer=(len(prompt), len(row[0])))

    @property
    def prefix(self) -> list[int]:
        """Tokens that the tokenizer adds before a text, such as beginning-of-sequence."""
        if self._prefix is None:
            full, plain = self.tokenizer("a")["input_ids"], self._plain("a")
            starts = [k for k in range(len(full) - len(plain) + 1) if full[k : k + len(plain)] == plain]
            if not starts:
                raise DataError(
                    "the tokenizer changes a text when it adds special tokens to it",
                    expected="special tokens only before and behind the text",
                    fix="use conversations with a chat template, which places its own special tokens",
                )
            self._prefix = list(full[: starts[-1]])
        return self._prefix

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _end(self) -> int:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so nothing could be learned about where to stop",
                fix="set eos_token in the tokenizer's tokenizer_config.json",
            )
        return int(end)

    def fingerprint_parts(self) -> list[str]:
        """Everything that determines the tokens, as texts for a fingerprint."""
        settings = (self.max_length, self.truncate, self.learn_all, self.system_prompt)
        return [tokenizer_hash(self.tokenizer), repr(settings)]
