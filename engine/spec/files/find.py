"""Finds the file of a profile or recipe by its name on a search path.

A name is searched in ./profiles, the user's own folder and the shipped files, in this order. A text with a slash, or
one that ends in .toml, is a path. Files are not parsed here.

Try: `python -c "from engine.spec.files.find import list_spec_files; print(list_spec_files('recipe'))"`
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import SpecError
from engine.spec.files.text import closest_match, quoted, visible
from engine.spec.files.working_directory import working_directory
from engine.spec.schema.base import NAME_PATTERN

SpecKind = Literal["profile", "recipe"]
KIND_FOLDERS: dict[SpecKind, str] = {"profile": "hardware", "recipe": "recipes"}
SHIPPED_FOLDER = Path(__file__).resolve().parents[3] / "profiles"


@dataclass(frozen=True)
class SpecFile:
    """A profile or recipe file, its origin (project, user, shipped or path), and the folder that its relative paths
    start from."""

    path: Path
    origin: str
    folder: Path

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    @property
    def label(self) -> str:
        """The name by which a run's provenance records the file: "shipped:NAME", else the absolute path."""
        return f"shipped:{self.name}" if self.origin == "shipped" else str(self.path)


def user_folder() -> Path:
    """The user's own folder of profiles and recipes: $TUNEDECK_CONFIG/profiles, else one in the platform's
    configuration folder. Absolute."""
    if configured := os.environ.get("TUNEDECK_CONFIG"):
        return Path(configured).expanduser().absolute() / "profiles"
    import platformdirs

    return Path(platformdirs.user_config_dir("tunedeck")) / "profiles"


def own_folder(kind: SpecKind, cwd: Path | None = None) -> Path:
    """The folder that new profiles or recipes are written to: inside ./profiles, or inside the user's configuration
    folder if ./profiles is the folder of the shipped files, as in Tunedeck's own checkout."""
    project = (cwd or working_directory()).absolute() / "profiles"
    return (user_folder() if project.resolve() == SHIPPED_FOLDER else project) / KIND_FOLDERS[kind]


def search_path(kind: SpecKind, cwd: Path) -> dict[str, Path]:
    """Maps each origin ("project", "user", "shipped") to its folder, in the order in which the folders are searched."""
    folder = KIND_FOLDERS[kind]
    return {"project": cwd / "profiles" / folder, "user": user_folder() / folder, "shipped": SHIPPED_FOLDER / folder}


def list_spec_files(kind: SpecKind, cwd: Path | None = None) -> list[SpecFile]:
    """All profile or recipe files on the search path, sorted by name. If several have the same name, only the first on
    the search path is listed."""
    cwd = (cwd or working_directory()).absolute()
    found: dict[str, SpecFile] = {}
    for origin, folder in search_path(kind, cwd).items():
        for path in sorted(folder.glob("*.toml")) if os.access(folder, os.R_OK) else ():
            if re.fullmatch(NAME_PATTERN, path.stem) and path.is_file():
                found.setdefault(path.stem, SpecFile(path, _origin(origin, folder), cwd))
    return [found[name] for name in sorted(found)]


def _origin(origin: str, folder: Path) -> str:
    """`origin`, or "shipped" if `folder` is the folder of shipped files, as ./profiles is inside Tunedeck's own
    checkout."""
    return "shipped" if folder.resolve().parent == SHIPPED_FOLDER else origin


def find_spec_file(kind: SpecKind, text: str, cwd: Path | None = None) -> SpecFile:
    """Find the file of a name or path. Raises SpecError, which lists the known names, if there is none. A file that a
    name could find means the same by its path: its relative paths start from the working directory."""
    cwd = (cwd or working_directory()).absolute()
    if "/" in text or os.sep in text or text.endswith(".toml"):
        path = cwd / Path(text).expanduser()
        if not path.exists():
            near = closest_match(path.name, [found.name for found in path.parent.glob("*.toml")])
            raise SpecError(
                [f"{visible(text)}: no such file; the path of a {kind}'s TOML file is needed"],
                fix=f"-{kind[0]} {shlex.quote(visible(text.removesuffix(path.name) + near))}" if near else "",
            )
        folder = Path(os.path.abspath(path.parent))
        named = folder.resolve() in [known.resolve() for known in search_path(kind, cwd).values()]
        return SpecFile(path, "path", cwd if named else folder)
    for origin, folder in search_path(kind, cwd).items():
        if re.fullmatch(NAME_PATTERN, text) and (folder / f"{text}.toml").is_file():
            return SpecFile(folder / f"{text}.toml", _origin(origin, folder), cwd)
    raise SpecError([_unknown(kind, text, cwd)], fix=_other_file(kind, text, cwd))


def _other_file(kind: SpecKind, text: str, cwd: Path) -> str:
    """The fix for an unknown name: the path of a TOML file of this name in the working directory, a new recipe for a
    data file of this name, the most similar known name, or the command that lists all names."""
    option = f"-{kind[0]}"
    if (cwd / f"{text}.toml").is_file():
        return f"{option} {text}.toml, a path: a name is looked for in ./profiles/{KIND_FOLDERS[kind]}"
    if kind == "recipe" and (cwd / text).is_file():
        data = shlex.quote(f"data.sources.main.path={text}")
        return f"tunedeck recipes new my-recipe; then -r my-recipe --set {data}"
    meant = closest_match(text, [located.name for located in list_spec_files(kind, cwd)])
    return f"{option} {meant}" if meant else f"tunedeck {kind}s list"


def _unknown(kind: SpecKind, text: str, cwd: Path) -> str:
    names = [located.name for located in list_spec_files(kind, cwd)]
    other: SpecKind = "recipe" if kind == "profile" else "profile"
    meant = closest_match(text, names)
    hint = f"; did you mean {meant}?" if meant else ""
    if not meant and any(located.name == text for located in list_spec_files(other, cwd)):
        hint = f"; there is a {other} of that name, for -{other[0]}"
    return f"no {kind} named {quoted(text)}{hint}; known: {', '.join(names)}; a path holds a slash or ends in .toml"
