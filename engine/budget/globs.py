"""Patterns of a recipe on dotted names of modules and parameters, as regular expressions.

Try: `python -m pytest tests/budget/test_parameters.py`
"""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=1024)
def compile_globs(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Globs on dotted names as one expression: "*", "?" stop at a dot, "**" does not; a module stands for its parts."""
    return re.compile("|".join(rf"(?:{_glob(pattern)})(?:\..*)?" for pattern in patterns) or "(?!)")


def _glob(pattern: str) -> str:
    """One glob as the source of a regular expression for `fullmatch`."""
    return "".join(_glob_piece(piece) for piece in re.split(r"(\*\*|\*|\?|\[[^\]]+\])", pattern))


def _glob_piece(piece: str) -> str:
    if piece in ("**", "*", "?"):
        return {"**": ".*", "*": "[^.]*", "?": "[^.]"}[piece]
    if piece.startswith("["):
        return "[" + piece[1:].replace("!", "^", 1).replace("\\", "\\\\") if piece[1] == "!" else piece
    return re.escape(piece)
