"""Tries the patterns of a saved adapter's config on the names of a model's modules, before peft matches them.

The patterns are regular expressions by the adapter's author, and one of them may take years on one name. So they are
matched with all names in a process that can be ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from peft import PeftConfig
from torch import nn

from engine.config.files.text import quoted
from engine.data.killable import bounded, problem_of
from engine.errors import UsageError

CPU_SECONDS, MEMORY_BYTES = 10.0, 512 << 20
"""For matching all patterns with all names. The longest patterns in use take milliseconds."""

PLAIN = re.compile(r"[\w.-]*")
"""A name, which takes no longer than comparing it."""

MOST_PLAIN = 1_000


def require_bounded_patterns(model: nn.Module, config: PeftConfig, adapter: str) -> None:
    """Raise UsageError for an adapter whose config has a pattern that is not a regular expression, or takes longer than
    CPU_SECONDS on the names of the modules of `model`."""
    patterns = list(patterns_of(config))
    if len(patterns) <= MOST_PLAIN and all(PLAIN.fullmatch(pattern) for _, pattern in patterns):
        return
    names = [name for name, _ in model.named_modules()]
    doing = "matching its patterns with the names of the modules"
    problem = problem_of(_match_all, (patterns, names), doing, CPU_SECONDS)
    if problem:
        raise UsageError(
            f"{adapter}: {problem}",
            expected="patterns for module names, as peft writes them",
            fix="write target_modules in adapter_config.json as a list of names",
        )


def patterns_of(config: Any) -> Iterator[tuple[str, str]]:
    """Return (as written, regular expression) for each pattern of a peft config, as peft uses it."""
    for key in ("target_modules", "exclude_modules", "feedforward_modules"):
        value = getattr(config, key, None)
        if isinstance(value, str):
            yield value, value
    for key in ("rank_pattern", "alpha_pattern"):
        yield from ((pattern, rf"(.*\.)?({pattern})$") for pattern in _texts(config, key))
    yield from ((name, rf"(^|.*\.){name}($|\..*)") for name in _texts(config, "modules_to_save"))
    yield from ((name, rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\.") for name in _texts(config, "layers_pattern"))


def _texts(config: Any, key: str) -> list[str]:
    """The entries of a list or the keys of a table, if the config has either at `key`."""
    value = getattr(config, key, None)
    if isinstance(value, str):
        return [value]
    return [str(entry) for entry in value] if isinstance(value, Iterable) else []


def _match_all(request: tuple[list[tuple[str, str]], list[str]]) -> str:
    """What is wrong with the patterns; empty for nothing."""
    patterns, names = request
    with bounded(CPU_SECONDS, MEMORY_BYTES):
        for written, expression in patterns:
            try:
                compiled = re.compile(expression)
                for name in names:
                    compiled.match(name)
            except (re.error, OverflowError, RecursionError) as error:
                return f"{quoted(written)} is not a regular expression: {error}"
            except MemoryError:
                return f"{quoted(written)} takes more than {MEMORY_BYTES >> 20} MiB"
    return ""
