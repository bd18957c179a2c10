"""Where the console writes profiles and recipes, and how: ./profiles for what is made or changed here, never over a
shipped file.

Try: `python -c "from tui.own_files import *; print(own_folder('recipe'))"`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from engine.errors import UsageError
from engine.spec.base import NAME_PATTERN
from engine.spec.find import FOLDERS, SHIPPED, Kind, available, user_folder
from engine.spec.rewrite import rewritten
from engine.spec.share import write_new


def own_folder(kind: Kind, cwd: Path | None = None) -> Path:
    """./profiles/..., or the user's own folder where ./profiles is the shipped one (inside Tunedeck's checkout)."""
    project = (cwd or Path.cwd()).absolute() / "profiles"
    shipped = project.resolve() == SHIPPED
    return (user_folder() if shipped else project) / FOLDERS[kind]


def free_name(kind: Kind, name: str) -> str:
    """The name, or the first of NAME-2, NAME-3 ... that no file of this kind has."""
    taken = {located.name for located in available(kind)}
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return name if name not in taken else f"{name}-{number}"


def own_path(kind: Kind, name: str) -> Path:
    """The file a new profile or recipe of this name becomes. Raises UsageError for what cannot be a name."""
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > 80:
        raise UsageError(f"{name!r} is no name", expected="lower-case letters, digits, '.', '_' and '-', 80 at most")
    return own_folder(kind) / f"{name}.toml"


def save_as(kind: Kind, source: str, sets: Sequence[str], name: str) -> Path:
    """Write `source` with the overrides laid over it as a new file. Raises UsageError or SpecError."""
    target = own_path(kind, name)
    return write_new(target, rewritten(kind, source, sets, {}, target).encode(), force=False)
