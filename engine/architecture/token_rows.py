"""How many rows embedding and output head have once the tokens of `model.add_tokens` are in the vocabulary."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.config.files.caches import find_snapshot
from engine.config.files.find import BUILTIN_PREFIX
from engine.config.files.machine import path_of
from engine.errors import UsageError


def frozen_tokens(module: str) -> UsageError:
    """The error for added tokens whose rows `module` has and method.freeze freezes."""
    return UsageError(
        f"model.add_tokens: {module} is frozen, and would never learn the added tokens",
        expected="embedding and output head trained",
        fix=f'take "{module}" out of method.freeze',
    )


BYTE_SPECIALS = ("<bos>", "<eos>", "<pad>", "<system>", "<user>", "<assistant>", "<end>", "<reserved>")
"""Special tokens of the byte tokenizer, ids 256 to 263: a vocabulary of 264 is a multiple of 8, which matrix units need
for full speed. profiles/models/builtin-tiny.toml relies on 256 and 257 for bos and eos."""

MULTIPLE = 8
"""An embedding that grows gets a multiple of so many rows."""


def grown_rows(rows: int, needed: int) -> int:
    """Rows of an embedding of `rows` rows once it has the `needed` ones: spare rows are used before it grows."""
    return rows if needed <= rows else -(-needed // MULTIPLE) * MULTIPLE


def rows_with(wanted: set[str], rows: int, tokenizer: str, revision: str | None) -> int:
    """Rows of an embedding of `rows` rows with the tokens `wanted`. Where the file of the tokenizer (hub id, folder or
    built-in) is not here, each of them is taken for a new one."""
    known = _vocabulary(tokenizer, revision)
    if known is None:
        return grown_rows(rows, rows + len(wanted))
    size, tokens = known
    return grown_rows(rows, size + len(wanted - tokens))


def with_rows(config: dict[str, Any], rows: int) -> dict[str, Any]:
    """A model's config with an embedding of `rows` rows."""
    text = config.get("text_config")
    if isinstance(text, dict) and "vocab_size" in text:
        return {**config, "text_config": {**text, "vocab_size": rows}}
    return {**config, "vocab_size": rows}


def _vocabulary(source: str, revision: str | None) -> tuple[int, frozenset[str]] | None:
    """The largest id + 1, and all tokens, of a tokenizer.json on this machine; None without one."""
    if source.startswith(BUILTIN_PREFIX):
        return 256 + len(BYTE_SPECIALS), frozenset(BYTE_SPECIALS)
    local = path_of(source)
    folder = local if local.is_dir() else find_snapshot(source, revision)
    file = Path(folder, "tokenizer.json") if folder is not None else None
    if file is None or not file.is_file():
        return None
    return _read_vocabulary(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_vocabulary(file: Path, _changed: int) -> tuple[int, frozenset[str]] | None:
    try:
        content = json.loads(file.read_text("utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score, in the order of ids
            vocabulary = {pair[0]: number for number, pair in enumerate(vocabulary)}
        ids = {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # what is wrong with the file is said where the tokenizer is loaded
    return max(ids.values(), default=-1) + 1, frozenset(ids)
