"""What ranks read of a run's checkpoints when they resume: one of them checks the files, and tells the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.distributed.ranks import Ranks
from engine.journal import checkpoints_on_disk
from engine.journal.directory import RunDirectory
from engine.train.checkpoint.files import write_checkpoint
from engine.train.checkpoint.manager import CheckpointManager
from engine.train.monitor.journal import Journal
from tests.distributed.rank_processes import run_ranks

SIZE = 1000
BROKEN_STEP = 2


def fill(path: Path) -> None:
    (path / "weights").write_bytes(b"w" * SIZE)


def write(folder: Path) -> None:
    """Write the checkpoints of two steps; the later one is damaged."""
    for step in (1, BROKEN_STEP):
        checkpoint = write_checkpoint(folder, step, fill)
    (checkpoint.path / "weights").write_bytes(b"x" * SIZE)


def newest(ranks: Ranks, folder: Path) -> Any:
    """The step of the newest sound checkpoint, and the bytes that this rank hashed to find it."""
    manager = object.__new__(CheckpointManager)  # its constructor needs a whole training setup
    manager._directory, manager._ranks, manager._journal = RunDirectory(folder), ranks, Journal(None)
    if ranks.is_rank0:
        write(manager._directory.checkpoints)
    ranks.all_gather_object("written")
    hashed: list[int] = []
    whole = checkpoints_on_disk.sha256

    def counting(path: Path) -> str:
        hashed.append(path.stat().st_size)
        return whole(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints_on_disk, "sha256", counting)
        found = manager.newest()
    return found and found.step, sum(hashed)


def test_one_rank_hashes_a_checkpoint_and_tells_the_others(tmp_path: Path) -> None:
    first, second = run_ranks([newest], tmp_path)["newest"]
    assert first == (1, 2 * SIZE)
    assert second == (1, 0)
