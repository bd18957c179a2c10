"""Recognises the format of a source by the names of its columns."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from engine.config.files.data_files import find_data_files_in
from engine.config.files.find import BUILTIN_PREFIX
from engine.config.schema.data import IMAGE_FORMATS, PAIR_COLUMNS, PREFERENCE_FORMATS, UNPAIRED_FORMATS, Source
from engine.config.schema.recipe import Recipe
from engine.config.schema.run import DATA_VERSION
from engine.data.conversations import TURN_KEYS, TurnNames
from engine.data.folders import table_of_images
from engine.data.formats import Format
from engine.data.image_formats import BoxFormat
from engine.data.preferences import NEEDS as UNPAIRED_NEEDS
from engine.data.token_rows import MASKS
from engine.errors import DataError

NEEDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "prompt-completion": ("prompt", "completion"),
    "chat": ("messages",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
    "preference": ("chosen", "rejected"),
    "tokens": ("input_ids",),
}

OPTIONAL: dict[str, tuple[str, ...]] = {
    "chat": ("tools", "system"),
    "sharegpt": ("tools", "system"),
    "alpaca": ("input", "system", "history", "tools"),
    "prompt-completion": ("tools", "system"),
    "preference": ("prompt", "input", "history", "tools", "system"),
    "unpaired-preference": ("prompt", "input", "history", "tools", "system"),
    "tokens": ("labels", "attention_mask", "position_ids", *MASKS),
}

OLDER_OPTIONAL: dict[str, tuple[str, ...]] = {
    **OPTIONAL,
    "chat": ("tools",),
    "alpaca": ("input", "system"),
    "prompt-completion": (),
    "preference": ("prompt", "tools", "system"),
    "unpaired-preference": ("prompt", "tools", "system"),
}
"""What `RunSpec.data_version` 1 and 2 read; other columns were ignored."""

PAIR = ("prompt", "completion")

IMAGE_NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "image-chat": (("messages",), ("conversations",), PAIR),
    "image-preference": (("chosen", "rejected"),),
    "image-unpaired-preference": UNPAIRED_NEEDS,
    "detection": (("image", "boxes"),),
}
"""Columns of formats with images, of which a source has one set, beside `image` or `images`."""

IMAGE_OPTIONAL: dict[str, tuple[str, ...]] = {
    "image-chat": ("images", "system", "tools"),
    "image-preference": ("images", "prompt", "system", "tools"),
    "image-unpaired-preference": ("images", "prompt", "system", "tools"),
    "detection": ("labels",),
}

IMAGE_COLUMNS = (
    "image", "images", "boxes", "labels", "messages", "conversations", "prompt", "completion", "chosen", "rejected",
    "label", "system", "tools",
)  # fmt: skip

NEEDS_BY_NAME = {
    "unpaired-preference": "prompt + completion + label, or messages + label",
    "image-chat": "messages or conversations with image or images, or with images in their turns; or image + prompt + "
    "completion",
    "image-preference": "chosen, rejected and optionally prompt, with image or images, or with images in their turns",
    "image-unpaired-preference": "prompt + completion + label, or messages + label, with image or images, or with "
    "images in their turns",
    "detection": "image + boxes, optionally labels",
}
"""Columns of formats that are used only where a source names them, or its objective does; for messages."""

LAST: tuple[tuple[str, dict[str, str], tuple[str, ...]], ...] = (
    ("prompt-completion", {"prompt": "input", "completion": "output"}, ()),
    ("alpaca", {"instruction": "instruction", "input": "context", "output": "response"}, ("input",)),
    ("preference", {
        "prompt": "input.messages", "tools": "input.tools", "chosen": "preferred_output",
        "rejected": "non_preferred_output",
    }, ()),
)  # fmt: skip
"""What is tried where no format has its own columns: format, its columns, and those that may be missing. Dolly's rows;
OpenAI's preferences."""

ALIASES: dict[str, tuple[str, ...]] = {
    **{names[0]: names[1:] for names in PAIR_COLUMNS},
    "messages": ("chat", "dialog", "dialogue"),
    "conversations": ("conversation",),
    "tools": ("functions",),
    "system": ("system_prompt", "system_message"),
    "assistant_masks": ("assistant_mask", "assistant_tokens_mask"),
    "label": ("kto_tag",),
    # What metadata.csv and metadata.jsonl of a folder of images call them.
    "image": ("file_name",),
    "images": ("file_names",),
}
"""Other names under which a column is recognised, if none has its own name."""

PROMPT_COLUMNS = frozenset({
    "system", "system_prompt", "system_message", "sys_prompt", "instruction", "instructions", "prompt", "question",
    "query", "input", "context", "contexts", "history", "tools", "functions", "documents", "passages", "background",
    "knowledge", "developer", "persona", "character", "preamble", "chat_template_kwargs", "template_args",
    "reasoning", "reasoning_content", "thinking", "token_type_ids", "cu_seqlens", "seq_lengths", "seq_idx",
    "pixel_values",
})  # fmt: skip
"""Columns, in lower case, that may be part of the prompt or of the answer: one that is not read is warned of."""

Judged = Literal["pairs", "unpaired", None]
"""Which preferences are learned: pairs, single answers with labels, or none."""


def judged_by(recipe: Recipe) -> Judged:
    return "pairs" if recipe.learns_pairs else "unpaired" if recipe.learns_preferences else None


ALWAYS_CHAT = ("chat", "sharegpt", *IMAGE_FORMATS)
"""Formats that nothing but a chat template can render."""

ALPACA_TEMPLATES = ("alpaca", "alpaca-chat")
"""Values of `template` that are prompts of instruction rows."""

CONVERSATIONS = ("messages", "conversations")
"""Columns that are a pair's prompt, if it has no other."""


def recognise(
    columns: Sequence[str],
    source: Source,
    *,
    has_template: bool,
    markers: Sequence[str] = (),
    opening: str = "",
    version: int = DATA_VERSION,
    judged: Judged = None,
) -> Format:
    """Chosen by the columns and by the source's `format` and `columns`; with a chat template (`has_template`), whose
    `markers` show that a row went through it and that writes `opening` before an answer, instructions and prompts are
    conversations as `template` says. Columns are read as `RunSpec.data_version` = `version` says. Rows that may be read
    as preferences or not are what `judged` says. Raises DataError when no format fits, or several do, or `template`
    does not fit the format."""
    if source.format in IMAGE_FORMATS:
        return _with_images(columns, source, version)
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
    if len(fitting) > 1 and source.format == "auto" and "input_ids" not in mapped:
        fitting.pop("tokens", None)  # Rows keep their text beside its tokens.
    if not fitting:
        fitting = _last(columns, source, mapped)
    if len(fitting) > 1:
        wanted = {"pairs": ("preference",), "unpaired": UNPAIRED_FORMATS, None: set(NEEDS) - {"preference"}}[judged]
        fitting = {name: fields for name, fields in fitting.items() if name in wanted} or fitting
    if len(fitting) != 1:
        raise _unclear(columns, source, list(fitting), judged)
    ((name, fields),) = fitting.items()
    _check_template(name, source)
    _check_turn_names("text" if name == "prompt-completion" and not has_template else name, source)
    chat = has_template and (name != "alpaca" or source.template not in ("none", "alpaca"))
    chat |= name == "alpaca" and source.template in ("chat", "alpaca-chat")
    builtin = (source.path or "").startswith(BUILTIN_PREFIX)
    pairs: Literal["chat", "unmarked", "plain"] = "chat" if source.template == "chat" else "plain"
    if source.template == "auto" and has_template and not builtin:
        pairs = "unmarked"
    names = TurnNames.of(source)
    return Format(
        name,
        fields,
        source.name,
        chat=chat,
        pairs=pairs,
        markers=markers,
        opening=opening,
        version=version,
        names=names,
        has_preamble=source.template in ALPACA_TEMPLATES,
    )


def _check_template(format_name: str, source: Source) -> None:
    """Raises DataError: plain text has no turns, and a conversation is nothing without its template."""
    if source.template in ALPACA_TEMPLATES and format_name != "alpaca":
        raise DataError(
            f'source {source.name}: template = "{source.template}" with rows of the format {format_name}',
            expected="rows with instruction and output",
            fix=f"add --set {shlex.quote(f'data.sources.{source.name}.template=auto')}",
        )
    wrong = {"text": "chat", "tokens": "chat"}.get(format_name, "none" if format_name in ALWAYS_CHAT else None)
    if source.template == wrong:
        raise DataError(
            f'source {source.name}: template = "{wrong}" with rows of the format {format_name}',
            expected="text for none; conversations, instructions, or prompts with completions for chat",
            fix=f"add --set {shlex.quote(f'data.sources.{source.name}.template=auto')}",
        )


WITHOUT_TURNS = ("text", "tokens", "alpaca", "detection")
"""Formats whose rows have no list of turns."""


def check_turn_names_of_row(found: Format, source: Source, row: dict[str, Any]) -> None:
    """Raises DataError where names of roles or of keys of turns have no effect, because prompts and completions are
    texts, as in the first row."""
    values = [row.get(theirs) for theirs in found.fields.values()]
    if found.name == "prompt-completion" and all(isinstance(value, str) for value in values):
        _check_turn_names("text", source)


def _check_turn_names(format_name: str, source: Source) -> None:
    """Raises DataError where names of roles or of keys of turns have no effect, or a name has two roles."""
    lists = ([names] if isinstance(names, str) else names for names in source.roles.values())
    given = Counter(name.lower() for names in lists for name in names)
    if twice := [name for name, number in given.items() if number > 1]:
        raise DataError(f"source {source.name}: roles has {twice[0]!r} twice", fix="remove it from one of the roles")
    named = ["roles"] if source.roles else [f"columns.{name}" for name in source.columns if name in TURN_KEYS]
    if named and format_name in WITHOUT_TURNS:
        raise DataError(
            f"source {source.name}: {named[0]} is for turns, but rows of the format {format_name} have none",
            expected="rows with conversations",
            fix=f"remove {named[0]} from the source",
        )


def _with_images(columns: Sequence[str], source: Source, version: int) -> Format:
    """Raises DataError if columns are missing."""
    name, mapped = source.format, _mapped_columns(columns, source, set(IMAGE_COLUMNS))
    _check_template(name, source)
    _check_turn_names(name, source)
    fields: dict[str, str] = {}
    for ours in IMAGE_COLUMNS if version > 3 else IMAGE_COLUMNS[:-2]:
        names = [mapped[ours]] if ours in mapped else [ours, *_other_names(ours, name)]
        if found := [theirs for theirs in names if theirs.partition(".")[0] in columns]:
            fields[ours] = found[0]
    for needed in IMAGE_NEEDS[name]:
        # The turns of a conversation may name their images themselves.
        if set(needed) <= set(fields) and (needed != PAIR or {"image", "images"} & set(fields)):
            read = {ours: fields[ours] for ours in fields if ours in ("image", *needed, *IMAGE_OPTIONAL[name])}
            return Format(
                name, read, source.name, True, BoxFormat.of(source), _image_root(source), version=version,
                names=TurnNames.of(source),
            )  # fmt: skip
    raise _unclear(columns, source, [])


def _image_root(source: Source) -> str | None:
    """The source's `image_root`, else its data folder or the folder of its data file; None without a path."""
    if source.image_root is not None or source.path is None:
        return source.image_root
    path = Path(source.path).expanduser()
    table = table_of_images(source, find_data_files_in(path)) if path.is_dir() else path
    return str(path if table is None else table.parent)


def _mapped_columns(columns: Sequence[str], source: Source, known: set[str] | None = None) -> dict[str, str]:
    known = known or {"label", *(name for table in (NEEDS, OPTIONAL) for names in table.values() for name in names)}
    columns_of_rows = {ours: theirs for ours, theirs in source.columns.items() if ours not in TURN_KEYS}
    for ours, theirs in columns_of_rows.items():
        if ours not in known:
            raise DataError(
                f"source {source.name}: columns.{ours} is not a known column",
                expected=f"{', '.join(sorted(known))}; for turns of a conversation {', '.join(TURN_KEYS)}",
            )
        if theirs not in columns and theirs.partition(".")[0] not in columns:
            raise DataError(
                f"source {source.name}: columns.{ours} = {theirs!r}, but there is no such column",
                expected=f"one of {', '.join(columns)}",
            )
    return columns_of_rows


def _other_names(ours: str, format_name: str) -> tuple[str, ...]:
    is_prompt_of_pairs = ours == "prompt" and format_name in PREFERENCE_FORMATS
    return (*ALIASES.get(ours, ()), *(("instruction", *CONVERSATIONS) if is_prompt_of_pairs else ()))


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
        others = _other_names(ours, format_name) if version > 2 and ours not in mapped else ()
        names = [mapped.get(ours, ours), *others]
        if found := [name for name in names if name in columns or (ours in mapped and name == mapped[ours])]:
            fields[ours] = found[0]
    return fields


def _last(columns: Sequence[str], source: Source, mapped: dict[str, str]) -> dict[str, dict[str, str]]:
    """The first of LAST that the source's `format` and columns allow."""
    for name, needed, optional in LAST:
        fields = {**needed, **mapped}
        fields = {ours: theirs for ours, theirs in fields.items() if theirs in columns or ours not in optional}
        here = all(theirs.partition(".")[0] in columns for theirs in fields.values())
        if here and source.format in ("auto", name):
            return {name: fields}
    return {}


EXAMPLES: dict[Judged, str] = {
    None: 'prompt = "question", completion = "answer"',
    "pairs": 'chosen = "better", rejected = "worse"',
    "unpaired": 'completion = "answer", label = "good"',
}
"""Names of columns that a source might give, by what its rows train."""


def _unclear(columns: Sequence[str], source: Source, fitting: Sequence[str], judged: Judged = None) -> DataError:
    needs = "; ".join(f"{name}: {' + '.join(fields)}" for name, fields in NEEDS.items())
    needs = NEEDS_BY_NAME.get(source.format, needs)
    found = f"source {source.name}: the columns are {', '.join(columns) or 'none'}"
    if fitting:
        return DataError(
            f"{found}, which match {' and '.join(fitting)}",
            expected=f"one format ({needs})",
            fix=f'set the format: format = "{fitting[0]}"',
        )
    wanted = "no known format" if source.format == "auto" else f'not format = "{source.format}"'
    return DataError(f"{found}, which match {wanted}", expected=needs, fix=_columns_to_name(columns, source, judged))


def _columns_to_name(columns: Sequence[str], source: Source, judged: Judged) -> str:
    """The setting that names the source's columns, if their own names are known but for upper case, or there is one."""
    known = {alias: ours for ours, others in ALIASES.items() for alias in (ours, *others)}
    known |= {name: name for needs in NEEDS.values() for name in needs if name not in known}
    meant = {known[name.lower()]: name for name in columns if name.lower() in known}
    if len(columns) == 1:
        (name,) = columns
        return f'set it in the source, such as columns = {{text = "{name}"}}, or a nested field: "{name}.answer"'
    if not any(set(needs) <= set(meant) for needs in NEEDS.values()):
        named = f"name the columns in the source, such as columns = {{{EXAMPLES[judged]}}}"
        if (source.path or "").lower().endswith((".csv", ".tsv")):
            return f"{named}; if the file's first line is a row, add a line with the column names before it"
        return f'{named}; write nested fields with dots, such as "{columns[-1]}.answer"' if columns else named
    table = ", ".join(f'{ours} = "{theirs}"' for ours, theirs in meant.items())
    return f"add --set {shlex.quote(f'data.sources.{source.name}.columns={{{table}}}')}"
