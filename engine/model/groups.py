"""Divides the trained parameters into the optimizer's parameter groups, by weight decay and learning rate.

Try: `python -m pytest tests/model/test_patterns.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter

from engine.spec.name_patterns import matches, no_match
from engine.spec.schema.recipe import ParameterGroup, Train


def parameter_groups(named_parameters: Iterable[tuple[str, Parameter]], train: Train) -> list[dict[str, Any]]:
    """Return the optimizer's groups of the trained parameters (name, parameter): dicts with `params`, `names`, `lr` and
    `weight_decay`, in the order of their first parameters.

    Weight decay applies to matrices, but not to biases, norms and other vectors, as in GPT-3 (appendix B) and nanoGPT.
    A parameter gets the settings of the first entry in [[train.groups]] that matches its name; a weight_decay set in
    that entry applies to matrices and vectors alike.

    Raises:
        UsageError: a group whose pattern matches no trainable parameter.
    """
    named = list(named_parameters)
    for group in train.groups:
        if not any(matches(group.match, name) for name, _ in named):
            raise no_match(group.match, [name for name, _ in named], "train.groups.match")
    groups: dict[tuple[int, float, float], dict[str, Any]] = {}
    for name, parameter in named:
        index, own = _own_group(name, train.groups)
        rate = own.learning_rate if own and own.learning_rate is not None else train.learning_rate
        decay = own.weight_decay if own and own.weight_decay is not None else _decay(parameter, train)
        group_of = groups.setdefault(
            (index, rate, decay), {"params": [], "names": [], "lr": rate, "weight_decay": decay}
        )
        group_of["params"].append(parameter)
        group_of["names"].append(name)
    return list(groups.values())


def _own_group(name: str, groups: list[ParameterGroup]) -> tuple[int, ParameterGroup | None]:
    return next(((index, group) for index, group in enumerate(groups) if matches(group.match, name)), (-1, None))


def _decay(parameter: Parameter, train: Train) -> float:
    return train.weight_decay if parameter.dim() >= 2 else 0.0
