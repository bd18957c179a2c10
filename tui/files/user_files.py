"""Profile and recipe files that the console writes: new and changed ones go to the user's own
folder (`engine.config.files.find.own_folder`), shipped ones stay unchanged.

Try: `python -c "from tui.files.user_files import *; print(new_file_path('recipe', 'mine'))"`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.config.files.document import read_document
from engine.config.files.find import SpecKind, list_spec_files, own_folder, unshareable_paths
from engine.config.files.machine import path_of
from engine.config.files.text import UNSAFE, quoted, visible
from engine.config.files.write import import_spec_file, require_name, rewrite_text, write_new_file
from engine.errors import UsageError


def unused_name(kind: SpecKind, name: str) -> str:
    """Returns `name`, or the first of NAME-2, NAME-3 ... that is free if a profile or recipe called `name` exists."""
    taken = {located.name for located in list_spec_files(kind)}
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return name if name not in taken else f"{name}-{number}"


def new_file_path(kind: SpecKind, name: str) -> Path:
    """Return the path at which a new profile or recipe called `name` is to be saved. Nothing is written. Raises
    UsageError if the name is not allowed."""
    require_name(name)
    return own_folder(kind) / f"{name}.toml"


def save_as(kind: SpecKind, source: str, overrides: Sequence[str], name: str) -> Path:
    """Apply the overrides (KEY=VALUE) to the profile or recipe `source` and save the result as a new file called
    `name`; returns the path. Raises UsageError or SpecError."""
    target = new_file_path(kind, name)
    return write_new_file(target, rewrite_text(kind, source, overrides, {}, target).encode(), force=False)


def read_text(path: Path) -> str:
    """Return the text of the file `path` for the editor. Raises UsageError if the file cannot be read, is not UTF-8 or
    has control characters."""
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"{visible(str(path))} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{visible(str(path))} is not UTF-8", fix="save it as UTF-8") from None
    if hit := UNSAFE.search(text.replace("\n", "").replace("\t", "")):
        raise UsageError(f"{visible(str(path))} contains the control character {visible(hit[0])}", fix="remove it")
    return text


def write_text(path: Path, text: str, *, before: str | None) -> None:
    """Write an edited file to `path`. `before` is the text that was read from the file, None for a new file. Raises
    UsageError if another program has changed the file meanwhile."""
    if before is not None and path.exists() and read_text(path) != before:
        raise UsageError(
            f"{visible(str(path))} was changed by another program", fix="copy your text, open the file again"
        )
    write_new_file(path, text.encode(), force=before is not None)


def import_user_file(text: str) -> tuple[SpecKind, Path]:
    """Check the file at path `text` and copy it to the folder for new profiles or recipes, depending on the file's
    `kind`. Returns the kind and the path of the copy. Raises SpecError or UsageError."""
    source = path_of(text)
    kind = read_document(source).data.get("kind")
    if kind not in ("profile", "recipe"):
        raise UsageError(f"kind = {quoted(kind)}" if kind else "no kind", expected='kind = "profile" or "recipe"')
    return kind, import_spec_file(kind, source)


def export_user_file(source: Path, text: str) -> tuple[Path, list[str]]:
    """Copy the profile or recipe `source` to the file or folder `text`. Returns the path of the copy, and a warning for
    each path in the file that exists only on this machine. Raises SpecError, UsageError."""
    document = read_document(source)
    target = path_of(text).absolute()
    target = target / source.name if target.is_dir() else target
    problems = document.render_all(unshareable_paths(document.data))
    return write_new_file(target, source.read_bytes(), force=False), problems
