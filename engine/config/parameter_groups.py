"""Which entry of [[train.groups]] each trained parameter belongs to, by its dotted names: the first that matches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from engine.config.files.text import quoted
from engine.config.name_patterns import matches, no_match
from engine.config.schema.recipe import ParameterGroup
from engine.errors import UsageError


def assign_groups(groups: Sequence[ParameterGroup], names: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The index of each parameter's group, without those that are in none. `names`: the name of each trained parameter,
    and its other names, of a tied weight. UsageError: a group matches no parameter, or none that an earlier one has
    not."""
    candidates = {
        name: [
            index for index, group in enumerate(groups) if any(matches(group.match, each) for each in (name, *others))
        ]
        for name, others in names.items()
    }
    matched = {index for found in candidates.values() for index in found}
    chosen = {name: found[0] for name, found in candidates.items() if found}
    for index, group in enumerate(groups):
        if index not in matched:
            everything = [each for name, others in names.items() for each in (name, *others)]
            raise no_match(group.match, everything, "train.groups.match")
        if index not in chosen.values():
            earlier = next(found[0] for found in candidates.values() if index in found)
            raise UsageError(
                f"train.groups: {quoted(group.match)} has no parameter left, because the first match counts: "
                f"{quoted(groups[earlier].match)} and other groups before it have all that it matches",
                expected="groups in order, the narrowest first",
                fix=f"move {quoted(group.match)} before {quoted(groups[earlier].match)}, or remove it",
            )
    return chosen


def describe_groups(groups: Sequence[ParameterGroup], names: Mapping[str, Sequence[str]]) -> str:
    """A sentence on how many parameters each group has, and how many of its matches an earlier one has; empty without
    groups. Raises as `assign_groups` does."""
    counts = Counter(assign_groups(groups, names).values())
    parts = []
    for index, group in enumerate(groups):
        matched = sum(any(matches(group.match, each) for each in (name, *others)) for name, others in names.items())
        earlier = f", without {matched - counts[index]} that an earlier group has" if matched > counts[index] else ""
        plural = "s" * (counts[index] != 1)
        parts.append(f"{quoted(group.match)} has {counts[index]} parameter{plural}{earlier}")
    return f"train.groups: {'; '.join(parts)}" if parts else ""
