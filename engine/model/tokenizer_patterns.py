"""Tries the regular expressions of a tokenizer on texts that make a bad one backtrack without end.

They are by the tokenizer's author and run in C, which nothing interrupts; so they are tried once, when the tokenizer is
loaded, in a process that can be ended. Expressions in use take a tenth of a second for all of these texts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.data.killable import bounded, problem_of
from engine.errors import UsageError

CPU_SECONDS, MEMORY_BYTES = 5.0, 1 << 30
"""For all texts together."""

ALPHABET = " \n\t\r\u00a0aA1!'_-.é中\u0301"
"""Characters of the kinds that expressions distinguish."""

MOST_CHARACTERS, MOST_PAIRS = 64, 256
"""Of the expressions' own that are tried."""

REPEATS = 200
"""Of a character or a pair: enough for expressions that take exponential time, and for most that take cubic time."""


def require_bounded_expressions(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raise UsageError for a tokenizer with an expression that fails, or takes longer than CPU_SECONDS, on texts of one
    repeated character or pair."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [part for part in (getattr(backend, "normalizer", None), getattr(backend, "pre_tokenizer", None)) if part]
    expressions = sorted({text for part in parts for text in _expressions(json.loads(part.__getstate__()))})
    if not expressions:
        return
    doing = "trying its regular expressions on texts of repeated characters"
    problem = problem_of(lambda texts: _try_all(parts, texts), _texts("".join(expressions)), doing, CPU_SECONDS)
    if problem:
        raise UsageError(
            f"tokenizer.json of {source}: {problem}",
            expected="expressions that split a text in time proportional to its length",
            fix="use the tokenizer of the model's original author: set model.tokenizer",
        )


def _expressions(rules: Any) -> Iterator[str]:
    """Yield the regular expressions of a normalizer or pre-tokenizer."""
    if isinstance(rules, dict):
        if isinstance(rules.get("Regex"), str):
            yield rules["Regex"]
        for value in rules.values():
            yield from _expressions(value)
    elif isinstance(rules, list):
        for value in rules:
            yield from _expressions(value)


def _texts(expressions: str) -> list[str]:
    characters = list(dict.fromkeys(ALPHABET + expressions))[: len(ALPHABET) + MOST_CHARACTERS]
    ends = ("", "!", "a", "\0")
    texts = [character * REPEATS + end for character in characters for end in ends]
    pairs = [one + other for one in ALPHABET for other in ALPHABET if one != other]
    pairs += [one + other for one, other in pairwise(expressions[:MOST_PAIRS])]
    return texts + [pair * REPEATS + "\0" for pair in dict.fromkeys(pairs)]


def _try_all(parts: list[Any], texts: list[str]) -> str:
    """Return how an expression fails; "" for all that end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library prints a trace before it raises
    with bounded(CPU_SECONDS, MEMORY_BYTES):
        for text in texts:
            for part in parts:
                try:
                    part.normalize_str(text) if hasattr(part, "normalize_str") else part.pre_tokenize_str(text)
                except BaseException as error:  # noqa: BLE001  (a panic of the library is no Exception)
                    return f"its regular expressions fail on the text {text[:8]!r}…: {str(error)[:100]}"
    return ""
