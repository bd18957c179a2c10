"""Passing profile and recipe files around: taking in a stranger's, and writing new ones where they are found by name.

A file is only ever written whole, under a name its own text cannot choose a folder with, and never over another.

Try: `tunedeck recipes export lora --to lora.toml && tunedeck recipes import lora.toml`
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from engine.errors import SpecError, UsageError
from engine.spec.check.check import check_table
from engine.spec.files.document import read_document
from engine.spec.files.find import KIND_FOLDERS, SpecKind, user_folder
from engine.spec.files.paths import unshareable_paths
from engine.spec.files.text import visible
from engine.spec.load import SPEC_TABLES


def import_spec_file(kind: SpecKind, source: Path, *, force: bool = False) -> Path:
    """Check a stranger's file and copy it into the user's folder under its own name. Returns where it lies.

    Raises SpecError for anything the checker refuses and for absolute or climbing paths, UsageError for a link or a
    name that is taken.
    """
    if source.is_symlink():
        raise UsageError(f"{visible(str(source))} is a symbolic link", expected="the file itself")
    document = read_document(source)
    table, problems = check_table(SPEC_TABLES[kind], document.data)
    problems += unshareable_paths(document.data)
    if problems or table is None:
        raise SpecError(document.refuse(problems), fix="mend the file, or use it by its path: nothing was imported")
    target = user_folder() / KIND_FOLDERS[kind] / f"{table.name}.toml"
    return write_new_file(target, source.read_bytes(), force=force)


def write_new_file(target: Path, content: bytes, *, force: bool) -> Path:
    """Write a file whole or not at all; an existing one only with `force`."""
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
            f"{visible(str(target))} cannot be written: {error.strerror}", fix="check its folder"
        ) from None
    return target
