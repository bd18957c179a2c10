"""For which sequences a plan is: the longest of the data once these were read, until then the longest that the recipe
allows. Data in small files are read unasked, by a process of their own, while the screen is idle.

Try: `tunedeck -p demo -r demo` with an empty cache: the basis of the plan changes after some seconds, and says why
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.budget.advise.plan import Plan
from engine.config.files.caches import lengths_record
from engine.config.files.find import BUILTIN_PREFIX
from engine.config.schema.recipe import Recipe
from tui.launch.budget_bar import decimal_bytes
from tui.launch.evaluate import EvaluatedChoice

MOST_BYTES = 64 << 20
"""Larger data are read when the user asks for it: tokenising them takes minutes."""


def unread_record(evaluated: EvaluatedChoice) -> Path | None:
    """Where the length of the longest sequence will be recorded, if the plan lacks it and the data can be read now;
    None otherwise. A staged recipe has data of its own for each stage, which are read when the stage starts."""
    plan, spec = evaluated.plan, evaluated.spec
    if plan is None or spec is None or plan.basis == "data" or evaluated.problems or spec.recipe.stages:
        return None
    return lengths_record(spec.recipe)


def is_small(recipe: Recipe) -> bool:
    """Whether all training data are built in, or in files that together have at most MOST_BYTES."""
    total = 0
    for source in recipe.data.sources:
        if not source.enabled or (source.path or "").startswith(BUILTIN_PREFIX):
            continue
        try:
            total += os.stat(source.path).st_size if source.path and not os.path.isdir(source.path) else MOST_BYTES + 1
        except OSError:
            return False  # a pattern, or gone
    return total <= MOST_BYTES


def basis_words(plan: Plan, *, reading: bool, readable: bool) -> str:
    """For which sequences the plan is, and what will make it more exact."""
    if plan.basis == "data":
        targets = f" ({plan.target_tokens:,} target tokens)" if plan.target_tokens < plan.length else ""
        return f"for the longest sequence in the data, {plan.length:,} tokens{targets}"
    more = "; reading the data ..." if reading else "; d reads the data" if readable else ""
    return f"for the longest possible sequence, {plan.length:,} tokens{more}"


def change_words(before: Plan | None, after: Plan | None) -> str:
    """Why the figures have changed after the data were read; empty if they have not."""
    if before is None or after is None:
        return ""
    if (before.length, before.target_tokens) == (after.length, after.target_tokens):
        return ""
    peaks = (decimal_bytes(plan.prediction.device_bytes) for plan in (before, after))
    found = []
    if before.length != after.length:
        found.append(f"the longest sequence has {after.length:,} tokens, not {before.length:,}")
    if after.target_tokens < after.length:
        found.append(f"no sequence has more than {after.target_tokens:,} target tokens")
    return f"the data has been read: {'; '.join(found)}; " + "predicted peak {} -> {}".format(*peaks)
