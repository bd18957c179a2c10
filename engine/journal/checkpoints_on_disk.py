"""Checkpoints on disk: finds them, checks them against their manifests and reads which one is the best, without torch.

A checkpoint is a folder `step-00000100` with `weights/`, optimizer state, `state.json`, and `manifest.json` with the
size and SHA-256 of every file. `engine.train.run.checkpoint_files` writes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from engine.journal.directory import RunDirectory
from engine.journal.files import read_table, write_atomically

MANIFEST = "manifest.json"
BEST = "best"
PREFIX = "step-"
STATE = "state.json"

STEP_FOLDER = re.compile(rf"{PREFIX}([0-9]{{1,12}})\Z")
"""No run takes 10^12 steps."""

LEARNED = ("budget_bytes", "proven_bytes", "ceiling_bytes", "passing_bytes", "slope")
"""Figures of the learned micro-batch budget: predicted bytes that a micro-batch may cost, the largest cost that
succeeded, the cost that failed, the cost that failed beside a co-tenant, and measured bytes per predicted byte."""


MOST_THREADS = 8
"""Files hashed at the same time; more would only wait for the disk."""

LARGE_BYTES = 2**28
"""Files of fewer bytes together are hashed one after the other, in a fraction of a second."""

REMOVED = "removed.json"
"""Says which checkpoints of a stage were removed when its run was done."""


@dataclass(frozen=True)
class RemovedCheckpoints:
    """Checkpoints of a stage that were removed when the whole run was done."""

    steps: list[int]
    best: int | None
    """The one that was marked as the best."""

    def explain(self, stage: str) -> str:
        steps = ", ".join(map(str, sorted(self.steps)))
        return f"the checkpoints of stage {stage} (steps {steps}) were removed when the run was done"


@dataclass(frozen=True)
class Checkpoint:
    """Its contents may be damaged (see `damage`)."""

    step: int
    path: Path

    @property
    def weights(self) -> Path:
        """As `LoadedModel.save` wrote them."""
        return self.path / "weights"

    def state(self) -> dict[str, Any]:
        """Counters, learned budget, memory settings. Raises OSError or ValueError if `state.json` cannot be read."""
        return read_table(self.path / STATE, finite=False)


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """All checkpoints by the names of their folders, newest first; their contents are not checked (see `damage`)."""
    numbered = ((STEP_FOLDER.match(path.name), path) for path in folder.glob(f"{PREFIX}*"))
    found = [Checkpoint(int(name[1]), path) for name, path in numbered if name is not None]
    return sorted(found, key=lambda checkpoint: -checkpoint.step)


def remove_checkpoints(folder: Path) -> None:
    """Remove all, after recording their steps in `removed.json`. The next call completes an interrupted removal."""
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
    for _ in range(2):  # again after an error that has passed: a run that is done never gets here again
        for gone in folder.glob(f".{PREFIX}*.gone"):
            shutil.rmtree(gone, ignore_errors=True)
    if removed_checkpoints(folder) is not None:
        (folder / BEST).unlink(missing_ok=True)


def removed_checkpoints(folder: Path) -> RemovedCheckpoints | None:
    """What `remove_checkpoints` removed from `folder`; None if nothing, or its record cannot be read."""
    try:
        said = read_table(folder / REMOVED)
        return RemovedCheckpoints([int(step) for step in said["steps"]], said["best"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage(checkpoint: Checkpoint) -> str | None:
    """What is wrong with a checkpoint; None if every file in its manifest has the recorded size and hash."""
    try:
        listed = _listed(checkpoint)
        for name, (size, _) in listed.items():
            path = checkpoint.path / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
        hashes = hashes_of([checkpoint.path / name for name in listed])
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    except ValueError as error:
        return f"its manifest cannot be read ({error})"
    for name, found in zip(listed, hashes, strict=True):
        if found != listed[name][1]:
            return f"{name} does not match its hash"
    return None


def _listed(checkpoint: Checkpoint) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file in the manifest. Raises OSError, or ValueError for another shape than that."""
    files = read_table(checkpoint.path / MANIFEST).get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError("it has no list of files")
    listed: dict[str, tuple[int, str]] = {}
    for name, facts in files.items():
        match facts:
            case {"size": int(size), "sha256": str(sha256)} if _is_inside(name):
                listed[name] = size, sha256
            case _:
                raise ValueError(f"{name[:80]!r} has no size and sha256")
    return listed


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def newest_sound(
    folder: Path, *, not_after: int | None = None, inspect: Callable[[Checkpoint], str | None] = damage
) -> tuple[Checkpoint | None, list[str]]:
    """The newest undamaged checkpoint (of step `not_after` or earlier), and a message for each newer damaged one.
    `inspect` says what is wrong with one."""
    complaints: list[str] = []
    for checkpoint in find_checkpoints(folder):
        if not_after is not None and checkpoint.step > not_after:
            continue
        problem = inspect(checkpoint)
        if problem is None:
            return checkpoint, complaints
        complaints.append(f"checkpoint {checkpoint.path.name} is damaged: {problem}")
    return None, complaints


def best_step(folder: Path) -> int | None:
    """The step marked as the best; None if there is no readable mark."""
    try:
        return int(read_table(folder / BEST, finite=False)["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def learned_memory(directory: RunDirectory) -> dict[str, Any] | None:
    """`step`, the micro-batch budget's figures (LEARNED) and `remedies` of the newest readable checkpoint."""
    for checkpoint in find_checkpoints(directory.checkpoints):
        try:
            state = checkpoint.state()
            budget = {name: state["budget"][name] for name in LEARNED}
            if all(figure is None or isinstance(figure, int | float) for figure in budget.values()):
                return {"step": checkpoint.step, **budget, "remedies": dict(state["remedies"])}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def hashes_of(paths: Sequence[Path]) -> list[str]:
    """SHA-256 in hexadecimal; large files several at once, as one thread hashes 1 to 2 GB a second. Raises OSError."""
    threads = min(MOST_THREADS, len(paths), os.cpu_count() or 1)
    if threads < 2 or sum(path.stat().st_size for path in paths) < LARGE_BYTES:
        return [sha256(path) for path in paths]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(sha256, paths))


def sha256(path: Path) -> str:
    """In hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
