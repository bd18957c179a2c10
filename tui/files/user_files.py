"""Where the console writes profiles and recipes, and how: ./profiles for what is made or changed here, never over a
shipped file.

Try: `python -c "from tui.files.user_files import *; print(own_folder('recipe'))"`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from engine.errors import UsageError
from engine.spec.files.document import read_document
from engine.spec.files.find import KIND_FOLDERS, SHIPPED_FOLDER, SpecKind, list_spec_files, user_folder
from engine.spec.files.paths import unshareable_paths
from engine.spec.files.rewrite import rewrite_text
from engine.spec.files.share import import_spec_file, write_new_file
from engine.spec.files.text import UNSAFE, quoted, visible
from engine.spec.files.working_directory import working_directory
from engine.spec.schema.base import NAME_PATTERN


def own_folder(kind: SpecKind, cwd: Path | None = None) -> Path:
    """./profiles/..., or the user's own folder where ./profiles is the shipped one (inside Tunedeck's checkout)."""
    project = (cwd or working_directory()).absolute() / "profiles"
    shipped = project.resolve() == SHIPPED_FOLDER
    return (user_folder() if shipped else project) / KIND_FOLDERS[kind]


def free_name(kind: SpecKind, name: str) -> str:
    """The name, or the first of NAME-2, NAME-3 ... that no file of this kind has."""
    taken = {located.name for located in list_spec_files(kind)}
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return name if name not in taken else f"{name}-{number}"


def own_path(kind: SpecKind, name: str) -> Path:
    """The file a new profile or recipe of this name becomes. Raises UsageError for what cannot be a name."""
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > 80:
        raise UsageError(f"{name!r} is no name", expected="lower-case letters, digits, '.', '_' and '-', 80 at most")
    return own_folder(kind) / f"{name}.toml"


def save_as(kind: SpecKind, source: str, sets: Sequence[str], name: str) -> Path:
    """Write `source` with the overrides laid over it as a new file. Raises UsageError or SpecError."""
    target = own_path(kind, name)
    return write_new_file(target, rewrite_text(kind, source, sets, {}, target).encode(), force=False)


def read_text(path: Path) -> str:
    """The text of a file that may be edited on a screen. Raises UsageError for what cannot be shown as it is."""
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"{visible(str(path))} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{visible(str(path))} is not UTF-8", fix="save it as UTF-8") from None
    if hit := UNSAFE.search(text.replace("\n", "").replace("\t", "")):
        raise UsageError(f"{visible(str(path))} holds the control character {visible(hit[0])}", fix="take it out first")
    return text


def write_text(path: Path, text: str, *, before: str | None) -> None:
    """Write an edited file; `before` is what it held when it was read, None for a new one. Raises UsageError."""
    if before is not None and path.exists() and read_text(path) != before:
        raise UsageError(
            f"{visible(str(path))} was changed by someone else meanwhile", fix="copy your text, open the file again"
        )
    write_new_file(path, text.encode(), force=before is not None)


def take_in(text: str) -> tuple[SpecKind, Path]:
    """Import a file as what its own `kind` says it is. Raises SpecError or UsageError."""
    source = Path(text).expanduser()
    kind = read_document(source).data.get("kind")
    if kind not in ("profile", "recipe"):
        raise UsageError(f"kind = {quoted(kind)}" if kind else "no kind", expected='kind = "profile" or "recipe"')
    return kind, import_spec_file(kind, source)


def pass_on(source: Path, text: str) -> tuple[Path, list[str]]:
    """Copy a file to where it is wanted; returns where, and what others could not use. Raises SpecError, UsageError."""
    document = read_document(source)
    target = Path(text).expanduser().absolute()
    target = target / source.name if target.is_dir() else target
    return write_new_file(target, source.read_bytes(), force=False), document.refuse(unshareable_paths(document.data))
