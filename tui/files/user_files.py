"""Profile and recipe files that the console writes: new and changed ones go to ./profiles, shipped ones stay unchanged.

Try: `python -c "from tui.files.user_files import *; print(user_file_folder('recipe'))"`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.errors import UsageError
from engine.spec.files.document import read_document
from engine.spec.files.find import KIND_FOLDERS, SHIPPED_FOLDER, SpecKind, list_spec_files, user_folder
from engine.spec.files.paths import unshareable_paths
from engine.spec.files.rewrite import rewrite_text
from engine.spec.files.share import import_spec_file, require_name, write_new_file
from engine.spec.files.text import UNSAFE, quoted, visible
from engine.spec.files.working_directory import working_directory


def user_file_folder(kind: SpecKind, cwd: Path | None = None) -> Path:
    """The folder for new files of a kind: in ./profiles, or the user's configuration where ./profiles is the shipped
    folder itself (inside Tunedeck's checkout)."""
    project = (cwd or working_directory()).absolute() / "profiles"
    shipped = project.resolve() == SHIPPED_FOLDER
    return (user_folder() if shipped else project) / KIND_FOLDERS[kind]


def unused_name(kind: SpecKind, name: str) -> str:
    """The name itself, or NAME-2, NAME-3 ... if a file of this kind already has it."""
    taken = {located.name for located in list_spec_files(kind)}
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return name if name not in taken else f"{name}-{number}"


def new_file_path(kind: SpecKind, name: str) -> Path:
    """The path of a new profile or recipe. Raises UsageError where the name is not allowed."""
    require_name(name)
    return user_file_folder(kind) / f"{name}.toml"


def save_as(kind: SpecKind, source: str, overrides: Sequence[str], name: str) -> Path:
    """Write `source` with the overrides (KEY=VALUE) applied as a new file. Raises UsageError or SpecError."""
    target = new_file_path(kind, name)
    return write_new_file(target, rewrite_text(kind, source, overrides, {}, target).encode(), force=False)


def read_text(path: Path) -> str:
    """The text of a file for the editor. Raises UsageError where it is not UTF-8 or has control characters."""
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
    """Write an edited file; `before` is its text when it was read, None for a new file. Raises UsageError where the
    file has changed since."""
    if before is not None and path.exists() and read_text(path) != before:
        raise UsageError(
            f"{visible(str(path))} was changed by another program meanwhile", fix="copy your text, open the file again"
        )
    write_new_file(path, text.encode(), force=before is not None)


def import_user_file(text: str) -> tuple[SpecKind, Path]:
    """Check a file and copy it into the user's folder, as the `kind` that it names. Raises SpecError or UsageError."""
    source = Path(text).expanduser()
    kind = read_document(source).data.get("kind")
    if kind not in ("profile", "recipe"):
        raise UsageError(f"kind = {quoted(kind)}" if kind else "no kind", expected='kind = "profile" or "recipe"')
    return kind, import_spec_file(kind, source)


def export_user_file(source: Path, text: str) -> tuple[Path, list[str]]:
    """Copy a file to another place; returns its path there, and the entries that only work on this machine. Raises
    SpecError, UsageError."""
    document = read_document(source)
    target = Path(text).expanduser().absolute()
    target = target / source.name if target.is_dir() else target
    problems = document.render_all(unshareable_paths(document.data))
    return write_new_file(target, source.read_bytes(), force=False), problems
