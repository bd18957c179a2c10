"""Conversations as lists of messages: what each format's rows become, and what the content of a message may be."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from engine.data.chat_template import Message, TemplateRefusal
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
    return all(contains(text, value) for value in _strings([function["name"], arguments]))


def _strings(value: Any) -> list[str]:
    """All texts in nested lists and objects; keys count as texts."""
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


def conversation(values: dict[str, Any], *, parts: bool = False, calls: bool = True) -> Record | Dropped:
    """`values` are the columns messages or conversations, system and tools. With `parts`, a turn's content may be a
    list of more than text; otherwise such a row is dropped. With `calls`, older ways to write tool calls become those
    that templates read."""
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
    for turn in turns:
        message = _message(_with_tool_calls(turn) if calls else turn, parts)
        if isinstance(message, Dropped):
            return message
        if _is_untrained(message):
            untrained.add(len(messages))
        messages.append(message)
    if isinstance(values.get("system"), str) and values["system"]:
        messages.insert(0, {"role": "system", "content": values["system"]})
        untrained = {number + 1 for number in untrained}
    tools = values.get("tools")
    tools = parsed(tools) if isinstance(tools, str) and tools.strip() else tools or None
    if isinstance(tools, Dropped):
        return tools
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return Dropped("tools is not a list of tool descriptions")
    return ChatRecord(messages, tools, untrained=frozenset(untrained))


PYTHON_LIST = "the conversation is text as Python prints a list, which is not JSON"
"""Drop reason."""


def _is_python_list(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"\s*\[\s*\{\s*'", value) is not None


def conversation_of_pair(values: dict[str, Any], *, parts: bool = False) -> Record | Dropped:
    """`values` are the columns prompt and completion, texts or lists of messages, system and tools; only the answers of
    the completion are targets. `parts`: see `conversation`."""
    prompt, completion = values["prompt"], values["completion"]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if before is None or after is None:
        return Dropped("prompt is missing" if before is None else "completion is missing")
    if not isinstance(before, list) or not isinstance(after, list):
        return Dropped("prompt or completion is neither text nor a list of messages")
    record = conversation({**values, "messages": [*before, *after]}, parts=parts)
    if not isinstance(record, ChatRecord):
        return record
    first = len(record.messages) - len(after)
    context = [number for number in range(first) if record.messages[number]["role"] == "assistant"]
    return replace(record, untrained=record.untrained | set(context), from_pair=not parts or bool(context))


def _message(turn: Any, parts: bool) -> dict[str, Any] | Dropped:
    """{"role", "content"}, also from sharegpt's `from` and `value`; other keys (tool_calls) are kept. Dropped without a
    known role, or without text and tool calls."""
    if not isinstance(turn, dict):
        return Dropped("a turn is not an object with role and content")
    # Arrow adds keys of other rows with null values, and templates test whether a key is present.
    message = {key: value for key, value in turn.items() if value is not None}
    role = message.pop("from", None) or message.pop("role", None)
    content = message.pop("value", None) if "value" in message else message.pop("content", None)
    if not isinstance(role, str) or role.lower() not in ROLES:
        return Dropped(f"a turn has the role {role[:40]!r}" if isinstance(role, str) else "a turn has no role")
    if isinstance(content, list):
        content = _joined_text(content)
    calls = message.get("tool_calls")
    if calls and not isinstance(calls, list):
        return Dropped("a turn's tool_calls is not a list of calls")
    if content is None and not calls:
        named = {"value", "content"} & set(turn)
        return Dropped("a turn has no text" if named else f"a turn has no content; it has {', '.join(turn)[:80]}")
    if content is not None and not isinstance(content, str) and not (parts and isinstance(content, list)):
        return Dropped("a turn's content is not text")
    return {"role": ROLES[role.lower()], "content": content if content is not None else "", **message}


def _with_tool_calls(turn: Any) -> Any:
    """The turn with `tool_calls` in place of sharegpt's function_call, a turn whose text is the call as JSON, and of
    the key `function_call` of OpenAI's first API."""
    if not isinstance(turn, dict) or turn.get("tool_calls"):
        return turn
    given, rest = turn.get("function_call"), {key: value for key, value in turn.items() if key != "function_call"}
    if given is None and str(turn.get("from", turn.get("role"))).lower() == "function_call":
        text = turn.get("value", turn.get("content"))
        given = parsed(text) if isinstance(text, str) else text
        rest = {"role": "assistant"}
    found: list[Any] = given if isinstance(given, list) else [given]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in found):
        return turn
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in found]
    calls = [{"type": "function", "function": function} for function in functions]
    return {**rest, "tool_calls": calls}


def system_folded(messages: list[Message]) -> list[Message] | None:
    """The conversation with its system turn at the start of the first user turn; None if it does not begin with a
    system turn and a user's text."""
    if len(messages) < 2 or messages[0]["role"] not in ("system", "developer") or messages[1]["role"] != "user":
        return None
    system, asked = messages[0]["content"], messages[1]["content"]
    if not isinstance(system, str) or not isinstance(asked, str):
        return None
    return [{**messages[1], "content": f"{system}\n\n{asked}" if system else asked}, *messages[2:]]


def _is_untrained(message: dict[str, Any]) -> bool:
    """Whether an answer says that it is no target: weight 0, or train false. Both keys are taken out, because they are
    no part of the conversation."""
    marks = message.pop("weight", None), message.pop("train", None)
    return message["role"] == "assistant" and any(isinstance(mark, (bool, int, float)) and not mark for mark in marks)


def _joined_text(parts: list[Any]) -> Any:
    """Joined if all parts are text; any other list is returned unchanged."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(parts) else parts


def parsed(text: str) -> Any:
    """Text that is not JSON is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        return Dropped("a column's JSON is nested too deeply")
