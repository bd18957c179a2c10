"""Finds a run's checkpoints on disk, checks them against their manifests and reads which one is the best, without
torch.

A checkpoint is a folder `step-00000100` with `weights/`, optimizer state, `state.json`, and `manifest.json` with the
size and SHA-256 of every file. Checkpoints are written by `engine.train.checkpoint.files`.

Try: `tunedeck show last --json`
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.journal.directory import RunDirectory
from engine.journal.files import write_atomically

MANIFEST = "manifest.json"
BEST = "best"
PREFIX = "step-"

LEARNED = ("budget_bytes", "proven_bytes", "ceiling_bytes", "passing_bytes", "slope")
"""What is shown of the learned micro-batch budget: predicted bytes that a micro-batch may cost, the largest cost that
succeeded, the cost that failed, the cost that failed beside a co-tenant, and measured bytes per predicted byte."""


MOST_THREADS = 8
"""Files that are hashed at the same time; more would only wait for the disk."""

LARGE_BYTES = 2**28
"""Files of fewer bytes together are hashed one after the other, in a fraction of a second."""

REMOVED = "removed.json"
"""The file that says which checkpoints of a stage were removed when its run was done."""


@dataclass(frozen=True)
class RemovedCheckpoints:
    """Checkpoints of a stage that were removed when the whole run was done; the stage's result is still there."""

    steps: list[int]
    """Steps of the removed checkpoints, newest first."""
    best: int | None
    """The step of the one that was marked as the best; None if none was."""

    def explain(self, stage: str) -> str:
        """A sentence for the user: which checkpoints of the stage with this name were removed, and when."""
        steps = ", ".join(map(str, sorted(self.steps)))
        return f"the checkpoints of stage {stage} (steps {steps}) were removed when the run was done"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: its step and its folder. Its contents may be damaged (see `damage`)."""

    step: int
    path: Path

    @property
    def weights(self) -> Path:
        """The folder of the trained weights, as `LoadedModel.save` wrote them."""
        return self.path / "weights"

    def state(self) -> dict[str, Any]:
        """The content of the checkpoint's `state.json`: counters, learned budget, memory settings. Raises OSError or
        ValueError if the file cannot be read."""
        return dict(json.loads((self.path / "state.json").read_text("utf-8")))


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """All checkpoints in `folder` by the names of their folders, newest first; their contents are not checked (see
    `damage`)."""
    numbered = ((path.name.removeprefix(PREFIX), path) for path in folder.glob(f"{PREFIX}*"))
    found = [Checkpoint(int(name), path) for name, path in numbered if name.isascii() and name.isdigit()]
    return sorted(found, key=lambda checkpoint: -checkpoint.step)


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints in `folder`, after recording their steps in its `removed.json`. A removal that a crash
    interrupted is completed by the next call."""
    found = find_checkpoints(folder)
    earlier = removed_checkpoints(folder)
    if found:
        steps = sorted({checkpoint.step for checkpoint in found} | set(earlier.steps if earlier else []), reverse=True)
        best = best_step(folder) if earlier is None else earlier.best
        write_atomically(folder / REMOVED, json.dumps({"steps": steps, "best": best}) + "\n")
    for checkpoint in found:
        # Renamed first, so that an interrupted removal leaves nothing that looks like a checkpoint.
        gone = checkpoint.path.with_name(f".{checkpoint.path.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        checkpoint.path.rename(gone)
    for gone in folder.glob(f".{PREFIX}*.gone"):
        shutil.rmtree(gone, ignore_errors=True)
    if removed_checkpoints(folder) is not None:
        (folder / BEST).unlink(missing_ok=True)


def removed_checkpoints(folder: Path) -> RemovedCheckpoints | None:
    """The checkpoints that `remove_checkpoints` removed from `folder`; None if it removed none, or its record cannot be
    read."""
    try:
        said = json.loads((folder / REMOVED).read_text("utf-8"))
        return RemovedCheckpoints([int(step) for step in said["steps"]], said["best"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage(checkpoint: Checkpoint) -> str | None:
    """Describe what is wrong with a checkpoint; None if every file in its manifest exists with the recorded size and
    hash."""
    try:
        manifest = json.loads((checkpoint.path / MANIFEST).read_text("utf-8"))
        listed = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest cannot be read ({error})"
    for name, facts in listed.items():
        path = checkpoint.path / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != facts["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {facts['size']}"
    hashes = hashes_of([checkpoint.path / name for name in listed])
    for name, found in zip(listed, hashes, strict=True):
        if found != listed[name]["sha256"]:
            return f"{name} does not match its hash"
    return None


def newest_sound(folder: Path, *, not_after: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest undamaged checkpoint (of step `not_after` or earlier; None if there is none), and a message
    for each newer one that is damaged."""
    complaints: list[str] = []
    for checkpoint in find_checkpoints(folder):
        if not_after is not None and checkpoint.step > not_after:
            continue
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint, complaints
        complaints.append(f"checkpoint {checkpoint.path.name} is damaged: {problem}")
    return None, complaints


def best_step(folder: Path) -> int | None:
    """The step of the checkpoint that is marked as the best; None if no checkpoint is, or the mark cannot be read."""
    try:
        return int(json.loads((folder / BEST).read_text("utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def learned_memory(directory: RunDirectory) -> dict[str, Any] | None:
    """What the newest readable checkpoint records about memory: `step`, the figures `budget_bytes`, `proven_bytes`,
    `ceiling_bytes`, `passing_bytes` and `slope` of the micro-batch budget, and `remedies`. None if no checkpoint can be
    read."""
    for checkpoint in find_checkpoints(directory.checkpoints):
        try:
            state = checkpoint.state()
            budget = {name: state["budget"][name] for name in LEARNED}
            return {"step": checkpoint.step, **budget, "remedies": dict(state["remedies"])}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def hashes_of(paths: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file in hexadecimal, in the order of `paths`; large files are hashed several at once, because
    one thread hashes 1 to 2 GB a second. Raises OSError if a file cannot be read."""
    threads = min(MOST_THREADS, len(paths), os.cpu_count() or 1)
    if threads < 2 or sum(path.stat().st_size for path in paths) < LARGE_BYTES:
        return [sha256(path) for path in paths]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(sha256, paths))


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
