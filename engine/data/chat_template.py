"""Renders conversations with the tokenizer's chat template, a Jinja program by the model's author: it may raise any
exception, expect messages in a shape of its own, or never end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.data.template_limits import RENDER_CPU_SECONDS, RenderFailure, RenderTimeout, render
from engine.errors import DataError

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Templates that mark the assistant's text; the pattern of transformers (`render_jinja_template`)."""

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables that switch thinking on or off: of Qwen, GLM, Nemotron, SmolLM; of DeepSeek and Granite."""

LONGEST_ENDING = 1000
"""Characters behind the last answer, of which an end of the conversation is looked for."""

PROBES = ("\ue000", "\ue001")
"""Message contents for test renderings: private-use characters, which no template contains."""

MAX_STOPPED = 3
"""Renderings that may be stopped before the template is refused."""

Message = dict[str, Any]

Tools = list[dict[str, Any]] | None

Mode = dict[str, bool]
"""Thinking switches given to the template; empty at inference by default."""

Span = tuple[int, int]
"""Start and end (exclusive) of a range of characters in the rendered text."""


class TemplateRefusal(Exception):
    """The template cannot render this conversation; the text is the reason."""


REFUSAL = "the chat template"
"""How the reasons begin for which a row is dropped that the template does not render."""


class ChatTemplate:
    """Renders conversations. Raises DataError: the tokenizer has no chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        written: tuple[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`written`: (the text that the template writes for an image, the text that a processor replaces it by).
        `variables` are given to every rendering."""
        self.text, self._written, self._variables = find_template(tokenizer), written, dict(variables or {})
        self.special_tokens: dict[str, Any] = {**tokenizer.special_tokens_map}
        self.marks_assistant = bool(GENERATION_BLOCK.search(self.text))
        switches = [name for name in THINKING_SWITCHES if re.search(rf"\b{name}\b", self.text)]
        switches = [name for name in switches if name not in self._variables]
        self.thinking_modes: list[Mode] = [{name: value} for name in switches for value in (True, False)]
        self._stopped = 0
        self._ignores_tools: bool | None = None
        self.wants_parts, self.closing = False, ""
        self.wants_parts = self._reads_parts_only()
        self.closing = self._find_closing(special_texts(tokenizer))

    def render(
        self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False, mode: Mode | None = None
    ) -> str:
        """Text of a conversation without `closing`; with `prompt`, followed by the header that starts the answer.
        `mode` has the template's own variables, such as {"enable_thinking": False}.

        Raises TemplateRefusal, or DataError after MAX_STOPPED renderings timed out.
        """
        text, _ = self._rendered(messages, tools, add_generation_prompt=prompt, **(mode or {}))
        return text if prompt else text.removesuffix(self.closing)

    def render_marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        """Also the ranges of characters that {% generation %} blocks produced. Raises as `render` does."""
        text, spans = self._rendered(messages, tools, return_assistant_tokens_mask=True)
        text = text.removesuffix(self.closing)
        return text, [(start, min(stop, len(text))) for start, stop in spans if start < len(text)]

    def leaves_out_tools(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Whether there are tools, and they change nothing of the text: asked of the first conversation with some."""
        if tools and self._ignores_tools is None:
            try:
                self._ignores_tools = self.render(messages, tools) == self.render(messages, None)
            except TemplateRefusal:
                self._ignores_tools = False
        return bool(tools and self._ignores_tools)

    def refuses_system(self) -> bool:
        """Whether the template takes a conversation, but not after a system turn."""
        turns: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            self.render(turns, None)
        except TemplateRefusal:
            return False
        try:
            self.render([{"role": "system", "content": "c"}, *turns], None)
        except TemplateRefusal:
            return True
        return False

    def _rendered(self, messages: Sequence[Message], tools: Tools, **options: bool) -> tuple[str, list[Span]]:
        shaped = [_with_parts(message) for message in messages] if self.wants_parts else list(messages)
        given: dict[str, Any] = {**self.special_tokens, "tools": tools, "chat_template": self.text, **self._variables}
        given |= options
        try:
            text, spans = render(shaped, given)
        except RenderTimeout:
            raise self._timeout() from None
        except RenderFailure as failure:
            raise TemplateRefusal(f"{REFUSAL} {failure}") from failure
        return self._replaced(text, spans)

    def _replaced(self, text: str, spans: list[Span]) -> tuple[str, list[Span]]:
        """The text after the replacements that a processor makes for images, and `spans` moved likewise."""
        if self._written is None:
            return text, spans
        old, new = self._written
        longer = len(new) - len(old)
        moved = [tuple(place + longer * text.count(old, 0, place) for place in span) for span in spans]
        return text.replace(old, new), [(start, stop) for start, stop in moved]

    def _timeout(self) -> Exception:
        self._stopped += 1
        if self._stopped < MAX_STOPPED:
            return TemplateRefusal(f"the chat template does not end within {RENDER_CPU_SECONDS:g} s")
        return DataError(
            f"the chat template exceeded {RENDER_CPU_SECONDS:g} s of CPU time {MAX_STOPPED} times",
            fix="set model.chat_template to a template that terminates",
        )

    def _reads_parts_only(self) -> bool:
        """Whether the template leaves out content given as a string, but renders a list of parts."""
        message = {"role": "user", "content": PROBES[0]}
        return not self._shows(message) and self._shows(_with_parts(message))

    def _find_closing(self, special: Collection[str]) -> str:
        """What the template writes at the end of a conversation, behind the end of its last turn and with a special
        token of its own: Phi-3's end of sequence. A model that learned it would learn two ends, and generation stops at
        the first. Empty if an answer that another turn follows ends as the last one does, or in another token
        (gpt-oss)."""
        exchange = [{"role": role, "content": probe} for role, probe in zip(("user", "assistant"), PROBES, strict=True)]
        try:
            last, earlier = (self.render(exchange * turns, None).split(PROBES[1])[1] for turns in (1, 2))
        except (TemplateRefusal, IndexError):
            return ""
        if max(len(last), len(earlier)) > LONGEST_ENDING:
            return ""
        pieces = re.compile("|".join([*map(re.escape, sorted(special, key=len, reverse=True)), "."]), re.DOTALL)
        ending = pieces.findall(last)
        same = common_length([ending, pieces.findall(earlier)])
        closes = set(special).intersection
        return "".join(ending[same:]) if closes(ending[:same]) and closes(ending[same:]) else ""

    def _shows(self, message: Message) -> bool:
        try:
            return PROBES[0] in self.render([message], None)
        except TemplateRefusal:
            return False


def markers_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts by which a row shows that it went through the chat template already: the special tokens around turns,
    and what stands between a question and its answer."""
    exchange = [{"role": role, "content": probe} for role, probe in zip(("user", "assistant"), PROBES, strict=True)]
    try:
        text = ChatTemplate(tokenizer).render(exchange, None)
    except TemplateRefusal:
        return []
    outer = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token}
    found = [token for token in special_texts(tokenizer) - outer if token in text]
    between = text.partition(PROBES[0])[2].partition(PROBES[1])[0].strip()
    return found or [marker for marker in (between,) if len(marker) > 1]


def answer_opening(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template writes before an answer: its prompt for generation, or what stands between a
    question and its answer where it has none; "" where it renders neither."""
    exchange = [{"role": role, "content": probe} for role, probe in zip(("user", "assistant"), PROBES, strict=True)]
    template = ChatTemplate(tokenizer)
    try:
        asked = template.render(exchange[:1], None)
        prompted = template.render(exchange[:1], None, prompt=True)
        between = template.render(exchange, None).partition(PROBES[0])[2].partition(PROBES[1])[0]
    except TemplateRefusal:
        return ""
    added = prompted.removeprefix(asked) if prompted.startswith(asked) else ""
    return added if added.strip() else between if between.strip() else ""


def common_length(texts: Sequence[Sequence[str]]) -> int:
    """How many characters, or pieces of text, all of `texts` begin with alike."""
    return sum(1 for _ in takewhile(lambda alike: len(set(alike)) == 1, zip(*texts, strict=False)))


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token with which the chat template ends an answer, such as <|im_end|>: base models often name another
    one as their end of sequence. None: there is no template, or it ends answers with plain text."""
    if not tokenizer.chat_template:
        return None
    question, answer = (
        {"role": role, "content": probe} for role, probe in zip(("user", "assistant"), PROBES, strict=True)
    )
    try:
        text = ChatTemplate(tokenizer).render([question, answer], None)
    except TemplateRefusal:
        return None
    behind = tokenizer(text.rpartition(PROBES[1])[2], add_special_tokens=False)["input_ids"]
    return next((int(token) for token in behind if token in special_ids(tokenizer)), None)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {int(index) for index in tokenizer.all_special_ids} | added


def special_texts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {text for text in (*tokenizer.all_special_tokens, *added) if text}


def unused_variables(tokenizer: PreTrainedTokenizerBase, variables: Iterable[str]) -> list[str]:
    """A sentence for each variable of data.template_args that the chat template does not have."""
    text = str(tokenizer.chat_template or "")
    return [
        f"data.template_args.{name} has no effect: the chat template has no variable of this name"
        for name in variables
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)
    ]


def find_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Raises DataError when the tokenizer has none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise DataError(
            "the data contains conversations, but the tokenizer has no chat template",
            expected="a tokenizer of an instruction-tuned model, or your own template",
            fix='set model.chat_template = "my_template.jinja", or use prompt and completion columns',
        )
    return str(template)


def tool_call_shapes(messages: list[Message]) -> Iterator[list[Message]]:
    """The conversation with its tool calls in the shapes that templates read: arguments as objects, which is what
    servers give the template, also for arguments that are written as JSON text; then as JSON text (DeepSeek
    concatenates them), and as JSON text with null as the content of messages that only call tools."""
    if not any(message.get("tool_calls") for message in messages):
        yield messages
        return
    yield _with_arguments(messages, _as_object)
    as_text = _with_arguments(messages, _as_text)
    yield as_text
    yield [
        {**message, "content": message["content"] or None} if message.get("tool_calls") else message
        for message in as_text
    ]


def _with_arguments(messages: list[Message], convert: Callable[[Any], Any]) -> list[Message]:
    changed = []
    for message in messages:
        if isinstance(message.get("tool_calls"), list):
            message = {**message, "tool_calls": [_with_call_arguments(call, convert) for call in message["tool_calls"]]}
        changed.append(message)
    return changed


def _with_call_arguments(call: Any, convert: Callable[[Any], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _with_call_arguments(call["function"], convert)}
    return {**call, "arguments": convert(call.get("arguments"))}


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_text(arguments: Any) -> Any:
    if isinstance(arguments, str):
        return arguments
    try:
        return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return arguments


def _with_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
