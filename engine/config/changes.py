"""Changed copies of run specs, by dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config.schema.run import Profile, RunSpec

Changes = Mapping[str, Any]


def with_changes(spec: RunSpec, changes: Changes) -> RunSpec:
    """A copy of the run spec with `changes`; neither keys nor values are checked."""
    for key, value in changes.items():
        table, _, name = key.partition(".")
        file = "profile" if is_of_profile(key) else "recipe"
        owner = getattr(spec, file)
        part = getattr(owner, table).model_copy(update={name: value})
        spec = spec.model_copy(update={file: owner.model_copy(update={table: part})})
    return spec


def value_of(spec: RunSpec, key: str) -> Any:
    """Raises AttributeError for an unknown key."""
    table, _, name = key.partition(".")
    owner = spec.profile if is_of_profile(key) else spec.recipe
    return getattr(getattr(owner, table), name)


def is_of_profile(key: str) -> bool:
    """Whether a dotted key is the profile's; if not, it is taken as the recipe's."""
    return key.partition(".")[0] in Profile.model_fields
