"""Checkpoints written whole or not at all, and pruned without losing the best.

A checkpoint is a folder `step-00000100` with `weights/` (what `LoadedModel.save` writes), `optimizer.safetensors`,
`state.json`, and `manifest.json` with size and SHA-256 of every file. It is written under another name, flushed to the
disk and renamed. `engine.journal.checkpoints_on_disk` finds and checks them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from engine.errors import as_os_error
from engine.journal.checkpoints_on_disk import (
    BEST,
    MANIFEST,
    PREFIX,
    Checkpoint,
    best_step,
    find_checkpoints,
    hashes_of,
)
from engine.journal.files import flush, remove_new_parents, write_atomically


def write_checkpoint(folder: Path, step: int, fill: Callable[[Path], Mapping[Path, str] | None]) -> Checkpoint:
    """Make checkpoint `step`, replacing an existing one, from the files that `fill(path)` writes.

    `fill` returns the SHA-256, by path, of files that were hashed while written, and flushed; all others are read
    again. OSError: a file cannot be written (a full disk, say), or the folder was moved meanwhile; the incomplete
    checkpoint is removed then, and what libraries made where the folder was before.
    """
    folder.mkdir(exist_ok=True)
    before = {parent: parent.stat().st_ino for parent in (folder, *folder.parents)}
    final = folder / f"{PREFIX}{step:08d}"
    draft = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        hashes = fill(draft) or {}
        _require_unmoved(folder, before)
        _write_manifest(draft, step, hashes)
        replaced = _put_in_place(draft, final)
    except Exception as error:  # raised again: no error of a file writer may leave a draft behind
        shutil.rmtree(draft, ignore_errors=True)
        remove_new_parents(before)
        failed = as_os_error(error, draft)
        if failed is None:
            raise
        raise failed from error
    flush(folder)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)
    return Checkpoint(step, final)


def _require_unmoved(folder: Path, before: Mapping[Path, int]) -> None:
    """Raise FileNotFoundError if the folder is another now: a library that creates missing folders has then written the
    rest of a checkpoint at the old place, and its first files are at the new one."""
    if not folder.is_dir() or folder.stat().st_ino != before[folder]:
        raise FileNotFoundError(errno.ENOENT, "it was moved while a checkpoint was written", str(folder))


def prune(folder: Path, keep: int, best: Collection[int] = ()) -> None:
    """Remove all but the `keep` newest checkpoints, the one marked as best and those of the steps `best`, and
    unfinished ones of processes that died."""
    spared = {best_step(folder), *best}
    for checkpoint in find_checkpoints(folder)[keep:]:
        if checkpoint.step not in spared:
            _remove(checkpoint.path)
    for draft in folder.glob(f".{PREFIX}*"):
        if not draft.name.endswith(f".{os.getpid()}"):
            shutil.rmtree(draft, ignore_errors=True)
    for record in folder.glob(f".{BEST}.*.tmp"):
        record.unlink(missing_ok=True)


def forget_after(folder: Path, step: int) -> None:
    """Remove checkpoints of later steps than `step`: the run continues from `step` and writes its own."""
    for checkpoint in find_checkpoints(folder):
        if checkpoint.step > step:
            _remove(checkpoint.path)


def mark_best(folder: Path, step: int, metric: str, value: float) -> None:
    """Record the best checkpoint so far. After a crash the file holds either the old or the new record."""
    write_atomically(folder / BEST, json.dumps({"step": step, "metric": metric, "value": value}) + "\n")


def unmark_best(folder: Path) -> None:
    (folder / BEST).unlink(missing_ok=True)


def size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def place_result(checkpoint: Checkpoint, target: Path, complete: Callable[[Path], None] | None = None) -> None:
    """Replace `target` by a copy of the checkpoint's weights, completely or not at all; hard-linked where possible.
    `complete` adds to the copy what a checkpoint does not have, and may refuse it."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        shutil.copytree(checkpoint.weights, draft, copy_function=_share)
    except shutil.Error as error:  # of each file, with the errors' texts alone
        shutil.rmtree(draft, ignore_errors=True)
        number = re.search(r"\[Errno (\d+)\]", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(target)) from error
    try:
        if complete is not None:
            complete(draft)
        _put_in_place(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # unless it is in place
    # The replaced result, and drafts of processes that died.
    for debris in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(debris, ignore_errors=True)


def _share(source: str, target: str) -> None:
    """Hard-link weight files, which nothing edits in place; copy others, and all where there are no hard links."""
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
            return
        except OSError:
            pass
    shutil.copy2(source, target)


def _put_in_place(draft: Path, target: Path) -> Path | None:
    """Rename a finished folder to its name. Returns the new name of the one that had it; if the rename fails, that one
    gets its name back."""
    aside = target.with_name(f".{target.name}.old.{os.getpid()}") if target.exists() else None
    if aside is not None:
        os.rename(target, aside)
    try:
        os.rename(draft, target)
    except OSError:
        if aside is not None:
            os.rename(aside, target)
        raise
    return aside


def _remove(path: Path) -> None:
    """Rename the checkpoint before removing it, so that an interrupted removal leaves nothing that looks like one."""
    gone = path.with_name(f".{path.name}.gone.{os.getpid()}")
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _write_manifest(draft: Path, step: int, known: Mapping[Path, str]) -> None:
    written = list(_files(draft))
    unknown = [path for path in written if path not in known]
    hashes = {**known, **dict(zip(unknown, hashes_of(unknown), strict=True))}
    files = {str(path.relative_to(draft)): {"size": path.stat().st_size, "sha256": hashes[path]} for path in written}
    manifest = draft / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": files}, indent=1) + "\n", "utf-8")
    for path in [*unknown, manifest, *(folder for folder in draft.rglob("*") if folder.is_dir()), draft]:
        flush(path)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
