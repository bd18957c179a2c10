"""Finds the file of a profile or recipe by its name on a search path, and handles the paths that a recipe contains."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from engine.config.files.document import FROM_COMMAND_LINE, Document, Place, Problem
from engine.config.files.machine import path_of, working_directory
from engine.config.files.text import closest_match, quoted, visible
from engine.config.schema.base import NAME_PATTERN
from engine.errors import SpecError

SpecKind = Literal["profile", "recipe"]
KIND_FOLDERS: dict[SpecKind, str] = {"profile": "hardware", "recipe": "recipes"}
SHIPPED_FOLDER = Path(__file__).resolve().parents[3] / "profiles"


@dataclass(frozen=True)
class SpecFile:
    """A profile or recipe file, its origin (project, user, shipped or path), and the start of its relative paths."""

    path: Path
    origin: str
    folder: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def label(self) -> str:
        """How a run's provenance records the file: "shipped:NAME", else the absolute path."""
        return f"shipped:{self.name}" if self.origin == "shipped" else str(self.path)


def user_folder() -> Path:
    """$TUNEDECK_CONFIG/profiles, else a folder in the platform's configuration folder. Absolute."""
    if configured := os.environ.get("TUNEDECK_CONFIG"):
        return Path(configured).expanduser().absolute() / "profiles"
    import platformdirs

    return Path(platformdirs.user_config_dir("tunedeck")) / "profiles"


def own_folder(kind: SpecKind) -> Path:
    """Where new profiles or recipes go: ./profiles, or the user's folder where ./profiles is that of the shipped files,
    as in Tunedeck's own checkout."""
    project = working_directory().absolute() / "profiles"
    return (user_folder() if project.resolve() == SHIPPED_FOLDER else project) / KIND_FOLDERS[kind]


def search_path(kind: SpecKind, cwd: Path) -> dict[str, Path]:
    """The folder of each origin ("project", "user", "shipped"), in the order of the search."""
    folder = KIND_FOLDERS[kind]
    return {"project": cwd / "profiles" / folder, "user": user_folder() / folder, "shipped": SHIPPED_FOLDER / folder}


def list_spec_files(kind: SpecKind, cwd: Path | None = None) -> list[SpecFile]:
    """All files on the search path, sorted by name; of several with the same name only the first on the path."""
    cwd = (cwd or working_directory()).absolute()
    found: dict[str, SpecFile] = {}
    for origin, folder in search_path(kind, cwd).items():
        for path in sorted(folder.glob("*.toml")) if os.access(folder, os.R_OK) else ():
            if re.fullmatch(NAME_PATTERN, path.stem) and path.is_file():
                found.setdefault(path.stem, SpecFile(path, _origin(origin, folder), cwd))
    return [found[name] for name in sorted(found)]


def _origin(origin: str, folder: Path) -> str:
    """Also "shipped" where ./profiles is the folder of shipped files, as in Tunedeck's own checkout."""
    return "shipped" if folder.resolve().parent == SHIPPED_FOLDER else origin


def find_spec_file(kind: SpecKind, text: str, cwd: Path | None = None) -> SpecFile:
    """Find the file of a name or path; SpecError, with the known names, if there is none. A file that a name could find
    means the same by its path: its relative paths start from the working directory."""
    cwd = (cwd or working_directory()).absolute()
    if "/" in text or os.sep in text or text.endswith(".toml"):
        path = cwd / path_of(text)
        if not path.exists():
            near = closest_match(path.name, [found.name for found in path.parent.glob("*.toml")])
            raise SpecError(
                [f"{visible(text)}: no such file; expected the path of a {kind} (TOML)"],
                fix=f"-{kind[0]} {shlex.quote(visible(text.removesuffix(path.name) + near))}" if near else "",
            )
        if kind == "recipe" and path.suffix in (".yml", ".yaml"):
            raise _other_format(text)
        folder = Path(os.path.abspath(path.parent))
        named = folder.resolve() in [known.resolve() for known in search_path(kind, cwd).values()]
        return SpecFile(path, "path", cwd if named else folder)
    path_of(f"{text}.toml")  # raises for what no file can be called
    for origin, folder in search_path(kind, cwd).items():
        if re.fullmatch(NAME_PATTERN, text) and (folder / f"{text}.toml").is_file():
            return SpecFile(folder / f"{text}.toml", _origin(origin, folder), cwd)
    if kind == "recipe" and (cwd / text).is_file() and Path(text).suffix in (".yml", ".yaml"):
        raise _other_format(text)
    raise SpecError([_unknown(kind, text, cwd)], fix=_other_file(kind, text, cwd))


def _other_format(text: str) -> SpecError:
    return SpecError(
        [f"{visible(text)} is a YAML file of another tool; recipes are TOML files"],
        fix=f"tunedeck recipes import {shlex.quote(visible(text))}; it converts files of Axolotl, "
        "LLaMA-Factory, TRL and torchtune",
    )


def _other_file(kind: SpecKind, text: str, cwd: Path) -> str:
    """The fix for an unknown name: a TOML file of this name in the working directory, a new recipe for a data file of
    this name, the most similar known name, or the command that lists all names."""
    option = f"-{kind[0]}"
    if (cwd / f"{text}.toml").is_file():
        return f"{option} {text}.toml, as a path: names are only looked up in ./profiles/{KIND_FOLDERS[kind]}"
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
        hint = f"; there is a {other} with that name: use -{other[0]}"
    return f"no {kind} named {quoted(text)}{hint}; known: {', '.join(names)}; a path has a slash or ends with .toml"


PATH_KEYS = frozenset({"path", "image_root", "prompts", "harness_include"})
POSSIBLE_PATH_KEYS = frozenset({"id", "tokenizer", "adapter", "chat_template"})

BUILTIN_PREFIX = "builtin:"
"""`model.id = "builtin:NAME"`, a tokenizer or data that need no files."""
RUN_PREFIX = "run:"
"""`model.id = "run:RUN"`, also with @STEP or @best, starts from the result of an earlier run."""
RUN_REFERENCE = re.compile(rf"{RUN_PREFIX}(.*?)(?:@([^@/]*))?\Z", re.DOTALL)
CHECKPOINT_NAME = re.compile(r"best|[0-9]{1,12}")


def split_run_reference(text: str) -> tuple[str, str]:
    """(RUN, which) of "run:RUN@which"; `which` is empty for the run's result, and not checked."""
    found = RUN_REFERENCE.match(text)
    return (found[1], found[2] or "") if found is not None else (text, "")


STAGE_PREFIX = "stage:"
"""`model.id = "stage:NAME"`, also with @STEP or @best, starts from the weights of an earlier stage of the same run."""
NON_FILE_PREFIXES = (BUILTIN_PREFIX, RUN_PREFIX, STAGE_PREFIX)


def path_values(node: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield (place, text) for every text below `node` whose key may contain a path."""
    children: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for part, child in children:
        if isinstance(child, str) and part in PATH_KEYS | POSSIBLE_PATH_KEYS:
            yield (*place, part), child
        elif isinstance(child, (dict, list)):
            yield from path_values(child, (*place, part))


def make_absolute(recipe: Document, folder: Path, cwd: Path) -> None:
    """Make the recipe's paths absolute, in place: those from --set relative to `cwd`, all others to `folder`."""
    for place, text in list(path_values(recipe.data)):
        base = cwd if recipe.written_at(place) == FROM_COMMAND_LINE else folder
        node: Any = recipe.data
        for part in place[:-1]:
            node = node[part]
        node[place[-1]] = absolute_path(str(place[-1]), text, base)


def absolute_path(key: str, text: str, base: Path) -> str:
    """Make `text` absolute if it is a file path; built-ins, runs, hub models and URLs are returned unchanged."""
    if text.startswith(NON_FILE_PREFIXES) or "://" in text or not text.strip():
        return text
    if key == "chat_template" and not _is_template_file(text):
        return text  # Jinja text, which may be longer than a path can be
    path = os.path.normpath(base / path_of(text))
    if key in PATH_KEYS or key == "chat_template":
        return path
    looks_local = text.startswith(("./", "../", "/", "~")) or text in (".", "..")
    return path if looks_local or os.path.isdir(path) else text


def _is_template_file(text: str) -> bool:
    return text.endswith(".jinja") and "\n" not in text and "{" not in text


SHAREABLE_SCHEMES = ("https", "http", "hf")
"""Others are read by fsspec from this machine, with its credentials, or unpack files inside files."""


def unshareable_paths(data: dict[str, Any]) -> list[Problem]:
    """A problem for each path that is absolute or leaves the recipe's folder: on the importing machine it would name
    other people's files."""
    return [
        Problem(
            place, f"{quoted(text)} {reason}", "in a shared file, only paths inside the recipe's folder are allowed"
        )
        for place, text in path_values(data)
        if (place[-1] != "chat_template" or _is_template_file(text)) and (reason := reach(text))
    ]


def reach(text: str) -> str:
    """Why a path of a shared file names something outside the recipe's own folder; empty if it does not."""
    bare = text.removeprefix(RUN_PREFIX)
    scheme, separator, _ = bare.lower().partition("://")
    if "::" in bare or (separator and scheme not in SHAREABLE_SCHEMES):
        return "is a URL that can refer to files of this machine"
    posix, windows = PurePosixPath(bare), PureWindowsPath(bare)
    if bare.lower().startswith(("file:", "~")) or posix.is_absolute() or windows.drive or windows.root:
        return "is an absolute path"
    if "$" in bare:
        return "contains an environment variable"
    return "leaves the recipe's folder" if ".." in windows.parts else ""
