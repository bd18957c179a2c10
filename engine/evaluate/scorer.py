"""A user's own score: a function in a Python file, which `--scorer FILE.py:FUNCTION` names.

The function runs in this process with the user's rights. A recipe cannot name such a function, because recipes come
from other people.

Try: `tunedeck eval last --scorer my_scores.py:smatch`
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from engine.evaluate.scores import Scorer

EXPECTED = "FILE.py:FUNCTION, a function of (answers, references), two lists of texts, that returns scores by name"


def load_scorer(text: str) -> Scorer:
    """Import the function that FILE.py:FUNCTION names.

    Raises:
        UsageError: there is no such file or function, or the file cannot be imported.
    """
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    if not name or not path.is_file():
        raise UsageError(f"--scorer {text}: no file {file or text}", expected=EXPECTED, fix="correct the path")
    spec = importlib.util.spec_from_file_location(f"tunedeck_scorer_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"--scorer {text}: {path.name} is not a Python file", expected=EXPECTED)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of any kind: the file is the user's
        raise UsageError(f"--scorer {text}: {type(error).__name__}: {error}", fix=f"correct {path.name}") from error
    function: Callable[[list[str], list[str]], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"--scorer {text}: {path.name} has no function {name}", expected=EXPECTED)
    return lambda answers, references: _checked(text, function, answers, references)


def _checked(
    text: str, function: Callable[[list[str], list[str]], Any], answers: list[str], references: list[str]
) -> dict[str, float]:
    """Call the user's function with answers and references; returns its scores by name. `text` is FILE.py:FUNCTION, for
    messages. Raises UsageError if the function fails, or does not return a dict of finite numbers."""
    try:
        found = function(answers, references)
    except Exception as error:  # of any kind: the function is the user's
        raise UsageError(f"--scorer {text}: {type(error).__name__}: {error}", fix="correct the function") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)
        for name, value in found.items()
    ):
        raise UsageError(f"--scorer {text}: returned {found!r:.200}", expected=EXPECTED)
    return {name: float(value) for name, value in found.items()}
