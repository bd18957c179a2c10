"""What messages of a conversation hold: thinking, text and tool calls, and whether a rendered text contains them.

Chat templates leave out parts of a conversation without an error. `require_complete` finds what is missing, so that a
conversation is dropped instead of learned in part.

Try: `python -m pytest tests/data/test_chat.py`
"""

from __future__ import annotations

import re
from typing import Any

from engine.data.chat_template import Message, TemplateRefusal

LEFT_OUT = "the chat template leaves out"
"""First words of the drop reasons for a conversation of which the rendered text lacks a part."""

THINKING_START = re.compile(r"\s*(?:<(?:\w+:)?(?:think|thinking|thought|reasoning)>|\[THINK\])\s*")
"""Tag that starts the thinking in a message's content. The prompt may contain it."""

THINKING_END = re.compile(
    r"</(?:\w+:)?(?:think|thinking|thought|reasoning)(?::\w+)?>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>"
)
"""Tag that ends the thinking in a message's content or in a prompt. Templates may leave out what comes before it."""

THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that may hold its thinking."""

WORD = re.compile(r"\w+")


def without_thinking(message: Message) -> Message:
    """The message without thinking; when it calls tools, also without content, which may be thinking."""
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key not in THINKING_FIELDS}
    return {**kept, "content": ""} if message.get("tool_calls") else kept


def require_complete(messages: list[Message], whole: str, answers: dict[int, str] | None) -> None:
    """Raise TemplateRefusal when the text or a tool call of a message is missing from the rendered text `whole`.

    Assistant messages are looked up in `answers` (by message index) where given. Thinking may be missing.
    """
    for number, message in enumerate(messages):
        is_answer = message["role"] == "assistant"
        text = answers.get(number, whole) if is_answer and answers is not None else whole
        if not all(contains(text, part) or (is_answer and _contains_answer(text, part)) for part in texts_of(message)):
            raise TemplateRefusal(f"{LEFT_OUT} text of a turn of the role {message['role']}")
        if is_answer and not all(_shows_call(text, call) for call in message.get("tool_calls") or ()):
            raise TemplateRefusal(f"{LEFT_OUT} a tool call, or its arguments")


def texts_of(message: Message) -> list[str]:
    """The texts of a message: one, or those before, between and behind its images, which a template need not join."""
    content = message["content"] or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _shows_call(text: str, call: Any) -> bool:
    """Whether the text has the tool call's name and arguments: JSON text verbatim, objects by their keys and values."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip() not in text:
        return False
    return all(contains(text, value) for value in _strings([function["name"], arguments]))


def _strings(value: Any) -> list[str]:
    """All texts in `value`, which may be nested lists and objects; the keys of objects count as texts."""
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
    """The thinking of an assistant turn, from its own field or from the start of its content."""
    given = next((message[name] for name in THINKING_FIELDS if isinstance(message.get(name), str)), "")
    *thinking, _ = THINKING_END.split(message["content"] or "")
    return given or THINKING_START.sub("", " ".join(thinking), count=1)


def ends_thinking(prompt: str) -> bool:
    tags = list(THINKING_END.finditer(prompt))
    return bool(tags) and not prompt[tags[-1].end() :].strip()


def _contains_answer(text: str, content: str) -> bool:
    """Whether the text contains `content`, either without its opening thinking tag or without its whole thinking."""
    without_tag = THINKING_START.sub("", content, count=1)
    return contains(text, without_tag) or contains(text, THINKING_END.split(content)[-1])


def contains(text: str, part: str) -> bool:
    """Whether the text contains `part` verbatim, or at least each of the words of `part`, because templates may escape
    line breaks."""
    if part.strip() in text:
        return True
    missing = set(WORD.findall(part)) - set(WORD.findall(text))
    return all(word in text or _escaped(word) in text for word in missing)


def _escaped(word: str) -> str:
    return "".join(letter if letter.isascii() else f"\\u{ord(letter):04x}" for letter in word)
