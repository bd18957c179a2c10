"""Conversations as lists of messages: what each format's rows become, and what the content of a message may be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from engine.config.schema.data import Source
from engine.data.chat_template import Message, Span, TemplateRefusal
from engine.data.records import ChatRecord, Dropped, Record

LEFT_OUT = "the chat template leaves out"
"""First words of the drop reason."""
TOOL_CALL = "a tool call, or its arguments"
"""What the template leaves out of a turn with tool calls."""

THINKING_START = re.compile(r"\s*(?:<(?:\w+:)?(?:think|thinking|thought|reasoning)>|\[THINK\])\s*")
"""The prompt may contain this tag."""

THINKING_END = re.compile(
    r"</(?:\w+:)?(?:think|thinking|thought|reasoning)(?::\w+)?>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>"
)
"""Ends the thinking in a message's content or in a prompt. Templates may leave out what comes before it."""

THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")

WORD = re.compile(r"\w+")


def without_thinking(message: Message) -> Message:
    """When the message calls tools, its content goes too: it may be thinking."""
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key not in THINKING_FIELDS}
    return {**kept, "content": ""} if message.get("tool_calls") else kept


def require_complete(messages: list[Message], whole: str, answers: dict[int, str] | None) -> None:
    """Raise TemplateRefusal when a message's text or tool call is missing from `whole`; thinking may be missing.
    Assistant messages are looked up in `answers` (by message index) where given. Chat templates leave out parts of a
    conversation without an error."""
    for number, message in enumerate(messages):
        is_answer = message["role"] == "assistant"
        text = answers.get(number, whole) if is_answer and answers is not None else whole
        if not all(contains(text, part) or (is_answer and _contains_answer(text, part)) for part in texts_of(message)):
            raise TemplateRefusal(f"{LEFT_OUT} text of a turn of the role {message['role']}")
        if is_answer and not all(_shows_call(text, call) for call in message.get("tool_calls") or ()):
            raise TemplateRefusal(f"{LEFT_OUT} {TOOL_CALL}")


def texts_of(message: Message) -> list[str]:
    """One text, or those before, between and behind its images, which a template need not join."""
    content = message["content"] or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _shows_call(text: str, call: Any) -> bool:
    """JSON text verbatim, objects by their keys and values."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip() not in text:
        return False
    if isinstance(arguments, dict) and arguments and repr(arguments) in text:
        return False  # The template expects JSON text, and writes an object as Python does.
    return all(contains(text, value) for value in texts_in([function["name"], arguments]))


def texts_in(value: Any) -> list[str]:
    """Return all texts in nested lists and objects; keys count as texts."""
    found, waiting = [], [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
    return found


def thinking_of(message: Message) -> str:
    """The thinking of an assistant turn, from its own field or from the start of the content."""
    given = next((message[name] for name in THINKING_FIELDS if isinstance(message.get(name), str)), "")
    *thinking, _ = THINKING_END.split(message["content"] or "")
    return given or THINKING_START.sub("", " ".join(thinking), count=1)


def ends_thinking(prompt: str) -> bool:
    tags = list(THINKING_END.finditer(prompt))
    return bool(tags) and not prompt[tags[-1].end() :].strip()


def _contains_answer(text: str, content: str) -> bool:
    """Either without its opening thinking tag or without its whole thinking."""
    without_tag = THINKING_START.sub("", content, count=1)
    return contains(text, without_tag) or contains(text, THINKING_END.split(content)[-1])


def contains(text: str, part: str) -> bool:
    """Verbatim, or at least each of the words of `part`, because templates may escape line breaks."""
    if part.strip() in text:
        return True
    missing = set(WORD.findall(part)) - set(WORD.findall(text))
    return all(word in text or _escaped(word) in text for word in missing)


def _escaped(word: str) -> str:
    return "".join(letter if letter.isascii() else f"\\u{ord(letter):04x}" for letter in word)


ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "developer": "developer",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
    "function_call": "assistant",
}
"""The role that chat templates use, for each role name found in data sets."""

SYSTEM_ROLES = ("system", "developer")

TURN_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "weight", "train")
"""Keys of a turn for which a source's `columns` may give other names."""


@dataclass(frozen=True)
class TurnNames:
    """What a source calls the roles and the keys of its turns, where it has other names (`roles` and `columns`)."""

    roles: Mapping[str, str] = field(default_factory=dict)
    """The role that chat templates use, for each of the source's names in lower case."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The source's key, for each of TURN_KEYS that has another name there."""

    @classmethod
    def of(cls, source: Source) -> TurnNames:
        """Return the names that a source gives."""
        given = {role: [names] if isinstance(names, str) else names for role, names in source.roles.items()}
        roles = {name.lower(): role for role, names in given.items() for name in names}
        return cls(roles, {ours: theirs for ours, theirs in source.columns.items() if ours in TURN_KEYS})

    def role(self, name: str) -> str | None:
        """Return the role that chat templates use, or None for an unknown one."""
        return self.roles.get(name.lower()) or ROLES.get(name.lower())

    def renamed(self, turn: Any) -> Any:
        """Return the turn with our names of its keys; what is not an object is returned unchanged."""
        if not self.keys or not isinstance(turn, dict):
            return turn
        theirs = set(self.keys.values())
        rest = {key: value for key, value in turn.items() if key not in theirs and key not in self.keys}
        return {**rest, **{ours: turn[name] for ours, name in self.keys.items() if name in turn}}


def conversation(
    values: dict[str, Any], *, parts: bool = False, calls: bool = True, names: TurnNames | None = None
) -> Record | Dropped:
    """`values` are the columns messages or conversations, system and tools. With `parts`, a turn's content may be a
    list of more than text; otherwise such a row is dropped. With `calls`, older ways to write tool calls become those
    that templates read. `names` are those of the source."""
    turns = values.get("messages", values.get("conversations"))
    if isinstance(turns, str):
        turns = parsed(turns)
    if turns is None or turns == []:
        return Dropped("the conversation is empty")
    if isinstance(turns, Dropped):
        return turns
    if not isinstance(turns, list):
        return Dropped(PYTHON_LIST if _is_python_list(turns) else "the conversation is not a list of turns")
    messages: list[Message] = []
    untrained: set[int] = set()
    context: dict[int, tuple[Span, ...]] = {}
    asked, wrapped = 0, False
    for turn in turns:
        made = _message(turn, parts, calls, names or TurnNames())
        if isinstance(made, Dropped):
            return made
        message, marks = made
        if marks.untrained:
            untrained.add(len(messages))
        elif marks.context:
            context[len(messages)] = marks.context
        asked, wrapped = asked + marks.asked, wrapped or marks.wrapped
        messages.append(message)
    system = _system_text(values.get("system"))
    if isinstance(system, Dropped):
        return system
    first = messages[0] if messages[0]["role"] in SYSTEM_ROLES else None
    if system and first is not None and first["content"] != system:
        return Dropped("the system prompt in a column differs from that of the first turn")
    if system and first is None:
        messages.insert(0, {"role": "system", "content": system})
        untrained = {number + 1 for number in untrained}
        context = {number + 1: spans for number, spans in context.items()}
    given = _parsed_text(values.get("tools"))
    tools = tools_of(given)
    if isinstance(tools, Dropped):
        return tools
    wrapped |= bool(tools) and tools != given
    return ChatRecord(
        messages, tools, untrained=frozenset(untrained), context=context, asked=asked, tools_wrapped=wrapped
    )


PYTHON_LIST = "the conversation is text as Python prints a list, which is not JSON"
"""Drop reason."""


def _is_python_list(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"\s*\[\s*\{\s*'", value) is not None


def _system_text(value: Any) -> str | Dropped | None:
    """The system prompt of a column: text, or a list of parts that are text."""
    if value is None or isinstance(value, str):
        return value
    joined = _joined_text(value) if isinstance(value, list) else value
    return joined if isinstance(joined, str) else Dropped("system is not text")


def conversation_of_pair(
    values: dict[str, Any], *, parts: bool = False, names: TurnNames | None = None
) -> Record | Dropped:
    """`values` are the columns prompt and completion, texts or lists of messages, system and tools; only the answers of
    the completion are targets. `parts` and `names`: see `conversation`."""
    prompt, completion = values["prompt"], values["completion"]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if before is None or after is None:
        return Dropped("prompt is missing" if before is None else "completion is missing")
    if not isinstance(before, list) or not isinstance(after, list):
        return Dropped("prompt or completion is neither text nor a list of messages")
    record = conversation({**values, "messages": [*before, *after]}, parts=parts, names=names)
    if not isinstance(record, ChatRecord):
        return record
    first = len(record.messages) - len(after)
    context = [number for number in range(first) if record.messages[number]["role"] == "assistant"]
    return replace(record, untrained=record.untrained | set(context), from_pair=not parts or bool(context))


class _Marks(NamedTuple):
    """What a turn says about which of its text is a target."""

    untrained: bool = False
    context: tuple[Span, ...] = ()
    """Ranges of characters of an answer's content that are context."""
    asked: bool = False
    """Whether a turn that is not an answer asks to be learned."""
    wrapped: bool = False
    """Whether its tool calls were given in another shape than OpenAI's."""


def _message(turn: Any, parts: bool, calls: bool, names: TurnNames) -> tuple[dict[str, Any], _Marks] | Dropped:
    """{"role", "content"}, also from sharegpt's `from` and `value`; other keys (tool_calls) are kept. Dropped without a
    known role, without text and tool calls, or with a part or a mark that is unknown."""
    turn = names.renamed(turn)
    turn = _with_tool_calls(turn) if calls else turn
    if not isinstance(turn, dict):
        return Dropped("a turn is not an object with role and content")
    # Arrow adds keys of other rows with null values, and templates test whether a key is present.
    message = {key: value for key, value in turn.items() if value is not None}
    role = message.pop("from", None) or message.pop("role", None)
    content = message.pop("value", None) if "value" in message else message.pop("content", None)
    if not isinstance(role, str):
        return Dropped("a turn has no role")
    known = names.role(role)
    if known is None:
        return Dropped(f"a turn has the role {role[:40]!r}")
    context: tuple[Span, ...] = ()
    if isinstance(content, list):
        content, thinking, context = _opened(content)
        if thinking and not any(message.get(name) for name in THINKING_FIELDS):
            message["reasoning_content"] = thinking
    given = message.pop("tool_calls", None)
    tool_calls = _calls_of(given) if calls else given
    if isinstance(tool_calls, Dropped):
        return tool_calls
    if tool_calls and not isinstance(tool_calls, list):
        return Dropped("a turn's tool_calls is not a list of calls")
    message |= {"tool_calls": tool_calls} if tool_calls else {}
    if content is None and not tool_calls:
        named = {"value", "content"} & set(turn)
        return Dropped("a turn has no text" if named else f"a turn has no content; it has {', '.join(turn)[:80]}")
    if content is not None and not isinstance(content, str) and not (parts and isinstance(content, list)):
        return Dropped(_unread_part(content))
    for name in THINKING_FIELDS:
        if isinstance(message.get(name), list):
            message[name] = _thinking_text(message[name])
        if message.get(name, "") is None or not isinstance(message.get(name, ""), str):
            return Dropped(f"a turn's {name} is not text")
    marks = _marks(message, known == "assistant", content, context)
    if isinstance(marks, Dropped):
        return marks
    marks = marks._replace(wrapped=bool(tool_calls) and tool_calls != given)
    return {"role": known, "content": content if content is not None else "", **message}, marks


TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are text: of OpenAI's chats and of its responses."""

THINKING_PARTS = ("thinking", "reasoning")


def part_text(part: Any) -> str | None:
    """Return the text of a part of a content; None for a part that is not text."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS else None
    return text if isinstance(text, str) else None


def _opened(parts: list[Any]) -> tuple[Any, str, tuple[Span, ...]]:
    """(content, thinking, ranges of characters that are context) of a content in parts. The content is text if all
    parts but the thinking are; any other list is returned unchanged."""
    thoughts = [part for part in parts if isinstance(part, dict) and part.get("type") in THINKING_PARTS]
    thinking = "".join(filter(None, (_thinking_text([part]) for part in thoughts)))
    rest = [part for part in parts if part not in thoughts] if thinking or not thoughts else parts
    joined = _joined_text(rest)
    if not isinstance(joined, str):
        return parts, "", ()
    spans, place = [], 0
    for part in rest:
        end = place + len(part_text(part) or "")
        if isinstance(part, dict) and _mark_of(part) is False and end > place:
            spans.append((place, end))
        place = end
    return joined, thinking, tuple(spans)


def _thinking_text(parts: list[Any]) -> str | None:
    """The thinking of a list of parts; None if one of them is not text."""
    found = []
    for part in parts:
        given = part
        if isinstance(part, dict):
            given = next((part[key] for key in ("text", "thinking", "reasoning", "content") if part.get(key)), None)
        given = _thinking_text(given) if isinstance(given, list) else given
        if not isinstance(given, str):
            return None
        found.append(given)
    return "".join(found)


def _unread_part(content: Any) -> str:
    """Why a content is not read that is not text."""
    for part in content if isinstance(content, list) else ():
        if part_text(part) is None:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            return f"a turn has a part of the type {str(kind)[:40]!r}"
    return "a turn's content is not text"


MARK_WORDS = {"true": True, "1": True, "false": False, "0": False}


def _mark_of(given: dict[str, Any]) -> bool | Dropped | None:
    """Whether a turn or a part says that it is a target, by its keys train or weight; None if it says nothing."""
    for key in ("train", "weight"):
        value = given.get(key)
        if value is None:
            continue
        found = MARK_WORDS.get(f"{value:g}" if isinstance(value, float) else str(value).strip().lower())
        if found is None:
            return Dropped(f"a turn's {key} is {str(value)[:40]}, and only 0 and 1, or false and true, are supported")
        if not found:
            return False
    return None if given.get("train") is None and given.get("weight") is None else True


def _marks(message: dict[str, Any], is_answer: bool, content: Any, context: tuple[Span, ...]) -> _Marks | Dropped:
    """What a turn says about being learned. The keys train, weight and train_detail are taken out, because they are no
    part of the conversation. `context`: what its parts say."""
    mark = _mark_of(message)
    detail = message.pop("train_detail", None)
    for key in ("weight", "train"):
        message.pop(key, None)
    if not is_answer:
        return _Marks(asked=mark is True)
    if isinstance(mark, Dropped):
        return mark
    length = len(content) if isinstance(content, str) else 0
    if detail is not None:
        spans = _untrained_spans(detail, length)
        if isinstance(spans, Dropped):
            return spans
        context = (*context, *spans)
    covered = sum(stop - start for start, stop in _joined_spans(context))
    whole = bool(length) and covered == length and not message.get("tool_calls")
    return _Marks(untrained=mark is False or whole, context=() if mark is False or whole else _joined_spans(context))


def _untrained_spans(detail: Any, length: int) -> list[Span] | Dropped:
    """The ranges of characters that `train_detail` leaves untrained: a list of {begin_offset, end_offset, train}, both
    ends included. What no entry covers is not trained, as in Axolotl."""
    detail = parsed(detail) if isinstance(detail, str) else detail
    learned = bytearray(length)
    for entry in detail if isinstance(detail, list) else [None]:
        start, stop = (entry.get(key) if isinstance(entry, dict) else None for key in ("begin_offset", "end_offset"))
        if not (isinstance(start, int) and isinstance(stop, int) and 0 <= start <= stop < max(1, length)):
            return Dropped("a turn's train_detail is not a list of {begin_offset, end_offset, train} inside its text")
        mark = _mark_of(entry or {})
        if isinstance(mark, Dropped):
            return mark
        learned[start : stop + 1] = bytes([mark is not False]) * (stop + 1 - start)
    return [(start, start + 1) for start, flag in enumerate(learned) if not flag]


def _joined_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same characters, as ranges in order that do not touch."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def _calls_of(given: Any) -> Any:
    """The tool calls of a turn in OpenAI's shape, also from JSON text, and from calls that are only a name with its
    arguments. Arguments that are missing, empty or null are an empty object, as servers give it to the template."""
    given = _parsed_text(given)
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list):
        return given
    calls = []
    for call in given:
        call = parsed(call) if isinstance(call, str) else call
        if isinstance(call, dict) and not isinstance(call.get("function"), dict) and isinstance(call.get("name"), str):
            inner = {key: value for key, value in call.items() if key in ("name", "arguments")}
            call = {**{key: value for key, value in call.items() if key not in inner}, "function": inner}
            call = {"type": "function", **call}
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
        calls.append(call)
    return calls


def _parsed_text(value: Any) -> Any:
    """What JSON text holds, None for blank text; any other value is returned unchanged."""
    return (parsed(value) if value.strip() else None) if isinstance(value, str) else value


def _arguments(function: dict[str, Any]) -> Any:
    given = function.get("arguments")
    is_empty = given is None or (isinstance(given, str) and given.strip() in ("", "null"))
    return {} if is_empty else given


def tools_of(value: Any) -> list[dict[str, Any]] | Dropped | None:
    """The tools of a row as servers give them to the template: {"type": "function", "function": {name, description,
    parameters}}. Also from definitions without this wrapping, from Anthropic's, which call the parameters
    `input_schema`, and from JSON text; None without tools."""
    found = _parsed_text(value)
    if isinstance(found, dict):
        found = [found]
    if not found:
        return None
    if isinstance(found, Dropped):
        return found
    if not isinstance(found, list):
        return Dropped("tools is not a list of tool descriptions")
    tools = []
    for given in found:
        tool = parsed(given) if isinstance(given, str) else given
        if not isinstance(tool, dict):
            return Dropped("tools is not a list of tool descriptions")
        made = _tool(tool)
        if made is None:
            return Dropped("a tool has no name")
        tools.append(made)
    return tools


def _tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    """Return None for a tool without a name."""
    function, rest = tool.get("function"), {}
    if isinstance(function, dict):
        rest = {key: value for key, value in tool.items() if key not in ("type", "function")}
    else:
        function = {key: value for key, value in tool.items() if key != "type"}
        if "input_schema" in function and "parameters" not in function:
            function = {("parameters" if key == "input_schema" else key): each for key, each in function.items()}
    if not isinstance(function.get("name"), str) or not function["name"]:
        return None
    if isinstance(function.get("parameters"), str):
        schema = parsed(function["parameters"])
        function = {**function, "parameters": schema if isinstance(schema, dict) else function["parameters"]}
    return {"type": tool.get("type") or "function", "function": function, **rest}


def _with_tool_calls(turn: Any) -> Any:
    """The turn with `tool_calls` in place of sharegpt's function_call, a turn whose text is the call as JSON, and of
    the key `function_call` of OpenAI's first API."""
    if not isinstance(turn, dict) or turn.get("tool_calls"):
        return turn
    given, rest = turn.get("function_call"), {key: value for key, value in turn.items() if key != "function_call"}
    if given is None and str(turn.get("from", turn.get("role"))).lower() == "function_call":
        text = turn.get("value", turn.get("content"))
        given = parsed(text) if isinstance(text, str) else text
        rest = {key: turn[key] for key in ("weight", "train") if key in turn} | {"role": "assistant"}
    found: list[Any] = given if isinstance(given, list) else [given]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in found):
        return turn
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in found]
    calls = [{"type": "function", "function": function} for function in functions]
    return {**rest, "tool_calls": calls}


def system_folded(messages: list[Message]) -> list[Message] | None:
    """The conversation with its system turn at the start of the first user turn; None if it does not begin with a
    system turn and a user's text."""
    if len(messages) < 2 or messages[0]["role"] not in SYSTEM_ROLES or messages[1]["role"] != "user":
        return None
    system, asked = messages[0]["content"], messages[1]["content"]
    if not isinstance(system, str) or not isinstance(asked, str):
        return None
    return [{**messages[1], "content": f"{system}\n\n{asked}" if system else asked}, *messages[2:]]


def _joined_text(parts: list[Any]) -> Any:
    """Joined if all parts are text; any other list is returned unchanged."""
    texts = [part_text(part) for part in parts]
    strings = [text for text in texts if text is not None]
    return "".join(strings) if len(strings) == len(parts) else parts


def parsed(text: str) -> Any:
    """Text that is not JSON is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        return Dropped("a column's JSON is nested too deeply")
