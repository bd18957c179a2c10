"""Turns conversations as data sets have them (OpenAI's messages, sharegpt's turns) into a ChatRecord.

Try: `tunedeck data -r RECIPE --show 1`, where RECIPE has chat data
"""

from __future__ import annotations

import json
from typing import Any

from engine.data.records import ChatRecord, Dropped, Record

ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "developer": "developer",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}
"""The role that chat templates use, for each role name found in data sets."""


def conversation(values: dict[str, Any], *, parts: bool = False) -> Record | Dropped:
    """The conversation of a row as a ChatRecord, or the reason for dropping the row. `values` has the row's columns by
    name: messages or conversations, system and tools. With `parts`, the content of a turn may be a list that holds more
    than text; otherwise such a row is dropped."""
    turns = values.get("messages", values.get("conversations"))
    if isinstance(turns, str):
        turns = parsed(turns)
    if turns is None or turns == []:
        return Dropped("the conversation is empty")
    if isinstance(turns, Dropped):
        return turns
    if not isinstance(turns, list):
        return Dropped("the conversation is not a list of turns")
    messages = []
    for turn in turns:
        message = _message(turn, parts)
        if isinstance(message, Dropped):
            return message
        messages.append(message)
    if isinstance(values.get("system"), str) and values["system"]:
        messages.insert(0, {"role": "system", "content": values["system"]})
    tools = values.get("tools")
    tools = parsed(tools) if isinstance(tools, str) and tools.strip() else tools or None
    if isinstance(tools, Dropped):
        return tools
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return Dropped("tools is not a list of tool descriptions")
    return ChatRecord(messages, tools)


def _message(turn: Any, parts: bool) -> dict[str, Any] | Dropped:
    """One turn as {"role", "content"}, also from sharegpt's `from` and `value`; other keys (tool_calls) are kept.
    Returns Dropped if the turn has no known role, or no text and no tool calls. `parts`: content may be a list."""
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
    if content is None and not message.get("tool_calls"):
        return Dropped("a turn has no text")
    if content is not None and not isinstance(content, str) and not (parts and isinstance(content, list)):
        return Dropped("a turn's content is not text")
    return {"role": ROLES[role.lower()], "content": content if content is not None else "", **message}


def _joined_text(parts: list[Any]) -> Any:
    """The texts of a content list, joined, if all of its parts are text; any other list is returned unchanged."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(parts) else parts


def parsed(text: str) -> Any:
    """The value of a JSON text; a text that is not JSON is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        return Dropped("a column's JSON is nested too deeply")
