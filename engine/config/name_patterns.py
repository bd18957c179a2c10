"""Matches a recipe's patterns with the dotted names of modules and parameters.

`*` matches within one part of a dotted name, `**` also across dots, `?` and `[...]` match one character. A pattern may
also name a module, which stands for all its parameters.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import lru_cache

from engine.errors import UsageError

BY_LAST_PARTS = ("method.targets", "method.exclude")
"""Keys whose patterns may name the last parts of a module."""


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches `name`, or a module that contains it."""
    return compile_patterns((pattern,)).fullmatch(name) is not None


def matches_end(pattern: str, name: str) -> bool:
    """As `matches`, or the last parts of either ("q_proj"), as the targets of adapters may."""
    return matches(pattern, name) or compile_pattern("**." + pattern).fullmatch(name) is not None


def no_match(pattern: str, names: Sequence[str], key: str) -> UsageError:
    """The error for a pattern of the recipe key `key` that matches none of `names`; it suggests a similar one that
    does."""
    words = list(dict.fromkeys([part for name in names for part in name.split(".") if not part.isdecimal()]))
    near = difflib.get_close_matches(pattern.replace("*", "").strip("."), [*words, *names], n=1, cutoff=0.6)
    test = matches_end if key in BY_LAST_PARTS else matches
    near = [word if any(test(word, name) for name in names) else f"**.{word}" for word in near]
    examples = near or list(dict.fromkeys(name.rpartition(".")[2] for name in names))[:3]
    return UsageError(
        f"{key}: {pattern!r} matches no name in this model",
        expected='a glob on dotted names ("**" crosses dots), such as ' + ", ".join(examples),
        fix=f"did you mean {near[0]!r}?" if near else "correct the pattern, or remove it",
    )


@lru_cache(maxsize=1024)
def compile_patterns(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One expression whose `fullmatch` accepts every name that a glob matches, or that lies inside a matched module."""
    return re.compile("|".join(rf"(?:{_expression(pattern)})(?:\..*)?" for pattern in patterns) or "(?!)")


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """An expression whose `fullmatch` accepts exactly the names that the glob matches."""
    return re.compile(_expression(pattern))


def _expression(pattern: str) -> str:
    return "".join(_piece(piece) for piece in re.split(r"(\*\*|\*|\?|\[[^\]]+\])", pattern))


def _piece(piece: str) -> str:
    if piece in ("**", "*", "?"):
        return {"**": ".*", "*": "[^.]*", "?": "[^.]"}[piece]
    if piece.startswith("[") and piece.endswith("]"):
        characters = "^" + piece[2:-1] if piece[1] == "!" else piece[1:-1]
        return "[" + characters.replace("\\", "\\\\") + "]"
    return re.escape(piece)
