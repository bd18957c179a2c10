"""Finds models and data sets in the hub cache of this machine, without asking the hub and without its library.

The layout of the cache is huggingface_hub's: `models--OWNER--NAME/refs/REVISION` contains the name of the folder under
`snapshots/`, in which every file is a link to a complete download.

Try: `python -c "from engine.spec.files.hub_cache import find_snapshot; print(find_snapshot('openai-community/gpt2'))"`
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from engine.spec.files.user_folders import cache_folder

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Environment variables that forbid the hub's library every request."""

TRUE_WORDS = ("1", "ON", "YES", "TRUE")


def offline_variable() -> str | None:
    """The name of the environment variable that forbids requests to the hub; None if none does. Of several that are
    set, the first one decides."""
    name = next((name for name in OFFLINE_VARIABLES if os.environ.get(name)), None)
    return name if name is not None and os.environ[name].upper() in TRUE_WORDS else None


def find_snapshot(model: str, revision: str | None = None) -> Path | None:
    """The folder with the cached files of a model (OWNER/NAME) at a branch, tag or commit, by default the branch main;
    None if there is none."""
    repository = f"{_hub_cache()}/models--{model.replace('/', '--')}"
    if not os.path.isdir(repository):
        return None
    reference = Path(repository, "refs", revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision or ""
    snapshot = Path(repository, "snapshots", commit)
    return snapshot if commit and snapshot.is_dir() else None


def has_weights(snapshot: Path) -> bool:
    """Whether a snapshot contains a model's weights; where an index lists several files, all of them."""
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError):
            return False  # a damaged index: the hub has a whole one
        return all((snapshot / name).is_file() for name in named)
    return any(file.suffix in (".safetensors", ".bin") and file.is_file() for file in snapshot.iterdir())


def has_tokenizer(snapshot: Path) -> bool:
    """Whether a snapshot contains a tokenizer in one of the formats of transformers."""
    names = (file.name for file in snapshot.iterdir() if file.is_file())
    return any(name.startswith(("tokenizer", "vocab", "tekken")) or name.endswith(".model") for name in names)


def has_adapter(snapshot: Path) -> bool:
    """Whether a snapshot contains a LoRA adapter."""
    return all((snapshot / f"adapter_{name}").is_file() for name in ("config.json", "model.safetensors"))


def has_data_set(name: str, config: str | None = None) -> bool:
    """Whether the package `datasets` has prepared a data set of the hub on this machine before: only then it opens the
    data set without a connection."""
    owner, slash, stem = name.rpartition("/")
    snake = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", stem)).lower()
    prepared = cache_folder() / "datasets" / (f"{owner}___{snake}" if slash else snake)
    pattern = f"{config or '*'}/*/*"
    return any(found.is_dir() and found.suffix != ".incomplete" for found in prepared.glob(pattern))


def _hub_cache() -> str:
    """Where huggingface_hub keeps repositories: $HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub."""
    given = os.environ.get("HF_HUB_CACHE")
    if given is not None:
        return os.path.expanduser(given)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    return os.path.join(os.path.expanduser(home), "hub")
