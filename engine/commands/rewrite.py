"""A recipe file with other values in it: comments and order stay, overrides of the command line are written in.

Used by `tunedeck fit --write`. Paths become absolute when the file moves to another folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def rewritten(recipe: str, sets: list[str], changes: dict[str, Any], target: Path) -> str:
    """The text of `recipe` (a name or path) with `--set` values and `changes` (dotted key = value) laid over it.

    Raises SpecError for an override that leads nowhere, UsageError for a target whose name no recipe can have.
    """
    import re

    import tomlkit

    from engine.errors import SpecError, UsageError
    from engine.spec.document import read_document
    from engine.spec.find import locate
    from engine.spec.paths import make_absolute, text_fields
    from engine.spec.profile import Profile
    from engine.spec.sets import BY_SET, UNSET, lay, parse_sets

    if target.suffix != ".toml" or not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", target.stem):
        raise UsageError(
            f"--write {target}: no name for a recipe", expected="a file such as my-recipe.toml, in lower-case letters"
        )
    located = locate("recipe", recipe)
    document = read_document(located.path)
    overrides, problems = parse_sets(sets)
    for override in overrides:
        if override.key[0] not in Profile.model_fields:
            problems += [problem for problem in [lay(document, override.key, override.value, BY_SET)] if problem]
    for key, value in changes.items():
        problems += [problem for problem in [lay(document, tuple(key.split(".")), value, "fit")] if problem]
    if problems:
        raise SpecError(problems)
    if target.absolute().parent != Path(located.path).absolute().parent and list(text_fields(document.data)):
        make_absolute(document, located.folder, Path.cwd())
    document.data["name"] = target.stem
    text = tomlkit.parse(Path(located.path).read_text(encoding="utf-8"))
    _update(text, document.data, UNSET)
    return tomlkit.dumps(text)


def _update(node: Any, wanted: Any, unset: object) -> None:
    """Make a tomlkit table or array equal to plain data, touching only what differs."""
    if isinstance(wanted, list):
        for index, value in enumerate(wanted):
            _update(node[index], value, unset)
        return
    for key in [key for key in node if key not in wanted]:
        del node[key]
    for key, value in wanted.items():
        nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
        if nested and key in node and (isinstance(value, dict) or len(value) == len(node[key])):
            _update(node[key], value, unset)
        elif key not in node or node[key] != value:
            node[key] = value
