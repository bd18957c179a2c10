"""Handles file paths in a recipe: which keys contain paths, what these are relative to, and which a shared file may not
contain.

No file is opened; only whether a folder exists is checked, to tell a model folder from a hub id of the same spelling.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from engine.spec.files.document import FROM_COMMAND_LINE, Document, Problem
from engine.spec.files.lines import Place
from engine.spec.files.text import quoted

PATH_KEYS = frozenset({"path", "image_root"})
POSSIBLE_PATH_KEYS = frozenset({"id", "tokenizer", "adapter", "chat_template"})
NON_FILE_PREFIXES = ("builtin:", "run:", "stage:")


def path_values(node: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield (place, text) for every text below `node` whose key may contain a path."""
    children: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for part, child in children:
        if isinstance(child, str) and part in PATH_KEYS | POSSIBLE_PATH_KEYS:
            yield (*place, part), child
        elif isinstance(child, (dict, list)):
            yield from path_values(child, (*place, part))


def make_absolute(recipe: Document, folder: Path, cwd: Path) -> None:
    """Make the recipe's paths absolute, in place. Paths from --set are relative to `cwd`, all others to `folder`."""
    for place, text in list(path_values(recipe.data)):
        base = cwd if recipe.written_at(place) == FROM_COMMAND_LINE else folder
        node: Any = recipe.data
        for part in place[:-1]:
            node = node[part]
        node[place[-1]] = absolute_path(str(place[-1]), text, base)


def absolute_path(key: str, text: str, base: Path) -> str:
    """Make `text`, the value of `key`, absolute if it is a file path; names of built-ins, runs and hub models and
    URLs are returned unchanged."""
    if text.startswith(NON_FILE_PREFIXES) or "://" in text or not text.strip():
        return text
    path = os.path.normpath(base / Path(text).expanduser())
    if key in PATH_KEYS:
        return path
    if key == "chat_template":
        return path if _is_template_file(text) else text
    looks_local = text.startswith(("./", "../", "/", "~")) or text in (".", "..")
    return path if looks_local or os.path.isdir(path) else text


def _is_template_file(text: str) -> bool:
    return text.endswith(".jinja") and "\n" not in text and "{" not in text


def unshareable_paths(data: dict[str, Any]) -> list[Problem]:
    """Return a problem for each path that is absolute or leaves the recipe's folder: on the importing machine such a
    path would name other people's files."""
    return [
        Problem(place, f"{quoted(text)} {reason}", "a path below the recipe's own folder is allowed in a shared file")
        for place, text in path_values(data)
        if (place[-1] != "chat_template" or _is_template_file(text)) and (reason := _reach(text))
    ]


def _reach(text: str) -> str:
    bare = text.removeprefix("run:")
    posix, windows = PurePosixPath(bare), PureWindowsPath(bare)
    if bare.startswith(("file:", "~")) or posix.is_absolute() or windows.drive or windows.root:
        return "is an absolute path"
    return "climbs out of its folder" if ".." in windows.parts else ""
