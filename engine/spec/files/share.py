"""Sharing profile and recipe files: importing a file that someone else wrote, and writing new files.

A file is written whole or not at all, never over another one unless forced, and the text of an imported file cannot
choose the folder it is written to.

Try: `tunedeck recipes export lora --to lora.toml && tunedeck recipes import lora.toml`
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from engine.errors import SpecError, UsageError
from engine.spec.check.check import check_table
from engine.spec.files.document import read_document
from engine.spec.files.find import KIND_FOLDERS, SpecKind, user_folder
from engine.spec.files.paths import unshareable_paths
from engine.spec.files.text import quoted, visible
from engine.spec.load import SPEC_TABLES, settle_name
from engine.spec.schema.base import NAME_PATTERN


def import_spec_file(kind: SpecKind, source: Path, *, force: bool = False) -> Path:
    """Check a file that someone else wrote and copy it into the user's folder; returns the path of the copy. The copy
    is named after the file's `name` key, or after the file if it has no such key.

    Raises SpecError for every problem of the file and for paths that leave its folder, UsageError for a symbolic link
    and, without `force`, for a name that exists already.
    """
    if source.is_symlink():
        raise UsageError(f"{visible(str(source))} is a symbolic link", expected="the file itself")
    document = read_document(source)
    if "name" not in document.data:
        settle_name(document, source.stem)
    table, problems = check_table(SPEC_TABLES[kind], document.data)
    problems += unshareable_paths(document.data)
    if problems or table is None:
        raise SpecError(document.render_all(problems), fix="nothing was imported: correct the file, or use its path")
    target = user_folder() / KIND_FOLDERS[kind] / f"{table.name}.toml"
    return write_new_file(target, source.read_bytes(), force=force)


def require_name(name: str) -> None:
    """Raise UsageError unless `name` is valid as the name of a profile or recipe."""
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > 80 or name.endswith(".toml"):
        better = re.sub("[^a-z0-9._-]+", "-", name.lower().removesuffix(".toml")).strip("-._")[:80]
        raise UsageError(
            f"{quoted(name)} is not a valid name",
            expected="lower-case letters, digits, '.', '_' and '-', 80 at most, without .toml",
            fix=f"call it {better}" if better else "",
        )


def write_new_file(target: Path, content: bytes, *, force: bool) -> Path:
    """Write `content` to `target`, whole or not at all, and return `target`; missing folders are created. Raises
    UsageError if the file exists, unless `force` is given to replace it, or cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)
            if force:
                os.replace(temporary, target)
            else:
                os.link(temporary, target)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)
    except FileExistsError:
        raise UsageError(
            f"{visible(str(target))} exists", fix="choose another name, or add --force to replace it"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{visible(str(target))} cannot be written: {error.strerror}", fix="check the permissions of its folder"
        ) from None
    return target
