"""Renders a conversation to tokens and their label mask: which tokens are targets, that is, which the assistant wrote.

A conversation becomes one row if the template only appends text with each turn. If it rewrites earlier turns (Qwen3
drops their thinking, gpt-oss their end token), each assistant turn becomes a row: its inference prompt, then the
answer.

An answer starts where the inference prompt ends, or a {% generation %} block of the template begins. Role names are
never searched for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.data.chat_template import (
    PROBES,
    REFUSAL,
    ChatTemplate,
    Message,
    Mode,
    Span,
    TemplateRefusal,
    Tools,
    common_length,
    is_unicode,
    special_ids,
    tool_call_shapes,
)
from engine.data.conversations import (
    contains,
    ends_thinking,
    require_complete,
    system_folded,
    thinking_of,
    without_thinking,
)
from engine.data.end_tokens import end_ids, ends_text
from engine.data.records import NO_TARGET, ChatRecord, Dropped
from engine.errors import DataError

TOKEN_SPANS_START = "a token spans the end of the prompt and the start of the answer"

TokenRow = tuple[list[int], list[bool]]
"""Token ids, and whether each is a target."""


@dataclass(frozen=True)
class RenderedRows:
    """The rows of one record, such as a conversation."""

    rows: list[TokenRow | Dropped]
    answer: Span | None = None
    """The last answer as (first token, token after it); None: the last stretch of target tokens."""
    facts: Counter[str] = field(default_factory=Counter)
    """Counts by the names in `engine.data.report.CHAT_FACTS`."""


@dataclass(frozen=True)
class AssistantTurn:
    """The rendered conversation up to and including an assistant turn."""

    text: str
    start: int
    """Index in `text` of the answer's first character."""
    in_whole: bool
    """Whether `text` is what the template renders up to this turn, with nothing changed to find the answer."""
    prompted: bool
    """Whether `text` starts with a prompt that the template gives at inference."""
    context: tuple[Span, ...] = ()
    """Ranges of characters of `text` that are context, as parts of the turn say."""

    @property
    def answer(self) -> str:
        return self.text[self.start :]

    @property
    def learned(self) -> list[Span]:
        """The ranges of characters that are targets."""
        return _without([(self.start, len(self.text))], self.context)

    def with_context(self, message: Message, spans: Sequence[Span]) -> AssistantTurn:
        """Return the turn with ranges of characters of the message's content as context. Raises TemplateRefusal where
        the template changes the content."""
        content = message["content"]
        lead, place = len(content) - len(content.lstrip()), self.text.rfind(content.strip(), self.start)
        if place < 0:
            raise TemplateRefusal("the chat template changes the text of a turn of which a part is not learned")
        moved = [(max(place, start - lead + place), stop - lead + place) for start, stop in spans]
        return replace(self, context=tuple((start, min(stop, len(self.text))) for start, stop in moved))


class ChatRenderer:
    """Renders conversations to rows of token ids with a label mask.

    Raises DataError: the tokenizer has no chat template, or does not report which characters a token covers.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None,
        learn_all: bool,
        last_only: bool = False,
        written: tuple[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
        folds_system: bool = True,
    ) -> None:
        """`learn_all`: every token is a target, not answers alone; `last_only`: the last answer alone is. `written`:
        (the text that the template writes for an image, the text that replaces it). `variables` of the template.
        `folds_system`: a system turn that the template rejects or leaves out goes into the first user turn."""
        self.tokenizer, self.system_prompt, self.learn_all = tokenizer, system_prompt, learn_all
        self.last_only, self.folds_system = last_only, folds_system
        self.template = ChatTemplate(tokenizer, written, variables)
        if not tokenizer.is_fast:
            raise DataError(
                "conversations need a tokenizer that reports character offsets, and this one does not",
                fix="use a model that ships tokenizer.json, or prompt and completion columns",
            )
        self.special_ids = special_ids(tokenizer)
        self.ends = frozenset(end_ids(tokenizer))

    def render(self, record: ChatRecord) -> RenderedRows | Dropped:
        """The rows, or why the conversation is dropped. Raises DataError after MAX_STOPPED renderings timed out."""
        messages = self._with_system(record.messages)
        context = frozenset[int]() if self.learn_all and record.from_pair else record.untrained
        record = _moved(record, len(messages) - len(record.messages))
        untrained = {number + len(messages) - len(record.messages) for number in context}
        if self.last_only:
            untrained |= set(_assistant_turns(messages)[:-1])
        rendered = self._in_some_shape(messages, record, untrained)
        if isinstance(rendered, Dropped) and self.folds_system and (folded := system_folded(messages)):
            again = self._in_some_shape(folded, _moved(record, -1), {number - 1 for number in untrained})
            if not isinstance(again, Dropped):
                return replace(again, facts=again.facts + Counter(system_folded=1))
        return rendered

    def _in_some_shape(
        self, messages: list[Message], record: ChatRecord, untrained: Collection[int]
    ) -> RenderedRows | Dropped:
        """The rows, with tool calls in the first shape that the template reads; else the reason of the first."""
        first_refusal = ""
        for shape in tool_call_shapes(messages):
            try:
                rendered = self._rows(shape, record.tools, untrained, record.context)
            except TemplateRefusal as refusal:
                first_refusal = first_refusal or str(refusal)
                continue
            if shape != messages or self.template.wants_parts:
                rendered.facts["reshaped"] += 1
            if self.template.closing:
                rendered.facts["unclosed"] += 1
            if not rendered.rows:
                return Dropped(NO_TARGET)
            rendered.facts["untrained"] += 0 if record.from_pair else len(record.untrained)
            rendered.facts["from_pair"] += record.from_pair
            rendered.facts["part_context"] += len(record.context)
            rendered.facts["asked"] += record.asked
            rendered.facts["tools_wrapped"] += record.tools_wrapped
            rendered.facts["tools_left_out"] += self.template.leaves_out_tools(shape, record.tools)
            return replace(rendered, facts=+rendered.facts)
        return Dropped(first_refusal)

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if self.system_prompt is None or any(turn["role"] in ("system", "developer") for turn in messages):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _rows(
        self,
        messages: list[Message],
        tools: Tools,
        untrained: Collection[int],
        context: Mapping[int, Sequence[Span]],
    ) -> RenderedRows:
        """The rows; tool calls already have one of the shapes of `tool_call_shapes`, the answers numbered in
        `untrained` are context, and so are the ranges of characters `context` of their contents. Raises TemplateRefusal
        when the template does not render the whole conversation."""
        whole = self.template.render(messages, tools)
        if not is_unicode(whole):
            raise TemplateRefusal("its text is not valid Unicode")
        if self.learn_all:
            require_complete(messages, whole, None)
            turns = self._turns(messages, tools, whole, context) if untrained or context else {}
            kept_apart = [turn for number, turn in turns.items() if number in untrained or turn.context]
            if not all(whole.startswith(turn.text) for turn in kept_apart):
                raise TemplateRefusal(
                    f"{REFUSAL} rewrites a finished turn that is excluded from training, which data.loss_on = "
                    '"all" does not support'
                )
            spans = _outside([(0, len(whole))], turns, untrained)
            result = self._one_row(messages, whole, spans, untrained, inner=_inner(turns))
            return replace(result, answer=self._last_answer(messages, tools, whole))
        if self.template.marks_assistant:
            return self._marked_rows(messages, tools, whole, untrained, context)
        turns = self._turns(messages, tools, whole, context)
        require_complete(messages, whole, {number: turn.answer for number, turn in turns.items()})
        facts = _turn_facts(messages, turns)
        trained = {number: turn for number, turn in turns.items() if number not in untrained}
        if all(turn.in_whole and whole.startswith(turn.text) for turn in turns.values()):
            spans = [span for turn in trained.values() for span in turn.learned]
            stops = {turn.learned[-1][1] for turn in trained.values() if turn.learned}
            result = self._one_row(messages, whole, spans, untrained, inner=_inner(turns), stops=stops)
            if not isinstance(result.rows[0], Dropped):
                return replace(result, facts=result.facts + facts)
        return _per_turn([self._turn_row(turn) for turn in trained.values()], facts)

    def _one_row(
        self,
        messages: list[Message],
        whole: str,
        spans: Sequence[Span],
        untrained: Collection[int],
        *,
        inner: Collection[int] = (),
        stops: Collection[int] = (),
    ) -> RenderedRows:
        """`inner`: see `_flagged`. `stops`: ends of answers, behind which the next turn's marker is a target where the
        model stops at it."""
        facts = Counter(per_conversation=1)
        row = self._flagged(whole, spans, inner=inner, stops=stops, facts=facts)
        ends_trained = messages[-1]["role"] == "assistant" and len(messages) - 1 not in untrained
        if not isinstance(row, Dropped) and ends_trained:
            self._end_turn(*row)
        return RenderedRows([row], facts=facts)

    def _last_answer(self, messages: list[Message], tools: Tools, whole: str) -> Span | None:
        """(first token, token after the last one) of the last assistant turn in the rendered text `whole`; None if the
        template does not show where the turn starts."""
        turns = _assistant_turns(messages)
        if not turns:
            return None
        part = messages[: turns[-1] + 1]
        try:
            plain = self.template.render(part, tools) if len(part) < len(messages) else whole
            turn = self._turn(part, tools, plain)
        except TemplateRefusal:
            return None
        _, places = self._encoded(whole, 0)
        inside = [token for token, (first, last) in enumerate(places) if first >= turn.start and last <= len(turn.text)]
        return (inside[0], inside[-1] + 1) if inside and whole.startswith(turn.text) else None

    def _marked_rows(
        self,
        messages: list[Message],
        tools: Tools,
        whole: str,
        untrained: Collection[int],
        context: Mapping[int, Sequence[Span]],
    ) -> RenderedRows:
        """The rows, where the template marks target text with {% generation %} blocks."""
        text, spans = self.template.render_marked(messages, tools)
        if text != whole:
            raise TemplateRefusal("the chat template renders the same conversation in two ways")
        require_complete(messages, whole, None)
        if self._grows(messages, tools, whole):
            turns = self._turns(messages, tools, whole, context) if untrained or context else {}
            return self._one_row(messages, whole, _outside(spans, turns, untrained), untrained, inner=_inner(turns))
        turns, rows = self._turns(messages, tools, whole, context), []
        for number, turn in turns.items():
            if number in untrained:
                continue
            text, spans = self.template.render_marked(messages[: number + 1], tools)
            answer = _without([span for span in spans if span[1] > turn.start], turn.context)
            rows.append(self._turn_row(turn, answer if text == turn.text else None))
        return _per_turn(rows, _turn_facts(messages, turns))

    def _grows(self, messages: list[Message], tools: Tools, whole: str) -> bool:
        """Whether the rendered `whole` begins with the rendering of each part that ends with an assistant turn: the
        template then never rewrites earlier turns."""
        earlier = [messages[: number + 1] for number in _assistant_turns(messages) if number + 1 < len(messages)]
        try:
            return all(whole.startswith(self.template.render(part, tools)) for part in earlier)
        except TemplateRefusal:
            return True  # A template that renders only the whole conversation gives no text to compare.

    def _turns(
        self, messages: list[Message], tools: Tools, whole: str, context: Mapping[int, Sequence[Span]]
    ) -> dict[int, AssistantTurn]:
        """The assistant turns by their index in `messages`, with the ranges of characters `context` of their contents.

        Left out is a turn that the template refuses as an ending, such as a greeting before any question; other turns
        still have it as context. Raises TemplateRefusal when the template refuses all.
        """
        turns, first_refusal = {}, None
        for number in _assistant_turns(messages):
            try:
                plain = self.template.render(messages[: number + 1], tools) if number + 1 < len(messages) else whole
                turn = self._turn(messages[: number + 1], tools, plain)
                spans = context.get(number)
                turns[number] = turn.with_context(messages[number], spans) if spans else turn
            except TemplateRefusal as refusal:
                first_refusal = first_refusal or refusal
        if first_refusal and not turns:
            raise first_refusal
        return turns

    def _turn(self, messages: list[Message], tools: Tools, plain: str) -> AssistantTurn:
        """The assistant turn that ends `messages`; `plain` is what the template renders for them.

        If `plain` does not start with the default prompt (it may open a thinking block that the answer lacks), thinking
        switches are tried; one that changes text beyond the prompt only for answers with thinking.
        """
        thinking = thinking_of(messages[-1])
        history = messages[:-1]
        default_prompt = self._prompt(history, tools, {})
        if default_prompt is not None and plain.startswith(default_prompt):
            return AssistantTurn(plain, len(default_prompt), in_whole=True, prompted=True)
        for mode in self.template.thinking_modes:
            text = self.template.render(messages, tools, mode=mode)
            prompt = self._prompt(history, tools, mode)
            if prompt is None or not text.startswith(prompt):
                continue
            if text == plain or (thinking and contains(text[len(prompt) :], thinking)):
                return AssistantTurn(text, len(prompt), in_whole=text == plain, prompted=True)
        if default_prompt is not None and (turn := self._turn_after_rewrite(messages, tools, plain, default_prompt)):
            return turn
        return self._turn_by_content(messages, tools, plain, default_prompt)

    def _prompt(self, history: list[Message], tools: Tools, mode: Mode) -> str | None:
        """The inference prompt after the turns `history`; None if the template rejects to render it."""
        try:
            return self.template.render(history, tools, prompt=True, mode=mode)
        except TemplateRefusal:
            return None

    def _turn_after_rewrite(
        self, messages: list[Message], tools: Tools, plain: str, prompt: str
    ) -> AssistantTurn | None:
        """The last turn, if adding it makes the template remove thinking from earlier turns; else None.

        gpt-oss removes the thinking before a tool call once the final answer follows. So the conversation is rendered
        with all earlier thinking removed beforehand: the answer is the text after its prompt.
        """
        *history, message = messages
        bare = [without_thinking(turn) for turn in history]
        bare_prompt, bare_text = self._prompt(bare, tools, {}), self.template.render([*bare, message], tools)
        if bare_prompt is None or not bare_text.startswith(bare_prompt):
            return None
        answer = bare_text[len(bare_prompt) :]
        if not plain.endswith(answer):
            return None
        return AssistantTurn(prompt + answer, len(prompt), in_whole=False, prompted=True)

    def _turn_by_content(self, messages: list[Message], tools: Tools, text: str, prompt: str | None) -> AssistantTurn:
        """The last turn, where the rendered `text` does not start with the prompt.

        The answer starts at the first character that changes with the content, found by rendering two other contents.
        Finished turns may lack the end of the prompt, a closing thinking tag (Gemma 4) or an opening one with which the
        content also begins (DeepSeek-R1): then the turn's text is prompt plus answer, else `text`.
        """
        *history, message = messages
        probed = [self.template.render([*history, {**message, "content": probe}], tools) for probe in PROBES]
        start = common_length([text, *probed])
        if prompt is None:
            return AssistantTurn(text, start, in_whole=True, prompted=False)
        thinking, content = thinking_of(message), (message["content"] or "").lstrip()
        if ends_thinking(prompt) and not (thinking and contains(text[start:], thinking)):
            return AssistantTurn(prompt + text[start:], len(prompt), in_whole=False, prompted=True)
        opening = prompt[start:] if prompt.startswith(text[:start]) else ""
        if opening.strip() and content.startswith(opening.strip()):
            rest = content[len(opening.strip()) :]
            end = probed[0].rpartition(PROBES[0])[2]
            continued = prompt + (rest.lstrip("\n") if opening.endswith("\n") else rest) + end
            return AssistantTurn(continued, len(prompt), in_whole=False, prompted=True)
        return AssistantTurn(text, start, in_whole=True, prompted=False)

    def _turn_row(self, turn: AssistantTurn, spans: Sequence[Span] | None = None) -> TokenRow | Dropped:
        """`spans`: target characters, by default the answer. If a token would hold characters of prompt and answer, the
        two are tokenised separately."""
        spans = turn.learned if spans is None else spans
        inner = _inner({0: turn})
        row = self._flagged(turn.text, spans, inner=inner)
        if isinstance(row, Dropped):
            row = self._flagged(turn.text, spans, cut=turn.start, inner=inner)
        if not isinstance(row, Dropped):
            self._end_turn(*row)
        return row

    def _flagged(
        self,
        text: str,
        spans: Sequence[Span],
        *,
        cut: int = 0,
        inner: Collection[int] = (),
        stops: Collection[int] = (),
        facts: Counter[str] | None = None,
    ) -> TokenRow | Dropped:
        """Tokenise `text`; tokens inside `spans` of characters are targets. `cut` > 0: both sides are tokenised
        separately. `stops`: see `_one_row`; `facts` counts what was learned there, and answers without any end.

        Dropped if a token begins before a span and ends inside it, or if tokenising separately changes the text. A
        token that begins before a span whose start is in `inner`, behind context inside an answer, is a target.
        """
        ids, places = self._encoded(text[cut:], cut)
        if cut:
            before_ids, before_places = self._encoded(text[:cut], 0)
            ids, places = before_ids + ids, before_places + places
            if self._decoded(ids) != self._decoded(self._encoded(text, 0)[0]):
                return Dropped(TOKEN_SPANS_START)  # The tokenizer starts each piece with a space of its own.
        flags = [False] * len(ids)
        for start, stop in spans:
            inside = [token for token, (first, last) in enumerate(places) if first < stop and last > start]
            if inside and places[inside[0]][0] < start and start not in inner:
                # Generation starts at the end of the prompt, so it never produces a token that begins before it.
                return Dropped(TOKEN_SPANS_START)
            kept = self._without_tail(ids, inside, text, places)
            if stop in stops and stop < len(text) and not (kept and ids[kept[-1]] in self.ends):
                marker = self._stop_behind(ids, stop, text, places)
                kept = [*kept, *marker]
                if facts is not None:
                    facts["stops_at_marker" if marker else "endless"] += 1
            for token in kept:
                flags[token] = True
        return ids, flags

    def _stop_behind(self, ids: list[int], stop: int, text: str, places: Sequence[Span]) -> list[int]:
        """The tokens behind an answer up to the marker of the next turn, if the model stops at it; else none. `stop` is
        the end of the answer in `text`."""
        found = []
        for token in range(bisect_left(places, (stop, 0)), len(ids)):
            found.append(token)
            if ids[token] in self.ends:
                return found
            if text[slice(*places[token])].strip():
                break
        return []

    def _encoded(self, text: str, offset: int) -> tuple[list[int], list[Span]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = [(start + offset, stop + offset) for start, stop in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), places

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _without_tail(self, ids: list[int], inside: list[int], text: str, places: Sequence[Span]) -> list[int]:
        """Drop from the token indices `inside` the white space that the template adds after an end-of-turn token.
        `places` are the ranges of characters of all tokens."""
        last = next((k for k in reversed(range(len(inside))) if ids[inside[k]] in self.special_ids), None)
        if last is None or self.learn_all:
            return inside
        tail = text[places[inside[last]][1] : places[inside[-1]][1]]
        return inside[: last + 1] if not tail.strip() else inside

    def _end_turn(self, ids: list[int], flags: list[bool]) -> None:
        """Append an end-of-sequence target, to teach stopping, unless a special token ends the last answer already."""
        end = self.tokenizer.eos_token_id
        last = next((token for token in reversed(range(len(ids))) if flags[token]), None)
        if end is None or last is None or any(token in self.special_ids for token in ids[last:]):
            return
        if self.learn_all and ends_text(self.tokenizer, ids, self.ends):
            return  # The template writes a line break behind the end.
        ids.append(end)
        flags.append(True)


def _moved(record: ChatRecord, places: int) -> ChatRecord:
    """The record with the numbers of its messages in `context` changed by `places`."""
    if not places or not record.context:
        return record
    return replace(record, context={number + places: spans for number, spans in record.context.items()})


def _per_turn(rows: list[TokenRow | Dropped], facts: Counter[str]) -> RenderedRows:
    return RenderedRows(rows, facts=Counter(per_turn=1) + facts)


def _assistant_turns(messages: list[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _inner(turns: Mapping[int, AssistantTurn]) -> set[int]:
    """Return where learned text may begin inside an answer, behind context."""
    return {stop for turn in turns.values() for _, stop in turn.context}


def _outside(spans: Sequence[Span], turns: Mapping[int, AssistantTurn], untrained: Collection[int]) -> list[Span]:
    """The parts of `spans` outside what is context of `turns`: the answers that are untrained, and parts of others."""
    whole = [(turn.start, len(turn.text)) for number, turn in turns.items() if number in untrained]
    return _without(spans, [*whole, *(span for turn in turns.values() for span in turn.context)])


def _without(spans: Sequence[Span], removed: Sequence[Span]) -> list[Span]:
    """The parts of `spans` that are in none of `removed`."""
    kept = list(spans)
    for start, stop in removed:
        parts = [part for span in kept for part in ((span[0], min(span[1], start)), (max(span[0], stop), span[1]))]
        kept = [span for span in parts if span[0] < span[1]]
    return kept


def _turn_facts(messages: list[Message], turns: dict[int, AssistantTurn]) -> Counter[str]:
    """Count turns that are only context, answers that follow no inference prompt, and answers without their thinking.
    `turns` are the target turns by their index in `messages`."""
    facts = Counter(context_only=len(_assistant_turns(messages)) - len(turns))
    for number, turn in turns.items():
        facts["unprompted"] += not turn.prompted
        facts["thinking_left_out"] += not contains(turn.answer, thinking_of(messages[number]))
    return +facts
