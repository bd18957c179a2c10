"""Rows of preferences: of two answers to one prompt, one was chosen and one rejected. Records of these and of single
answers with labels (`engine.data.unpaired`)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config.schema.data import PREFERENCE_FORMATS, UNPAIRED_FORMATS, Source
from engine.data.conversations import parsed
from engine.data.records import Dropped, Record, SourceRows
from engine.errors import DataError


@dataclass(frozen=True)
class PreferenceRecord:
    """A pair; both sides begin with the same prompt."""

    chosen: Record
    rejected: Record


@dataclass(frozen=True)
class LabelledRecord:
    """An answer with its prompt, and whether it is desirable."""

    record: Record
    desirable: bool


JudgedRecord = PreferenceRecord | LabelledRecord


def sides_of(values: dict[str, Any]) -> tuple[Any, Any, Any] | Dropped:
    """(prompt, chosen completion, rejected completion), each a text or a list of messages.

    `values` are the columns chosen, rejected and perhaps prompt. Without a prompt, what both sides begin with is the
    prompt. With one, chosen and rejected may still be whole conversations: those that begin with a turn of the user.
    """
    chosen, rejected = (_parsed_list(values[name]) for name in ("chosen", "rejected"))
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if value is None:
            return Dropped(f"{name} is missing")
        if not isinstance(value, str | list):
            return Dropped(f"{name} is neither text nor a list of messages")
    if isinstance(chosen, list) != isinstance(rejected, list):
        return Dropped("of chosen and rejected, one is text and one a list of messages")
    prompt = _parsed_list(values.get("prompt"))
    if prompt is None or (isinstance(chosen, list) and _begins_with_prompt(chosen)):
        shared = _shared_messages(chosen, rejected) if isinstance(chosen, list) else _shared_text(chosen, rejected)
        if not shared:
            return Dropped("chosen and rejected share no prompt")
        return chosen[:shared], chosen[shared:], rejected[shared:]
    return prompt, chosen, rejected


def _parsed_list(value: Any) -> Any:
    """A list that is written as JSON text, or of the one message that `value` is; anything else is unchanged."""
    found = parsed(value) if isinstance(value, str) and value.lstrip().startswith("[{") else value
    if isinstance(value, dict) and (value.get("role") or value.get("from")):
        return [value]
    return found if isinstance(found, list) else value


def _begins_with_prompt(messages: list[Any]) -> bool:
    first = messages[0] if messages else None
    role = (first.get("role") or first.get("from")) if isinstance(first, dict) else None
    return role in ("system", "user", "human", "developer")


def _shared_messages(chosen: list[Any], rejected: list[Any]) -> int:
    """Messages that both begin with; the last of each side is an answer."""
    most = min(len(chosen), len(rejected)) - 1
    return next((place for place in range(most) if chosen[place] != rejected[place]), max(0, most))


def _shared_text(chosen: str, rejected: str) -> int:
    """Characters that both begin with, up to the last white space before they differ."""
    most = min(len(chosen), len(rejected))
    shared = next((place for place in range(most) if chosen[place] != rejected[place]), most)
    while 0 < shared < max(len(chosen), len(rejected)) and not chosen[shared - 1].isspace():
        shared -= 1
    return len(chosen[:shared].rstrip(" "))


def other_objective(
    source: Source, rows: SourceRows, fields: dict[str, str], judged: str | None, table: str = "data.sources"
) -> DataError:
    """For rows of preferences without their objective (`judged` None), or rows that an objective cannot learn from.
    `fields` maps our columns to the source's, `table` holds the source."""
    found = f"source {source.name}: the columns are {', '.join(rows.columns)}"
    if judged == "pairs":
        return DataError(
            f'{found}, and method.objective = "dpo" learns from pairs',
            expected="columns chosen and rejected, and perhaps prompt",
            fix='name them in the source, such as columns = {chosen = "better", rejected = "worse"}'
            + ("; or, for answers with labels, add --set preference.loss=kto" if "label" in rows.columns else ""),
        )
    if judged == "unpaired":
        return DataError(
            f'{found}, and preference.loss = "kto" learns from single answers with labels',
            expected="columns prompt, completion and label (true or false); or chosen and rejected",
            fix='name them in the source, such as columns = {completion = "answer", label = "good"}',
        )
    if "chosen" not in fields:
        return DataError(
            f'{found}: answers with labels, and method.objective = "sft" imitates every answer',
            expected='method.objective = "dpo" with preference.loss = "kto"',
            fix="add --set method.objective=dpo --set preference.loss=kto",
        )
    column, kind = f'messages = "{fields["chosen"]}"', "chat"
    if "prompt" in fields:
        column, kind = f'prompt = "{fields["prompt"]}", completion = "{fields["chosen"]}"', "prompt-completion"
    imitate = [f"{table}.{source.name}.columns={{{column}}}", f"{table}.{source.name}.format={kind}"]
    options = " ".join(f"--set {shlex.quote(option)}" for option in imitate)
    if table == "evaluate.sources":
        return DataError(
            f"{found}: preferences, and the model is scored on answers",
            expected="prompts with completions, or conversations",
            fix=f"to score it on the chosen answers, add {options}",
        )
    return DataError(
        f'{found}: preferences, and method.objective = "sft" imitates answers',
        expected='method.objective = "dpo"',
        fix=f"add --set method.objective=dpo; or, to imitate the chosen answers: {options}",
    )


def preference_notice(columns: Sequence[str], source: Source, format_name: str, read: Sequence[str]) -> str | None:
    """What is said of a source whose rows hold preferences, of which the columns `read` are imitated; None if they hold
    none, or are learned as such."""
    if format_name in (*PREFERENCE_FORMATS, *UNPAIRED_FORMATS):
        return None
    if {"chosen", "rejected"} <= set(columns):
        return (
            f'source {source.name}: rows of preferences (chosen, rejected), which only method.objective = "dpo" learns '
            f"from: {', '.join(read)} {'is' if len(read) == 1 else 'are'} read, and what is rejected has no effect"
        )
    if format_name == "prompt-completion" and "label" in columns:
        return (
            f'source {source.name}: a column label beside prompt and completion, which only preference.loss = "kto" '
            "learns from: every completion is imitated, whatever its label"
        )
    return None
