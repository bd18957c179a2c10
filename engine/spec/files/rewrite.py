"""Rewrites the text of a profile or recipe file with other values; comments and order are preserved.

Used by `tunedeck fit --write` and when the console saves. Paths become absolute when the file moves to another folder.

Try: `tunedeck fit -p demo -r demo --write mine.toml`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import SpecError, UsageError
from engine.spec.check.overrides import parse_overrides, set_value
from engine.spec.files.document import FROM_COMMAND_LINE, read_document, value_at
from engine.spec.files.find import SpecKind, find_spec_file
from engine.spec.files.paths import make_absolute, path_values
from engine.spec.files.working_directory import working_directory
from engine.spec.schema.base import NAME_PATTERN
from engine.spec.schema.profile import Profile


def rewrite_text(
    kind: SpecKind,
    source: str,
    overrides: Sequence[str],
    changes: dict[str, Any],
    target: Path,
    *,
    cwd: Path | None = None,
) -> str:
    """The text of `source` (a name or path) with overrides and `changes` (dotted key = value) applied. `target` is the
    file that the caller will write the text to.

    Overrides of keys that belong to the other kind of file are left out; [parallel] belongs to a recipe that has it.
    Raises SpecError for an override of a key that does not exist, UsageError for a target whose name is not a valid
    name.
    """
    if target.suffix != ".toml" or not re.fullmatch(NAME_PATTERN, target.stem):
        raise UsageError(
            f"{target} is not a valid name for a {kind}",
            expected=f"a file such as my-{kind}.toml, in lower-case letters",
        )
    cwd = cwd or working_directory()
    source_file = find_spec_file(kind, source, cwd)
    document = read_document(source_file.path)
    parsed, problems = parse_overrides(overrides)
    for override in parsed:
        in_recipe = kind == "recipe" and value_at(document.data, override.key) is not None
        if kind_of_table(override.key[0]) == kind or in_recipe:
            problems += _problem_of(set_value(document, override.key, override.value, FROM_COMMAND_LINE))
    for key, value in changes.items():
        problems += _problem_of(set_value(document, tuple(key.split(".")), value, "fit"))
    if problems:
        raise SpecError(problems)
    moved = target.absolute().parent != Path(source_file.path).absolute().parent
    if kind == "recipe" and moved and list(path_values(document.data)):
        make_absolute(document, source_file.folder, cwd)
    if "name" in document.data:
        document.data["name"] = target.stem
    import tomlkit  # slow to import: not before the console's first screen

    text = tomlkit.parse(Path(source_file.path).read_text(encoding="utf-8"))
    _update(text, document.data)
    return tomlkit.dumps(text)


def _problem_of(text: str) -> list[str]:
    return [text] if text else []


def kind_of_table(table: str) -> SpecKind:
    """The kind of file that has this first-level key: "profile" for the keys of a profile, "recipe" for all others."""
    return "profile" if table in Profile.model_fields else "recipe"


def _update(node: Any, wanted: Any) -> None:
    """Change a tomlkit table or array in place until it equals `wanted`; parts that are equal already are not
    touched."""
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
