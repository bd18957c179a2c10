"""Chooses the parameters to train by the patterns of a recipe. A pattern that matches nothing is an error.

What a pattern means is in `engine.spec.name_patterns`. Try: `python -m pytest tests/model/test_patterns.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from engine.errors import UsageError
from engine.spec.name_patterns import matches, no_match
from engine.spec.schema.recipe import Method


def select(patterns: Sequence[str], names: Iterable[str], key: str) -> set[str]:
    """Return the names that any of `patterns` matches.

    Raises:
        UsageError: a pattern matches nothing; the message names `key`, the recipe key of the patterns.
    """
    names = list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if matches(pattern, name)}
        if not hits:
            raise no_match(pattern, names, key)
        chosen |= hits
    return chosen


def freeze_parameters(model: nn.Module, method: Method, frozen_by_default: Iterable[str] = ()) -> None:
    """Set requires_grad for full fine-tuning.

    If method.train_only is set, the parameters that it matches are trained, otherwise all except `frozen_by_default`.
    Parameters that method.freeze matches are never trained. A tied weight has several names: a pattern applies if it
    matches any of them, and freezing takes precedence.

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
