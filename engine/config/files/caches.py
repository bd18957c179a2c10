"""What this machine keeps between runs: the user's cache folder, the hub cache (read without the hub's library), and
the longest sequence and largest images of each recipe's data."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from engine.config.files.find import BUILTIN_PREFIX, RUN_PREFIX
from engine.config.files.machine import path_of
from engine.config.schema.recipe import Recipe


def cache_folder() -> Path:
    """$TUNEDECK_CACHE, else Tunedeck's folder in the platform's cache: tokens, tables of `datasets`, simulations."""
    if configured := os.environ.get("TUNEDECK_CACHE"):
        return Path(configured).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("tunedeck"))


OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

TRUE_WORDS = ("1", "ON", "YES", "TRUE")


def offline_variable() -> str | None:
    """The variable that forbids requests to the hub; None if none does. Of several, the first set one decides."""
    name = next((name for name in OFFLINE_VARIABLES if os.environ.get(name)), None)
    return name if name is not None and os.environ[name].upper() in TRUE_WORDS else None


def find_snapshot(model: str, revision: str | None = None) -> Path | None:
    """The cached files of a model (OWNER/NAME) at a branch, tag or commit, by default main; None if there are none.
    The hub's `refs/REVISION` names the folder under `snapshots/`, where each file links to a complete download."""
    repository = f"{_hub_cache()}/models--{model.replace('/', '--')}"
    if not os.path.isdir(repository):
        return None
    reference = Path(repository, "refs", revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision or ""
    snapshot = Path(repository, "snapshots", commit)
    return snapshot if commit and snapshot.is_dir() else None


def has_weights(snapshot: Path) -> bool:
    """All files that an index lists must be there."""
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False  # a damaged index: the hub has a whole one
        return all((snapshot / name).is_file() for name in named)
    return any(file.suffix in (".safetensors", ".bin") and file.is_file() for file in snapshot.iterdir())


def has_tokenizer(snapshot: Path) -> bool:
    """Any of transformers' formats counts."""
    names = (file.name for file in snapshot.iterdir() if file.is_file())
    return any(name.startswith(("tokenizer", "vocab", "tekken")) or name.endswith(".model") for name in names)


def has_adapter(snapshot: Path) -> bool:
    return all((snapshot / f"adapter_{name}").is_file() for name in ("config.json", "model.safetensors"))


def has_data_set(name: str, config: str | None = None) -> bool:
    """Whether this data set was read here before: only then it opens without a connection."""
    if data_set_note(name, config).is_file():
        return True
    owner, slash, stem = name.rpartition("/")
    snake = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", stem)).lower()
    prepared = cache_folder() / "datasets" / (f"{owner}___{snake}" if slash else snake)
    pattern = f"{config or '*'}/*/*"
    return any(found.is_dir() and found.suffix != ".incomplete" for found in prepared.glob(pattern))


def data_set_note(name: str, config: str | None) -> Path:
    """The file that names the JSON or CSV files of a hub data set."""
    return cache_folder() / "datasets" / f"{name.replace('/', '___')}@{quote(config or '', safe='')}.json"


def _hub_cache() -> str:
    """$HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub."""
    given = os.environ.get("HF_HUB_CACHE")
    if given is not None:
        return os.path.expanduser(given)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    return os.path.join(os.path.expanduser(home), "hub")


VERSION = 5
"""Part of every record's name. Increase it when the same data would give other tokens, or a record says more."""

MOST_FILES = 200
"""Of more files than this the lengths stay unknown: looking at all of them would hold up the console."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of a local model that decide its tokens."""


def lengths_record(recipe: Recipe, *, validation: bool = False) -> Path | None:
    """The path of the record for the training data, or for the sources of `data.validation`, as they are now, whether
    or not it exists; None where sizes and modification times of files do not tell their state. Call it before the data
    are read."""
    model, data = recipe.model, recipe.data
    read = [source for source in (data.validation if validation else data.sources) if source.enabled]
    if model.id.startswith(RUN_PREFIX) and model.tokenizer is None:
        return None
    files: list[Any] = []
    for source in read:
        if source.path is not None and not source.path.startswith(BUILTIN_PREFIX):
            states = _states(path_of(source.path))
            if not states:
                return None
            files += states
    for text in (model.tokenizer or model.id, model.chat_template):
        if text is not None and len(text) < 1024 and os.path.exists(text):
            files += [state for name in ("", *TOKENIZER_FILES) if (state := _state(Path(text, name)))]
    settings = data.model_dump(exclude={"validation", "workers", "shuffle", "sources"})
    sources = [source.model_dump(exclude={"weight"}) for source in read]
    model_settings: list[Any] = [model.id, model.tokenizer, model.revision, model.chat_template]
    model_settings += [model.add_tokens] if model.add_tokens else []
    parts = [VERSION, recipe.train.seed, settings, sources, model_settings, files, *(["validation"] * validation)]
    name = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
    return cache_folder() / "lengths" / f"{name}.json"


class SequenceBounds(NamedTuple):
    """What a plan relies on of the data."""

    tokens: int
    """Of the longest training sequence."""
    targets: int | None = None
    """Most target tokens of one sequence, held-out ones included; None: unknown, so that every token may be one."""


def known_bounds(recipe: Recipe) -> SequenceBounds | None:
    """None if the training data or the settings changed since the data were read."""
    found = _recorded(lengths_record(recipe))
    longest, targets = found.get("longest"), found.get("targets")
    if not isinstance(longest, int) or longest <= 0:
        return None
    if not recipe.learns_preferences:
        return SequenceBounds(longest)
    if any(source.enabled for source in recipe.data.validation):
        held_out = _recorded(lengths_record(recipe, validation=True)).get("targets")
        targets = max(targets, held_out) if isinstance(targets, int) and isinstance(held_out, int) else None
    return SequenceBounds(longest, targets if isinstance(targets, int) else None)


def known_images(recipe: Recipe) -> list[tuple[int, int]] | None:
    """(height, width) in pixels of each image of the training sequence with most tokens of images; None as for
    `known_bounds`, and where the model's own processor does not read the images."""
    found = _recorded(lengths_record(recipe)).get("images")
    return [(int(height), int(width)) for height, width in found] if isinstance(found, list) and found else None


def known_warnings(recipe: Recipe) -> list[str]:
    """Return what was said of the data when they were read, and must not be overlooked in a plan; empty as for
    `known_bounds`."""
    found = _recorded(lengths_record(recipe)).get("warnings")
    return [str(line) for line in found] if isinstance(found, list) else []


def _recorded(record: Path | None) -> dict[str, Any]:
    try:
        found = json.loads(record.read_text()) if record is not None else {}
    except (OSError, ValueError):
        return {}  # never recorded, or damaged: the lengths are unknown, and plans say so
    return found if isinstance(found, dict) else {}


def keeps_all_lengths(recipe: Recipe) -> bool:
    """Whether it is known that data.max_length neither drops, cuts nor splits a training sequence."""
    return _recorded(lengths_record(recipe)).get("keeps_all") is True


def record_longest(
    record: Path | None,
    longest: int,
    images: Sequence[tuple[int, int]] = (),
    *,
    targets: int | None = None,
    keeps_all: bool = False,
    warnings: Sequence[str] = (),
) -> None:
    """Write what `known_bounds`, `known_images`, `keeps_all_lengths` and `known_warnings` return to the path that
    `lengths_record` gave before the data were read; None writes nothing, nor does a record that exists."""
    if record is None or record.exists():
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=record.parent)
    with os.fdopen(descriptor, "w") as file:
        figures = {"longest": longest, "targets": targets, "images": list(images), "keeps_all": keeps_all}
        json.dump({**figures, "warnings": list(warnings)}, file)
    os.replace(temporary, record)


def _states(path: Path) -> list[tuple[str, int, int]] | None:
    """(path, bytes, modification time in nanoseconds) of each file; None for no file, or more than MOST_FILES."""
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
