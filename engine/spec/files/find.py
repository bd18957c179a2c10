"""Which file a name stands for: the search path of profiles and recipes.

A name is looked for in ./profiles, the user's own folder and the shipped files, first wins; a text with a slash, or one
that ends in .toml, is a path. Nothing is parsed here.

Try: `python -c "from engine.spec.files.find import available; print(available('recipe'))"`
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import SpecError
from engine.spec.files.text import nearest, quoted, visible
from engine.spec.files.working_directory import working_directory
from engine.spec.schema.base import NAME_PATTERN

Kind = Literal["profile", "recipe"]
FOLDERS: dict[Kind, str] = {"profile": "hardware", "recipe": "recipes"}
SHIPPED = Path(__file__).resolve().parents[3] / "profiles"


@dataclass(frozen=True)
class Located:
    """A file, where it came from ("project", "user", "shipped" or "path"), and the folder its data paths start from."""

    path: Path
    origin: str
    folder: Path

    @property
    def name(self) -> str:
        """The file's stem."""
        return self.path.stem

    @property
    def label(self) -> str:
        """How provenance names it: "shipped:NAME", else the absolute path."""
        return f"shipped:{self.name}" if self.origin == "shipped" else str(self.path)


def user_folder() -> Path:
    """The user's own profiles: $TUNEDECK_CONFIG/profiles, else the platform's configuration folder. Absolute."""
    if configured := os.environ.get("TUNEDECK_CONFIG"):
        return Path(configured).expanduser().absolute() / "profiles"
    import platformdirs

    return Path(platformdirs.user_config_dir("tunedeck")) / "profiles"


def search_path(kind: Kind, cwd: Path) -> dict[str, Path]:
    """Origin = folder, in the order they are searched."""
    folder = FOLDERS[kind]
    return {"project": cwd / "profiles" / folder, "user": user_folder() / folder, "shipped": SHIPPED / folder}


def available(kind: Kind, cwd: Path | None = None) -> list[Located]:
    """Every file that can be addressed by its name, sorted; one hidden behind an earlier folder is left out."""
    here = (cwd or working_directory()).absolute()
    found: dict[str, Located] = {}
    for origin, folder in search_path(kind, here).items():
        for path in sorted(folder.glob("*.toml")) if os.access(folder, os.R_OK) else ():
            if re.fullmatch(NAME_PATTERN, path.stem) and path.is_file():
                found.setdefault(path.stem, Located(path, _origin(origin, folder), here))
    return [found[name] for name in sorted(found)]


def _origin(origin: str, folder: Path) -> str:
    """Inside Tunedeck's own checkout ./profiles is the shipped folder."""
    return "shipped" if folder.resolve().parent == SHIPPED else origin


def locate(kind: Kind, text: str, cwd: Path | None = None) -> Located:
    """The file a name or path stands for. Raises SpecError with the known names when there is none."""
    here = (cwd or working_directory()).absolute()
    if "/" in text or os.sep in text or text.endswith(".toml"):
        path = here / Path(text).expanduser()
        if not path.exists():
            raise SpecError([f"{visible(text)}: no such file; the path of a {kind}'s TOML file is needed"])
        return Located(path, "path", Path(os.path.abspath(path.parent)))
    for origin, folder in search_path(kind, here).items():
        if re.fullmatch(NAME_PATTERN, text) and (folder / f"{text}.toml").is_file():
            return Located(folder / f"{text}.toml", _origin(origin, folder), here)
    raise SpecError([_unknown(kind, text, here)], fix=f"tunedeck {kind}s list")


def _unknown(kind: Kind, text: str, cwd: Path) -> str:
    names = [located.name for located in available(kind, cwd)]
    other: Kind = "recipe" if kind == "profile" else "profile"
    meant = nearest(text, names)
    hint = f"; did you mean {meant}?" if meant else ""
    if not meant and any(located.name == text for located in available(other, cwd)):
        hint = f"; there is a {other} of that name, for -{other[0]}"
    return f"no {kind} named {quoted(text)}{hint}; known: {', '.join(names)}; a path holds a slash or ends in .toml"
