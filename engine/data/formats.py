"""Recognises the format of a source by its columns, and turns each row into a record, or into a reason for dropping it.

The tables list the formats, the columns that each needs, and other names of those columns. Tokens are made in
`engine.data.tokenise`.

Try: `tunedeck data -r RECIPE`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import DataError
from engine.spec.schema.recipe import Source


@dataclass(frozen=True)
class TextRecord:
    """Plain text, all of it learned."""

    text: str


@dataclass(frozen=True)
class PairRecord:
    """A prompt, and the completion that is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatRecord:
    """A conversation: turns with role and content, and descriptions of the tools that it may use."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Dropped:
    """A row that is left out. The report counts rows by reason."""

    reason: str


Record = TextRecord | PairRecord | ChatRecord

NEEDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "prompt-completion": ("prompt", "completion"),
    "chat": ("messages",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}
"""Columns that each format requires."""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "chat": ("tools",),
    "sharegpt": ("tools", "system"),
    "alpaca": ("input", "system"),
}
"""Columns that a format uses if the source has them."""

ALIASES: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "query"),
    "completion": ("response", "answer"),
    "messages": ("chat", "dialog", "dialogue"),
    "conversations": ("conversation",),
}
"""Other names under which a column is recognised, if none has its own name."""

ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "developer": "developer",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}
"""The role that chat templates use, for each role name found in data sets."""

ALPACA_LAYOUT = "### Instruction:\n{instruction}\n\n### Response:\n"
ALPACA_LAYOUT_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
"""Prompts of instruction rows for a tokenizer without a chat template (layout: Stanford Alpaca, 2023)."""


@dataclass(frozen=True)
class Format:
    """A recognised format."""

    name: str
    fields: dict[str, str]
    """The source's column of each of our fields."""
    source: str
    chat: bool = field(default=False)
    """Whether instruction rows are rendered as conversations."""

    @property
    def renders_chat(self) -> bool:
        """Whether rows are rendered with the chat template."""
        return self.name in ("chat", "sharegpt") or (self.name == "alpaca" and self.chat)

    def record(self, row: dict[str, Any]) -> Record | Dropped:
        """The record of a row of the source, or the reason for dropping it."""
        values: dict[str, Any] = {ours: row.get(theirs) for ours, theirs in self.fields.items()}
        if self.name in ("chat", "sharegpt"):
            return _conversation(values)
        if self.name == "alpaca":
            return _instruction(values, self.chat)
        for name in NEEDS[self.name]:
            if problem := _not_text(name, values[name]):
                return Dropped(problem)
        return TextRecord(values["text"]) if self.name == "text" else PairRecord(values["prompt"], values["completion"])


def recognise(columns: Sequence[str], source: Source, *, has_template: bool) -> Format:
    """The format of a source, chosen by its columns and by its settings `format` and `columns`.

    Raises DataError when no format fits, or several do.
    """
    mapped = _mapped_columns(columns, source)
    fitting = {name: fields for name in NEEDS if (fields := _fields(name, columns, mapped)) is not None}
    if source.format != "auto":
        fitting = {name: fields for name, fields in fitting.items() if name == source.format}
    elif mapped:
        fitting = {name: fields for name, fields in fitting.items() if set(mapped) <= set(fields)} or fitting
    if len(fitting) != 1:
        raise _unclear(columns, source, list(fitting))
    ((name, fields),) = fitting.items()
    return Format(name, fields, source.name, chat=has_template)


def _mapped_columns(columns: Sequence[str], source: Source) -> dict[str, str]:
    known = {name for table in (NEEDS, OPTIONAL) for names in table.values() for name in names}
    for ours, theirs in source.columns.items():
        if ours not in known:
            raise DataError(
                f"source {source.name}: columns.{ours} is not one of our columns", expected=", ".join(sorted(known))
            )
        if theirs not in columns:
            raise DataError(
                f"source {source.name}: columns.{ours} = {theirs!r}, and there is no such column",
                expected=f"one of {', '.join(columns)}",
            )
    return dict(source.columns)


def _fields(format_name: str, columns: Sequence[str], mapped: dict[str, str]) -> dict[str, str] | None:
    """The source's column for each field of a format; None when a required column is missing or ambiguous."""
    fields = {}
    for ours in NEEDS[format_name]:
        theirs = [mapped[ours]] if ours in mapped else [ours] if ours in columns else []
        theirs = theirs or [alias for alias in ALIASES.get(ours, ()) if alias in columns]
        if len(theirs) != 1:
            return None
        fields[ours] = theirs[0]
    for ours in OPTIONAL.get(format_name, ()):
        if mapped.get(ours, ours) in columns:
            fields[ours] = mapped.get(ours, ours)
    return fields


def _unclear(columns: Sequence[str], source: Source, fitting: Sequence[str]) -> DataError:
    needs = "; ".join(f"{name}: {' + '.join(fields)}" for name, fields in NEEDS.items())
    found = f"source {source.name}: the columns are {', '.join(columns) or 'none'}"
    if fitting:
        return DataError(
            f"{found}, and fit {' and '.join(fitting)}", expected=f"one format ({needs})",
            fix=f'say which: format = "{fitting[0]}"',
        )
    wanted = "no format" if source.format == "auto" else f'not format = "{source.format}"'
    return DataError(
        f"{found}, and fit {wanted}", expected=needs,
        fix='name the columns in the source, such as columns = {prompt = "question", completion = "answer"}',
    )


def _not_text(name: str, value: Any) -> str:
    if value is None:
        return f"{name} is missing"
    return "" if isinstance(value, str) else f"{name} is not text"


def _instruction(values: dict[str, Any], chat: bool) -> Record | Dropped:
    given = {"input": "", "system": "", **{name: value for name, value in values.items() if value is not None}}
    for name in ("instruction", "output", "input", "system"):
        if problem := _not_text(name, given.get(name)):
            return Dropped(problem)
    if not chat:
        layout = ALPACA_LAYOUT_INPUT if given["input"] else ALPACA_LAYOUT
        head = f"{given['system']}\n\n" if given["system"] else ""
        return PairRecord(head + layout.format(**given), given["output"])
    question = "\n\n".join(part for part in (given["instruction"], given["input"]) if part)
    turns = [{"role": "system", "content": given["system"]}] if given["system"] else []
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": given["output"]}]
    return ChatRecord(turns)


def _conversation(values: dict[str, Any]) -> Record | Dropped:
    turns = values.get("messages", values.get("conversations"))
    if isinstance(turns, str):
        turns = _parsed(turns)
    if turns is None or turns == []:
        return Dropped("the conversation is empty")
    if isinstance(turns, Dropped):
        return turns
    if not isinstance(turns, list):
        return Dropped("the conversation is not a list of turns")
    messages = []
    for turn in turns:
        message = _message(turn)
        if isinstance(message, Dropped):
            return message
        messages.append(message)
    if isinstance(values.get("system"), str) and values["system"]:
        messages.insert(0, {"role": "system", "content": values["system"]})
    tools = values.get("tools")
    tools = _parsed(tools) if isinstance(tools, str) and tools.strip() else tools or None
    if isinstance(tools, Dropped):
        return tools
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return Dropped("tools is not a list of tool descriptions")
    return ChatRecord(messages, tools)


def _message(turn: Any) -> dict[str, Any] | Dropped:
    """One turn with `role` and `content`, also from sharegpt's `from` and `value`. Other keys (tool_calls) are kept."""
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
    if content is not None and not isinstance(content, str):
        return Dropped("a turn's content is not text")
    return {"role": ROLES[role.lower()], "content": content if content is not None else "", **message}


def _joined_text(parts: list[Any]) -> Any:
    """The text of a content list whose parts are all text; any other list is returned unchanged."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(parts) else parts


def _parsed(text: str) -> Any:
    """The value of a JSON text; a text that is not JSON is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        return Dropped("a column's JSON is nested too deeply")
