"""Recognises the format of a source by its columns, and turns each row into a record, or into a drop reason."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.config.files.data_files import find_data_files_in
from engine.config.files.find import BUILTIN_PREFIX
from engine.config.schema.data import IMAGE_FORMATS, PAIR_COLUMNS, PREFERENCE_FORMATS, UNPAIRED_FORMATS, Source
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import DATA_VERSION
from engine.data.conversations import conversation, conversation_of_pair, parsed
from engine.data.folders import csv_of_images
from engine.data.image_formats import BoxFormat, DetectionRecord, detection, image_chat, image_pair
from engine.data.preferences import JudgedRecord, LabelledRecord, PreferenceRecord, sides_of
from engine.data.records import Dropped, PairRecord, Record, TextRecord
from engine.data.unpaired import NEEDS as UNPAIRED_NEEDS
from engine.data.unpaired import answer_of, desirable_of
from engine.errors import DataError

NEEDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "prompt-completion": ("prompt", "completion"),
    "chat": ("messages",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
    "preference": ("chosen", "rejected"),
}

OPTIONAL: dict[str, tuple[str, ...]] = {
    "chat": ("tools",),
    "sharegpt": ("tools", "system"),
    "alpaca": ("input", "system", "history", "tools"),
    "prompt-completion": ("tools", "system"),
    "preference": ("prompt", "tools", "system"),
    "unpaired-preference": ("prompt", "tools", "system"),
}

OLDER_OPTIONAL: dict[str, tuple[str, ...]] = {**OPTIONAL, "alpaca": ("input", "system"), "prompt-completion": ()}
"""What `RunSpec.data_version` 1 and 2 read; other columns were ignored."""

IMAGE_CHATS = (("messages",), ("conversations",), ("prompt", "completion"))
"""Columns of a conversation, of which a source of images has one set, beside `image` or `images`."""

FILE_COLUMNS = {"image": "file_name", "images": "file_names"}
"""What `metadata.csv` and `metadata.jsonl` of a folder of images call them."""

NEEDS_BY_NAME = {
    "unpaired-preference": "prompt + completion + label, or messages + label",
    "image-chat": "messages or conversations, beside image or images, or with images in their turns; "
    "or image + prompt + completion",
    "image-preference": "chosen, rejected and perhaps prompt, beside image or images, or with images in their turns",
    "detection": "image + boxes, and labels where there are any",
}
"""Columns of formats that are used only where a source names them, or its objective does; for messages."""

PLAIN_PAIR = {"prompt": "input", "completion": "output"}
"""Columns of a prompt and a completion, where no format has its own."""

ALIASES: dict[str, tuple[str, ...]] = {
    **{names[0]: names[1:] for names in PAIR_COLUMNS},
    "messages": ("chat", "dialog", "dialogue"),
    "conversations": ("conversation",),
    "tools": ("functions",),
    "label": ("kto_tag",),
}
"""Other names under which a column is recognised, if none has its own name."""

Judged = Literal["pairs", "unpaired", None]
"""Which preferences are learned: pairs, single answers with labels, or none."""


def judged_by(recipe: Recipe) -> Judged:
    return "pairs" if recipe.learns_pairs else "unpaired" if recipe.learns_preferences else None


CONVERSATIONS = ("messages", "conversations")
"""Columns that are a pair's prompt, if it has no other."""

ALPACA_LAYOUT = "### Instruction:\n{instruction}\n\n### Response:\n"
ALPACA_LAYOUT_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
"""Prompts of instruction rows for a tokenizer without a chat template (layout: Stanford Alpaca, 2023)."""


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
    markers: Sequence[str] = field(default=(), repr=False)
    """Texts of which a row has one that went through the chat template already."""
    version: int = field(default=DATA_VERSION, repr=False)
    """`RunSpec.data_version`."""

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
            return image_chat(values)
        if self.name in ("chat", "sharegpt"):
            return conversation(values, calls=self.version > 2)
        if self.name == "alpaca":
            return _instruction(values, self.chat)
        if self.name == "prompt-completion":
            return self._pair(values)
        if self.name in PREFERENCE_FORMATS:
            return self._preference(values)
        if self.name == "unpaired-preference":
            return self._labelled(values)
        for name in NEEDS[self.name]:
            if problem := _not_text(name, values[name]):
                return Dropped(problem)
        return TextRecord(values["text"], row.get("starts") is not False, row.get("ends") is not False)

    def _preference(self, values: dict[str, Any]) -> PreferenceRecord | Dropped:
        sides = sides_of(values)
        if isinstance(sides, Dropped):
            return sides
        prompt, *answers = sides
        side = image_pair if self.has_images else self._pair
        chosen, rejected = (side({**values, "prompt": prompt, "completion": answer}) for answer in answers)
        if isinstance(chosen, Dropped) or isinstance(rejected, Dropped):
            return next(each for each in (chosen, rejected) if isinstance(each, Dropped))
        return PreferenceRecord(chosen, rejected)

    def _labelled(self, values: dict[str, Any]) -> LabelledRecord | Dropped:
        desirable, answer = desirable_of(values["label"]), answer_of(values)
        if isinstance(desirable, Dropped) or isinstance(answer, Dropped):
            return next(each for each in (desirable, answer) if isinstance(each, Dropped))
        record = self._pair({"prompt": None, **answer})
        return record if isinstance(record, Dropped) else LabelledRecord(record, desirable)

    def _pair(self, values: dict[str, Any]) -> Record | Dropped:
        """A prompt and a completion, each a text or a list of messages."""
        prompt, completion = values["prompt"], values["completion"]
        if isinstance(prompt, list) or isinstance(completion, list):
            return conversation_of_pair(values)
        for name in NEEDS["prompt-completion"]:
            if problem := _not_text(name, values[name]):
                return Dropped(problem)
        if self.pairs == "plain":
            return _plain_pair(values, prompt, completion)
        if self.pairs == "unmarked" and any(marker in text for marker in self.markers for text in (prompt, completion)):
            return PairRecord(prompt, completion, has_markers=True)
        return conversation_of_pair(values) if completion else Dropped("completion is empty")


def recognise(
    columns: Sequence[str],
    source: Source,
    *,
    has_template: bool,
    markers: Sequence[str] = (),
    version: int = DATA_VERSION,
    judged: Judged = None,
) -> Format:
    """Chosen by the columns and by the source's `format` and `columns`; with a chat template (`has_template`), whose
    `markers` show that a row went through it, instructions and prompts are conversations as `template` says. Columns
    are read as `RunSpec.data_version` = `version` says. Rows that may be read as preferences or not are what `judged`
    says. Raises DataError when no format fits, or several do, or `template` does not fit the format."""
    if source.format in IMAGE_FORMATS:
        return _with_images(columns, source)
    mapped = _mapped_columns(columns, source)
    fitting = {name: fields for name in NEEDS if (fields := _fields(name, columns, mapped, version)) is not None}
    for needed in UNPAIRED_NEEDS if judged == "unpaired" or source.format == "unpaired-preference" else ():
        fields = _fields("unpaired-preference", columns, mapped, version, needed)
        if fields is not None:
            fitting.setdefault("unpaired-preference", fields)
    if source.format != "auto":
        fitting = {name: fields for name, fields in fitting.items() if name == source.format}
    elif mapped:
        fitting = {name: fields for name, fields in fitting.items() if set(mapped) <= set(fields)} or fitting
    if not fitting and source.format in ("auto", "prompt-completion") and set(PLAIN_PAIR.values()) <= set(columns):
        fitting = {"prompt-completion": {**PLAIN_PAIR, **mapped}}
    if len(fitting) > 1:
        wanted = {"pairs": ("preference",), "unpaired": UNPAIRED_FORMATS, None: set(NEEDS) - {"preference"}}[judged]
        fitting = {name: fields for name, fields in fitting.items() if name in wanted} or fitting
    if len(fitting) != 1:
        raise _unclear(columns, source, list(fitting))
    ((name, fields),) = fitting.items()
    _check_template(name, source)
    chat = has_template and (name != "alpaca" or source.template != "none")
    chat |= name == "alpaca" and source.template == "chat"
    builtin = (source.path or "").startswith(BUILTIN_PREFIX)
    pairs: Literal["chat", "unmarked", "plain"] = "chat" if source.template == "chat" else "plain"
    if source.template == "auto" and has_template and not builtin:
        pairs = "unmarked"
    return Format(name, fields, source.name, chat=chat, pairs=pairs, markers=markers, version=version)


def _check_template(format_name: str, source: Source) -> None:
    """Raises DataError: plain text has no turns, and a conversation is nothing without its template."""
    wrong = {"text": "chat", "chat": "none", "sharegpt": "none"}.get(format_name)
    if source.template == wrong:
        raise DataError(
            f'source {source.name}: template = "{wrong}" with rows of the format {format_name}',
            expected="text for none; conversations, instructions, or prompts with completions for chat",
            fix=f"add --set {shlex.quote(f'data.sources.{source.name}.template=auto')}",
        )


def _with_images(columns: Sequence[str], source: Source) -> Format:
    """Raises DataError if columns are missing."""
    names: tuple[str, ...] = (
        "image", "images", "boxes", "labels", "messages", "conversations", "prompt", "completion", "chosen", "rejected",
    )  # fmt: skip
    mapped = _mapped_columns(columns, source, set(names))
    fields = {name: mapped.get(name, name) for name in names if mapped.get(name, name).partition(".")[0] in columns}
    for ours, theirs in FILE_COLUMNS.items():
        if theirs in columns and ours not in fields:
            fields[ours] = theirs
    images = {name: column for name, column in fields.items() if name in ("image", "images")}
    if source.format == "detection":
        if {"image", "boxes"} <= set(fields):
            chosen = {name: column for name, column in fields.items() if name in ("image", "boxes", "labels")}
            return Format("detection", chosen, source.name, True, BoxFormat.of(source), _image_root(source))
        raise _unclear(columns, source, [])
    if source.format == "image-preference":
        if {"chosen", "rejected"} <= set(fields):
            named = {name: column for name, column in fields.items() if name in ("prompt", "chosen", "rejected")}
            return Format("image-preference", {**images, **named}, source.name, True, None, _image_root(source))
        raise _unclear(columns, source, [])
    for needed in IMAGE_CHATS:
        # The turns of a conversation may name their images themselves.
        if set(needed) <= set(fields) and (images or len(needed) == 1):
            chosen = {**images, **{name: column for name, column in fields.items() if name in needed}}
            return Format("image-chat", chosen, source.name, True, None, _image_root(source))
    raise _unclear(columns, source, [])


def _image_root(source: Source) -> str | None:
    """The source's `image_root`, else its data folder or the folder of its data file; None without a path."""
    if source.image_root is not None or source.path is None:
        return source.image_root
    path = Path(source.path).expanduser()
    table = csv_of_images(source, find_data_files_in(path)) if path.is_dir() else path
    return str(path if table is None else table.parent)


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


def _mapped_columns(columns: Sequence[str], source: Source, known: set[str] | None = None) -> dict[str, str]:
    known = known or {"label", *(name for table in (NEEDS, OPTIONAL) for names in table.values() for name in names)}
    for ours, theirs in source.columns.items():
        if ours not in known:
            raise DataError(
                f"source {source.name}: columns.{ours} is not one of our columns", expected=", ".join(sorted(known))
            )
        if theirs not in columns and theirs.partition(".")[0] not in columns:
            raise DataError(
                f"source {source.name}: columns.{ours} = {theirs!r}, and there is no such column",
                expected=f"one of {', '.join(columns)}",
            )
    return dict(source.columns)


def _fields(
    format_name: str, columns: Sequence[str], mapped: dict[str, str], version: int, needed: Sequence[str] = ()
) -> dict[str, str] | None:
    """None when a required column (of `needed`, else of NEEDS) is missing or ambiguous."""
    fields = {}
    for ours in needed or NEEDS[format_name]:
        theirs = [mapped[ours]] if ours in mapped else [ours] if ours in columns else []
        theirs = theirs or [alias for alias in ALIASES.get(ours, ()) if alias in columns]
        if len(theirs) != 1:
            return None
        fields[ours] = theirs[0]
    optional = OPTIONAL if version > 2 else OLDER_OPTIONAL
    for ours in optional.get(format_name, ()):
        others = (*ALIASES.get(ours, ()), *(CONVERSATIONS if (format_name, ours) == ("preference", "prompt") else ()))
        names = [mapped.get(ours, ours), *(others if version > 2 and ours not in mapped else ())]
        if found := [name for name in names if name in columns or (ours in mapped and name == mapped[ours])]:
            fields[ours] = found[0]
    return fields


def _unclear(columns: Sequence[str], source: Source, fitting: Sequence[str]) -> DataError:
    needs = "; ".join(f"{name}: {' + '.join(fields)}" for name, fields in NEEDS.items())
    needs = NEEDS_BY_NAME.get(source.format, needs)
    found = f"source {source.name}: the columns are {', '.join(columns) or 'none'}"
    if fitting:
        return DataError(
            f"{found}, and fit {' and '.join(fitting)}",
            expected=f"one format ({needs})",
            fix=f'say which: format = "{fitting[0]}"',
        )
    wanted = "no format" if source.format == "auto" else f'not format = "{source.format}"'
    return DataError(f"{found}, and fit {wanted}", expected=needs, fix=_columns_to_name(columns, source))


def _columns_to_name(columns: Sequence[str], source: Source) -> str:
    """The setting that names the source's columns, if their own names are known but for upper case, or there is one."""
    known = {alias: ours for ours, others in ALIASES.items() for alias in (ours, *others)}
    known |= {name: name for needs in NEEDS.values() for name in needs if name not in known}
    meant = {known[name.lower()]: name for name in columns if name.lower() in known}
    if len(columns) == 1:
        (name,) = columns
        return f'name it in the source, such as columns = {{text = "{name}"}}, or what is nested in it: "{name}.answer"'
    if not any(set(needs) <= set(meant) for needs in NEEDS.values()):
        return 'name the columns in the source, such as columns = {prompt = "question", completion = "answer"}'
    table = ", ".join(f'{ours} = "{theirs}"' for ours, theirs in meant.items())
    return f"add --set {shlex.quote(f'data.sources.{source.name}.columns={{{table}}}')}"


def _not_text(name: str, value: Any) -> str:
    if value is None:
        return f"{name} is missing"
    return "" if isinstance(value, str) else f"{name} is not text"


def _plain_pair(values: dict[str, Any], prompt: str, completion: str) -> Record | Dropped:
    if values.get("tools"):
        return Dropped(TOOLS_NEED_TEMPLATE)
    system = values.get("system")
    return PairRecord(f"{system}\n\n{prompt}" if system and isinstance(system, str) else prompt, completion)


TOOLS_NEED_TEMPLATE = "tools need a chat template"
"""Drop reason."""


def _instruction(values: dict[str, Any], chat: bool) -> Record | Dropped:
    given = {"input": "", "system": "", **{name: value for name, value in values.items() if value is not None}}
    for name in ("instruction", "output", "input", "system"):
        if problem := _not_text(name, given.get(name)):
            return Dropped(problem)
    rounds = _rounds(given.get("history"))
    if isinstance(rounds, Dropped):
        return rounds
    if not chat:
        if given.get("tools"):
            return Dropped(TOOLS_NEED_TEMPLATE)
        layout = ALPACA_LAYOUT_INPUT if given["input"] else ALPACA_LAYOUT
        head = f"{given['system']}\n\n" if given["system"] else ""
        head += "".join(f"{ALPACA_LAYOUT.format(instruction=asked)}{answer}\n\n" for asked, answer in rounds)
        return PairRecord(head + layout.format(**given), given["output"])
    question = "\n\n".join(part for part in (given["instruction"], given["input"]) if part)
    turns = [{"role": role, "content": text}
             for asked in [*rounds, (question, given["output"])]
             for role, text in zip(("user", "assistant"), asked, strict=True)]  # fmt: skip
    return conversation({"messages": turns, "system": given["system"], "tools": given.get("tools")})


def _rounds(history: Any) -> list[tuple[str, str]] | Dropped:
    """Earlier questions with their answers, from a list of pairs or its JSON text."""
    given = parsed(history) if isinstance(history, str) and history.strip() else history or []
    if not isinstance(given, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in given
    ):
        return Dropped("history is not a list of questions with their answers")
    return [(asked, answer) for asked, answer in given]
