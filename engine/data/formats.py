"""Turns each row of a source, whose format is known, into a record or into a drop reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.config.schema.data import IMAGE_FORMATS, PREFERENCE_FORMATS, UNPAIRED_FORMATS
from engine.config.schema.run import DATA_VERSION
from engine.data.conversations import TurnNames, conversation, conversation_of_pair, tools_of
from engine.data.image_formats import BoxFormat, DetectionRecord, detection, image_chat
from engine.data.preferences import (
    JudgedRecord,
    LabelledRecord,
    PreferenceRecord,
    answer_of,
    desirable_of,
    prompt_of,
    rounds_of,
    sides_of,
)
from engine.data.records import Dropped, PairRecord, Record, TextRecord
from engine.data.token_rows import token_row

ALPACA_LAYOUT = "### Instruction:\n{instruction}\n\n### Response:\n"
ALPACA_LAYOUT_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
"""Prompts of instruction rows for a tokenizer without a chat template (layout: Stanford Alpaca, 2023)."""

ALPACA_PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
ALPACA_PREAMBLE_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)
"""The sentences before these prompts in Stanford Alpaca's data, with template = "alpaca" and "alpaca-chat"."""


@dataclass(frozen=True)
class Format:
    """The recognised format of a source, which turns its rows into records."""

    name: str
    fields: dict[str, str]
    """Maps each field of the format (prompt, messages, …) to the source's column."""
    source: str
    chat: bool = field(default=False)
    """Whether instruction rows are rendered as conversations."""
    boxes: BoxFormat | None = field(default=None, repr=False)
    """Settings of a detection source. repr() is part of the fingerprint of every source: `boxes` and `image_root` stay
    out."""
    image_root: str | None = field(default=None, repr=False)
    pairs: Literal["chat", "unmarked", "plain"] = field(default="plain", repr=False)
    """Which prompts with completions become conversations: all, those without a marker of the chat template, none."""
    has_preamble: bool = field(default=False, repr=False)
    """Whether the prompt of an instruction row is Stanford Alpaca's, with its first sentences."""
    markers: Sequence[str] = field(default=(), repr=False)
    """Texts of which a row has one that went through the chat template already."""
    opening: str = field(default="", repr=False)
    """What the chat template writes before an answer."""
    version: int = field(default=DATA_VERSION, repr=False)
    """`RunSpec.data_version`."""

    names: TurnNames = field(default_factory=TurnNames, repr=False)
    """What the source calls roles and the keys of turns."""

    @property
    def renders_chat(self) -> bool:
        instructions = self.name == "alpaca" and self.chat
        return self.name in ("chat", "sharegpt", *IMAGE_FORMATS) or instructions or self.has_chat_pairs

    @property
    def has_chat_pairs(self) -> bool:
        return self.name in ("prompt-completion", *UNPAIRED_FORMATS) and self.pairs != "plain"

    @property
    def has_images(self) -> bool:
        return self.name in IMAGE_FORMATS

    def record(self, row: dict[str, Any] | Dropped) -> Record | DetectionRecord | JudgedRecord | Dropped:
        """Dropped states the reason."""
        if isinstance(row, Dropped):
            return row
        values: dict[str, Any] = {ours: _value(row, theirs) for ours, theirs in self.fields.items()}
        if self.version > 3:  # an answer may be a number; a text that is one is another column by mistake
            kept = ("label", "text")
            values |= {name: str(value) for name, value in values.items() if name not in kept and type(value) is int}
        if self.boxes is not None:
            return detection(values, self.boxes)
        if self.name == "image-chat":
            return image_chat(values, self.names)
        if self.name in ("chat", "sharegpt"):
            return conversation(values, calls=self.version > 2, names=self.names)
        if self.name == "alpaca":
            return _instruction(values, self.chat, self.has_preamble, LINE if self.version > 4 else BLANK_LINE)
        if self.name == "prompt-completion":
            return self._pair(values)
        if self.name in PREFERENCE_FORMATS:
            return self._preference(values)
        if self.name in UNPAIRED_FORMATS:
            return self._labelled(values)
        if self.name == "tokens":
            return token_row({ours: _value(row, theirs) for ours, theirs in self.fields.items()})
        if problem := _not_text("text", values["text"]):
            return Dropped(problem)
        return TextRecord(values["text"], row.get("starts") is not False, row.get("ends") is not False)

    def _preference(self, values: dict[str, Any]) -> PreferenceRecord | Dropped:
        sides = sides_of(values, self.opening)
        if isinstance(sides, Dropped):
            return sides
        given = [{**values, "prompt": sides.prompt, "completion": each} for each in (sides.chosen, sides.rejected)]
        if sides.is_dialogue and self.pairs != "chat" and not self.has_images:
            marked = self.pairs != "plain"
            chosen, rejected = (_plain_pair(each, each["prompt"], each["completion"], marked) for each in given)
        else:
            chosen, rejected = (self._side(each) for each in given)
        if isinstance(chosen, Dropped) or isinstance(rejected, Dropped):
            return next(each for each in (chosen, rejected) if isinstance(each, Dropped))
        return PreferenceRecord(chosen, rejected, sides.is_dialogue)

    def _labelled(self, values: dict[str, Any]) -> LabelledRecord | Dropped:
        prompt = prompt_of(values)
        if isinstance(prompt, Dropped):
            return prompt
        desirable, answer = desirable_of(values["label"]), answer_of({**values, "prompt": prompt})
        if isinstance(desirable, Dropped) or isinstance(answer, Dropped):
            return next(each for each in (desirable, answer) if isinstance(each, Dropped))
        record = self._side({"prompt": None, **answer})
        return record if isinstance(record, Dropped) else LabelledRecord(record, desirable)

    def _side(self, values: dict[str, Any]) -> Record | Dropped:
        return image_chat(values, self.names) if self.has_images else self._pair(values)

    def _pair(self, values: dict[str, Any]) -> Record | Dropped:
        """A prompt and a completion, each a text or a list of messages."""
        prompt, completion = values["prompt"], values["completion"]
        if isinstance(prompt, list) or isinstance(completion, list):
            return conversation_of_pair(values, names=self.names)
        for name in ("prompt", "completion"):
            if problem := _not_text(name, values[name]):
                return Dropped(problem)
        if self.pairs == "plain":
            return _plain_pair(values, prompt, completion)
        if self.pairs == "unmarked" and any(marker in text for marker in self.markers for text in (prompt, completion)):
            return PairRecord(prompt, completion, has_markers=True)
        return conversation_of_pair(values) if completion else Dropped("completion is empty")


def _value(row: dict[str, Any], column: str) -> Any:
    """`objects.bbox` is the field bbox of the column objects, `answers.text.0` the first of a list in it."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if isinstance(value, list) and name.isdecimal():
            value = value[int(name)] if int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def _not_text(name: str, value: Any) -> str:
    if value is None:
        return f"{name} is missing"
    return "" if isinstance(value, str) else f"{name} is not text"


def _plain_pair(values: dict[str, Any], prompt: str, completion: str, has_markers: bool = False) -> Record | Dropped:
    if tools_of(values.get("tools")):
        return Dropped(TOOLS_NEED_TEMPLATE)
    system = values.get("system")
    return PairRecord(
        f"{system}\n\n{prompt}" if system and isinstance(system, str) else prompt, completion, has_markers
    )


TOOLS_NEED_TEMPLATE = "tools need a chat template"
"""Drop reason."""


LINE, BLANK_LINE = "\n", "\n\n"
"""What is between an instruction and its input in a conversation: one line break, as in other tools."""


def _instruction(values: dict[str, Any], chat: bool, has_preamble: bool, between: str) -> Record | Dropped:
    given = {"input": "", "system": "", **{name: value for name, value in values.items() if value is not None}}
    for name in ("instruction", "output", "input", "system"):
        if problem := _not_text(name, given.get(name)):
            return Dropped(problem)
    rounds = rounds_of(given.get("history"))
    if isinstance(rounds, Dropped):
        return rounds
    if not chat:
        if tools_of(given.get("tools")):
            return Dropped(TOOLS_NEED_TEMPLATE)
        layout = _alpaca_layout(bool(given["input"]), has_preamble)
        head = f"{given['system']}\n\n" if given["system"] else ""
        head += "".join(f"{ALPACA_LAYOUT.format(instruction=asked)}{answer}\n\n" for asked, answer in rounds)
        return PairRecord(head + layout.format(**given), given["output"])
    question = between.join(part for part in (given["instruction"], given["input"]) if part)
    if has_preamble:
        question = _alpaca_layout(bool(given["input"]), True).format(**given)
    turns = [{"role": role, "content": text}
             for asked in [*rounds, (question, given["output"])]
             for role, text in zip(("user", "assistant"), asked, strict=True)]  # fmt: skip
    return conversation({"messages": turns, "system": given["system"], "tools": given.get("tools")})


def _alpaca_layout(has_input: bool, has_preamble: bool) -> str:
    preamble, layout = (ALPACA_PREAMBLE_INPUT, ALPACA_LAYOUT_INPUT) if has_input else (ALPACA_PREAMBLE, ALPACA_LAYOUT)
    return preamble * has_preamble + layout
