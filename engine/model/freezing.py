"""Globs on dotted names, and the choice of the parameters that are trained.

`*` stays within one part of a dotted name, `**` crosses dots, `?` and `[...]` match one character. A pattern may also
name a module, which stands for all its parameters. A pattern that matches nothing is an error.

Try: `python -c "from engine.model.freezing import matches; print(matches('model.*.mlp', 'model.0.mlp.up.weight'))"`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from torch import nn

from engine.errors import UsageError
from engine.spec.schema.recipe import Method


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression that must match a whole dotted name."""
    pieces = re.split(r"(\*\*|\*|\?|\[[^\]]+\])", pattern)
    return re.compile("".join(_piece(piece) for piece in pieces))


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names `name` itself or a module that `name` is part of."""
    parts = name.split(".")
    return any(compiled(pattern).fullmatch(".".join(parts[:end])) for end in range(len(parts), 0, -1))


def select(patterns: Sequence[str], names: Iterable[str], key: str) -> set[str]:
    """The names matched by any of `patterns`.

    Raises:
        UsageError: a pattern matches nothing; `key` is the recipe key it stands under.
    """
    names = list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if matches(pattern, name)}
        if not hits:
            raise no_match(pattern, names, key)
        chosen |= hits
    return chosen


def no_match(pattern: str, names: Sequence[str], key: str) -> UsageError:
    """The error for a pattern that matches nothing; it suggests similar names."""
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names[:3])
    return UsageError(
        f"{key}: {pattern!r} matches no name in this model",
        expected='a glob on dotted names ("**" crosses dots), such as ' + ", ".join(near),
        fix="correct the pattern, or remove it",
    )


def freeze_parameters(model: nn.Module, method: Method, frozen_by_default: Iterable[str] = ()) -> None:
    """Set requires_grad for full fine-tuning.

    Trained are all parameters, without `frozen_by_default`, or those of method.train_only; in both cases without those
    of method.freeze. A tied weight has several names: a pattern for any of them applies, and freezing wins.

    Raises:
        UsageError: a pattern without a match, or no parameter left to train.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    trained = select(method.train_only, by_name, "method.train_only") if method.train_only else set(by_name)
    frozen = select(method.freeze, by_name, "method.freeze")
    if not method.train_only:
        frozen |= set(frozen_by_default)
    learning = {id(by_name[name]) for name in trained} - {id(by_name[name]) for name in frozen}
    if not learning:
        raise UsageError(
            "method.train_only and method.freeze leave nothing that learns",
            expected="at least one parameter left",
            fix="remove one of the patterns",
        )
    for parameter in by_name.values():
        parameter.requires_grad_(id(parameter) in learning)


def _piece(piece: str) -> str:
    if piece == "**":
        return ".*"
    if piece == "*":
        return "[^.]*"
    if piece == "?":
        return "[^.]"
    if piece.startswith("[") and piece.endswith("]"):
        return "[" + ("^" + piece[2:-1] if piece[1] == "!" else piece[1:-1]).replace("\\", "\\\\") + "]"
    return re.escape(piece)
