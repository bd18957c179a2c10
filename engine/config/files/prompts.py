"""Files of prompts: a line of text for each, or JSON Lines with a column `prompt`."""

from __future__ import annotations

import json
from pathlib import Path

from engine.config.schema.data import Eval
from engine.errors import DataError


def read_prompts(path: Path, key: str) -> list[str]:
    """`key` says who asks for the file. Raises DataError if it cannot be read or has no prompts."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix == ".jsonl":
            lines = [json.loads(line)["prompt"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{key} {path}: {type(error).__name__}: {error}",
            expected='a line of text for each prompt, or a .jsonl file with {"prompt": "..."} rows',
            fix="correct the file or its name",
        ) from error
    if not lines or not all(isinstance(line, str) for line in lines):
        problem = "no prompts in it" if not lines else "a prompt is no text"
        raise DataError(f"{key} {path}: {problem}", expected="at least one prompt, each a text", fix="correct the file")
    return lines


def fixed_prompts(asked: Eval) -> list[str]:
    """The prompts of `eval.prompts`. Raises DataError as `read_prompts` does."""
    given = asked.prompts
    return read_prompts(Path(given), "eval.prompts") if isinstance(given, str) else list(given)
