"""A profile or recipe file with other values in it: comments and order stay, overrides are written in.

Used by `tunedeck fit --write` and by the console's save. Paths become absolute when the file moves to another folder.

Try: `tunedeck fit -p demo -r demo --write mine.toml`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomlkit

from engine.errors import SpecError, UsageError
from engine.spec.check.overrides import parse_overrides, set_value
from engine.spec.files.document import FROM_COMMAND_LINE, read_document
from engine.spec.files.find import SpecKind, find_spec_file
from engine.spec.files.paths import make_absolute, path_values
from engine.spec.files.working_directory import working_directory
from engine.spec.schema.base import NAME_PATTERN
from engine.spec.schema.profile import Profile


def rewrite_text(
    kind: SpecKind, source: str, sets: Sequence[str], changes: dict[str, Any], target: Path, *, cwd: Path | None = None
) -> str:
    """The text of `source` (a name or path) with `--set` values and `changes` (dotted key = value) laid over it.

    Of the `--set` values those are taken that belong to a file of this kind. Raises SpecError for an override that
    leads nowhere, UsageError for a target whose name no such file can have.
    """
    if target.suffix != ".toml" or not re.fullmatch(NAME_PATTERN, target.stem):
        raise UsageError(
            f"{target} is no name for a {kind}", expected=f"a file such as my-{kind}.toml, in lower-case letters"
        )
    here = cwd or working_directory()
    located = find_spec_file(kind, source, here)
    document = read_document(located.path)
    overrides, problems = parse_overrides(sets)
    for override in overrides:
        if kind_of_table(override.key[0]) == kind:
            problems += [
                problem for problem in [set_value(document, override.key, override.value, FROM_COMMAND_LINE)] if problem
            ]
    for key, value in changes.items():
        problems += [problem for problem in [set_value(document, tuple(key.split(".")), value, "fit")] if problem]
    if problems:
        raise SpecError(problems)
    moved = target.absolute().parent != Path(located.path).absolute().parent
    if kind == "recipe" and moved and list(path_values(document.data)):
        make_absolute(document, located.folder, here)
    document.data["name"] = target.stem
    text = tomlkit.parse(Path(located.path).read_text(encoding="utf-8"))
    _update(text, document.data)
    return tomlkit.dumps(text)


def kind_of_table(table: str) -> SpecKind:
    """The kind of file whose first-level key this is."""
    return "profile" if table in Profile.model_fields else "recipe"


def _update(node: Any, wanted: Any) -> None:
    """Make a tomlkit table or array equal to plain data, touching only what differs."""
    if isinstance(wanted, list):
        for index, value in enumerate(wanted):
            _update(node[index], value)
        return
    for key in [key for key in node if key not in wanted]:
        del node[key]
    for key, value in wanted.items():
        nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
        if nested and key in node and (isinstance(value, dict) or len(value) == len(node[key])):
            _update(node[key], value)
        elif key not in node or node[key] != value:
            node[key] = value
