"""Remembers how long a recipe's longest sequence is, so that a plan need not read the data again.

Written whenever data are tokenised, by `tunedeck data` and by every run; read by plans, which import no library for
data. A record's name depends on the settings that decide the tokens, and on size and modification time of the data
files: after a change of any of them, the length is unknown.

Try: `tunedeck data -r demo`, then `tunedeck plan -p demo -r demo`
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from engine.spec.files.user_folders import cache_folder
from engine.spec.schema.recipe import Recipe

VERSION = 1
"""Part of every record's name. Increase it when the same data would give other tokens."""

MOST_FILES = 200
"""Of more files than this the lengths stay unknown: looking at all of them would hold up the console."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of a local model that decide its tokens."""


def lengths_record(recipe: Recipe) -> Path | None:
    """The path of the record for a recipe's training data in their present state, whether or not it exists; None for
    data whose state cannot be told from sizes and modification times of files. Call it before the data are read."""
    model, data = recipe.model, recipe.data
    if model.id.startswith("run:") and model.tokenizer is None:
        return None
    files: list[Any] = []
    for source in data.sources:
        if source.enabled and source.path is not None and not source.path.startswith("builtin:"):
            states = _states(Path(source.path).expanduser())
            if not states:
                return None
            files += states
    for text in (model.tokenizer or model.id, model.chat_template):
        if text is not None and len(text) < 1024 and os.path.exists(text):
            files += [state for name in ("", *TOKENIZER_FILES) if (state := _state(Path(text, name)))]
    settings = data.model_dump(exclude={"validation", "workers", "shuffle", "sources"})
    sources = [source.model_dump(exclude={"weight"}) for source in data.sources if source.enabled]
    model_settings = [model.id, model.tokenizer, model.revision, model.chat_template]
    parts = [VERSION, recipe.train.seed, settings, sources, model_settings, files]
    name = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
    return cache_folder() / "lengths" / f"{name}.json"


def known_longest(recipe: Recipe) -> int | None:
    """Tokens of the longest training sequence; None if the data have not been read since the data or the settings last
    changed."""
    record = lengths_record(recipe)
    try:
        longest = json.loads(record.read_text())["longest"] if record is not None else None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # never recorded, or damaged: the lengths are unknown, and plans say so
    return longest if isinstance(longest, int) and longest > 0 else None


def record_longest(record: Path | None, longest: int) -> None:
    """Write `longest` (tokens) to the file `record`, whole or not at all. `record` is what `lengths_record` returned
    before the data were read; nothing is written if it is None or exists."""
    if record is None or record.exists():
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=record.parent)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"longest": longest}, file)
    os.replace(temporary, record)


def _states(path: Path) -> list[tuple[str, int, int]] | None:
    """(path, size in bytes, modification time in nanoseconds) of each file of a source; None if there is no file, or
    more than MOST_FILES."""
    if path.is_dir():
        names = [os.path.join(folder, name) for folder, _, found in os.walk(path) for name in found]
    else:
        names = [str(path)] if path.exists() else glob.glob(str(path), recursive=True)
    if not names or len(names) > MOST_FILES:
        return None
    return [state for name in sorted(names) if (state := _state(Path(name)))]


def _state(path: Path) -> tuple[str, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (str(path), found.st_size, found.st_mtime_ns)
