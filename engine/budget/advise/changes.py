"""Applies the changes of recipe and profile keys that advice suggests, and tells whether `train` would refuse the
changed run.

A change maps a dotted key, such as "train.loss" or "parallel.sequence", to its new value.

Try: `tunedeck fit -p 24gb -r full --set model.id=Qwen/Qwen2.5-7B`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.budget.advise.preflight import refuse_unsafe
from engine.errors import TunedeckError
from engine.spec.check.hardware_rules import problems_of_profile, problems_on_device
from engine.spec.check.rules import problems_of_recipe
from engine.spec.check.unsupported import refuse_unsupported
from engine.spec.schema.profile import Profile
from engine.spec.schema.run import RunSpec

Changes = Mapping[str, Any]
"""Dotted recipe or profile key = new value."""


def with_changes(spec: RunSpec, changes: Changes) -> RunSpec:
    """A copy of the run spec in which each dotted key of `changes` has its new value. Neither keys nor values are
    checked."""
    for key, value in changes.items():
        table, _, name = key.partition(".")
        file = "profile" if is_of_profile(key) else "recipe"
        owner = getattr(spec, file)
        part = getattr(owner, table).model_copy(update={name: value})
        spec = spec.model_copy(update={file: owner.model_copy(update={table: part})})
    return spec


def value_of(spec: RunSpec, key: str) -> Any:
    """The value of a dotted recipe or profile key in a run spec. Raises AttributeError for an unknown key."""
    table, _, name = key.partition(".")
    owner = spec.profile if is_of_profile(key) else spec.recipe
    return getattr(getattr(owner, table), name)


def is_of_profile(key: str) -> bool:
    """Whether the first part of a dotted key, such as "device" or "parallel", is a table of the profile; if not, the
    key is taken as the recipe's."""
    return key.partition(".")[0] in Profile.model_fields


def breaks_a_rule(spec: RunSpec) -> bool:
    """Whether a run spec violates a rule of `recipes check` or `profiles check`, or a rule about its recipe and profile
    together."""
    of_files = any(problems_of_recipe(spec.recipe)) or any(problems_of_profile(spec.profile))
    return of_files or any(problems_on_device(spec.profile, spec.recipe))


def is_refused(spec: RunSpec) -> bool:
    """Whether `plan` and `train` would refuse a run spec: because it breaks a rule (`breaks_a_rule`), needs a feature
    that this version lacks, or would compute wrong results or train nothing."""
    if breaks_a_rule(spec):
        return True
    try:
        refuse_unsupported(spec)
        refuse_unsafe(spec)
    except TunedeckError:
        return True
    return False
