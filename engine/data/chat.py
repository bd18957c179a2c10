"""Renders a conversation with the tokenizer's chat template and finds the tokens that the assistant wrote.

A template with {% generation %} blocks marks the assistant's text itself. With any other template, the conversation is
rendered up to each assistant turn and including it; the text between the two lengths is that turn. Where one of these
texts is not the beginning of the whole conversation's text, the data is refused: role names are never searched for.

Try: `tunedeck data -r RECIPE --show 1`, where RECIPE has chat data
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from engine.data.formats import ChatRecord, Dropped
from engine.errors import DataError

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""A template that matches marks the assistant's text. The same pattern as in transformers (`render_jinja_template`)."""

Span = tuple[int, int]
"""Start and end (exclusive) of a range of characters in the rendered text."""


class ChatRenderer:
    """Turns conversations into token ids, and a flag for each token that is learned.

    Raises DataError: the tokenizer has no chat template, or does not report which characters a token covers.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, system_prompt: str | None, learn_all: bool
    ) -> None:
        self.tokenizer, self.system_prompt, self.learn_all = tokenizer, system_prompt, learn_all
        self.template = find_template(tokenizer)
        self.marks_assistant = bool(GENERATION_BLOCK.search(self.template))
        if not tokenizer.is_fast:
            raise DataError(
                "conversations need a tokenizer that says which characters each token covers, and this one does not",
                fix="use a model that ships tokenizer.json, or prompt and completion columns",
            )
        self.special_ids = set(tokenizer.all_special_ids) | {
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def tokens(self, record: ChatRecord) -> tuple[list[int], list[bool]] | Dropped:
        """Token ids of the conversation, and whether each is learned.

        Raises DataError where the template does not allow telling which tokens the assistant wrote.
        """
        messages = self._with_system(record.messages)
        try:
            text = self._render(messages, record)
            if self.learn_all:
                spans = [(0, len(text))]
            elif self.marks_assistant:
                spans = self._marked_spans(messages, record, text)
            else:
                spans = self._turn_spans(messages, record, text)
        except jinja2.TemplateError as error:
            return Dropped(f"the chat template refuses it: {' '.join(str(error).split())[:120]}")
        flagged = self._flagged(text, spans)
        if not isinstance(flagged, Dropped) and messages[-1]["role"] == "assistant":
            self._end_turn(*flagged)
        return flagged

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.system_prompt is None or any(turn["role"] in ("system", "developer") for turn in messages):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _render(self, messages: Sequence[dict[str, Any]], record: ChatRecord, *, prompt: bool = False) -> str:
        return str(self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, **self._options(record)
        ))

    def _options(self, record: ChatRecord) -> dict[str, Any]:
        """Keyword arguments that every rendering of a conversation shares."""
        return {"tools": record.tools, "chat_template": self.template}

    def _marked_spans(self, messages: list[dict[str, Any]], record: ChatRecord, text: str) -> list[Span]:
        """Ranges of the text that the template's {% generation %} blocks produced."""
        special: dict[str, Any] = {**self.tokenizer.special_tokens_map}
        result: Any = render_jinja_template(  # annotated as str in transformers 5.23, which is wrong
            [messages], return_assistant_tokens_mask=True, **special, **self._options(record)
        )
        rendered, spans = result
        if rendered[0] != text:
            raise DataError(
                f"{record.place}: the chat template renders the same conversation in two ways",
                fix="take clocks and random choices out of the template",
            )
        return [(start, stop) for start, stop in spans[0]]

    def _turn_spans(self, messages: list[dict[str, Any]], record: ChatRecord, text: str) -> list[Span]:
        """Ranges of the text of each assistant turn, from the end of its prompt to its own end."""
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:turn], record, prompt=True)
            answered = self._render(messages[: turn + 1], record)
            if not (text.startswith(answered) and answered.startswith(prompt)):
                raise DataError(
                    f"{record.place}: the chat template renders turn {turn + 1} differently once the conversation "
                    "goes on, so the assistant's tokens cannot be told from the rest",
                    expected="a template whose output only grows with each turn, or one with {% generation %} blocks",
                    fix="set model.chat_template to a template that puts {% generation %} … {% endgeneration %} around "
                    'the assistant\'s text, or learn everything with data.loss_on = "all"',
                )
            spans.append((len(prompt), len(answered)))
        return spans

    def _flagged(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]] | Dropped:
        """Tokenise the whole text and flag the tokens inside one of `spans`."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = list(encoded["input_ids"]), encoded["offset_mapping"]
        flags = [False] * len(ids)
        for start, stop in spans:
            inside = [token for token, (first, last) in enumerate(places) if first < stop and last > start]
            if inside and places[inside[0]][0] < start:
                # Generation starts at the end of the prompt, so it never produces a token that begins before it.
                return Dropped("a token spans the end of the prompt and the start of the answer")
            for token in self._without_tail(ids, inside, text, places):
                flags[token] = True
        return ids, flags

    def _without_tail(self, ids: list[int], inside: list[int], text: str, places: Sequence[Span]) -> list[int]:
        """Tokens of one range, without the white space that a template adds after its end-of-turn token."""
        last = next((k for k in reversed(range(len(inside))) if ids[inside[k]] in self.special_ids), None)
        if last is None or self.learn_all:
            return inside
        tail = text[places[inside[last]][1] : places[inside[-1]][1]]
        return inside[: last + 1] if not tail.strip() else inside

    def _end_turn(self, ids: list[int], flags: list[bool]) -> None:
        """Add end-of-sequence where no special token ends the last answer: else the model never learns to stop."""
        end = self.tokenizer.eos_token_id
        last = next((token for token in reversed(range(len(ids))) if flags[token]), None)
        if end is None or last is None or any(token in self.special_ids for token in ids[last:]):
            return
        ids.append(end)
        flags.append(True)


def find_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's own chat template. Raises DataError when it has none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise DataError(
            "the data are conversations and the tokenizer has no chat template",
            expected="a tokenizer of an instruction-tuned model, or a template of your own",
            fix='set model.chat_template = "my_template.jinja", or use prompt and completion columns',
        )
    return str(template)
