"""Says in a plan whether prompts with completions go through the model's chat template, as far as files tell before the
data are read; and what was said of the data when they were read."""

from __future__ import annotations

import csv
import glob
import json
from pathlib import Path

from engine.config.files.caches import find_snapshot, known_warnings
from engine.config.files.find import BUILTIN_PREFIX
from engine.config.files.machine import path_of
from engine.config.schema.data import PAIR_COLUMNS, Source
from engine.config.schema.recipe import Model, Recipe

PEEKED_BYTES = 64 * 2**10
"""Read of the first file of a source, to see the columns of its first row."""
DELIMITERS = ",;\t|"


def notes_on_rows(recipe: Recipe) -> list[str]:
    """Return the warnings of an earlier reading of the data, and a sentence for each way that the sources with prompts
    and completions are rendered."""
    warnings = known_warnings(recipe)
    if recipe.method.objective != "sft":
        return warnings
    pairs = [source for source in recipe.data.sources if source.enabled and _has_pairs(source)]
    plain = [source.name for source in pairs if source.template == "none"]
    chat = [source.name for source in pairs if source.template != "none"]
    has_template = _has_template(recipe.model)
    notes = warnings
    if plain:
        notes.append(
            f"prompts and completions of {', '.join(plain)} are plain text without the chat template: prompt "
            "the trained model without it"
        )
    if chat and has_template is False and "chat" not in {source.template for source in pairs}:
        notes.append(f"prompts and completions of {', '.join(chat)} are plain text: the model has no chat template")
    elif chat:
        where = "" if has_template else ", if it has one"
        notes.append(
            f"prompts and completions of {', '.join(chat)} are rendered with the model's chat template{where}; "
            'template = "none" in the source keeps them plain text'
        )
    return notes


def _has_pairs(source: Source) -> bool:
    if source.format != "auto":
        return source.format in ("prompt-completion", "alpaca")
    if source.path is None or source.path.startswith(BUILTIN_PREFIX):
        return False
    columns = {*_first_columns(path_of(source.path)), *source.columns}
    prompt, completion = PAIR_COLUMNS
    alpaca = {"instruction", "output"} <= columns
    return (
        alpaca or {"input", "output"} <= columns or not (columns.isdisjoint(prompt) or columns.isdisjoint(completion))
    )


def _first_columns(path: Path) -> list[str]:
    """The columns of the first row of a JSON or CSV file, or of the first one in a folder; empty if they cannot be
    seen."""
    found = sorted(path.rglob("*")) if path.is_dir() else [Path(name) for name in sorted(glob.glob(str(path)))]
    file = next((each for each in found if each.suffix in (".jsonl", ".json", ".csv", ".tsv") and each.is_file()), None)
    try:
        with open(file or path, "rb") as opened:
            text = opened.read(PEEKED_BYTES).decode("utf-8-sig", "ignore") if file else ""
        if file and file.suffix in (".csv", ".tsv"):
            line = text.partition("\n")[0].strip()
            return next(csv.reader([line], delimiter=max(DELIMITERS, key=line.count)), [])
        row = json.JSONDecoder().raw_decode(text.lstrip("[ \t\r\n"))[0] if text else None
    except (OSError, ValueError, csv.Error, RecursionError):
        return []  # what is wrong with the data is said where they are read
    return list(row) if isinstance(row, dict) else []


def _has_template(model: Model) -> bool | None:
    """Whether the tokenizer has a chat template; None where files do not tell."""
    source = model.tokenizer or model.id
    if model.chat_template is not None or source.startswith(BUILTIN_PREFIX):
        return True
    local = path_of(source)
    folder = local if local.is_dir() else find_snapshot(source, model.revision)
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return None
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
