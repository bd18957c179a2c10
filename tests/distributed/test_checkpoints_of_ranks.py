"""What ranks read of a run's checkpoints when they resume: one of them checks the files, and tells the others."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.distributed.ranks import Ranks
from engine.journal import checkpoints_on_disk
from engine.journal.directory import RunDirectory
from engine.journal.events import Journal
from engine.train.run.checkpoint_files import write_checkpoint
from engine.train.run.checkpoints import CheckpointManager
from engine.train.run.run_state import RunState
from engine.train.step.context import LossScaler
from engine.train.step.optimizer_state import state_tensors
from engine.train.step.transaction import StepTransaction
from tests.distributed.proofs_of_ranks import sharded_setup
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import NEEDS_SHARDS

SIZE = 1000
BROKEN_STEP = 2


def fill(step: int, path: Path) -> None:
    (path / "weights").write_bytes(b"w" * SIZE)
    tables: dict[str, Any] = {key: {} for key in ("budget", "remedies", "identity", "settings")}
    saved = {"state": asdict(RunState(step)), "scaler": asdict(LossScaler(enabled=False)), "standing": [], **tables}
    (path / "state.json").write_text(json.dumps(saved))


def write(folder: Path) -> None:
    """Write the checkpoints of two steps; the later one is damaged."""
    for step in (1, BROKEN_STEP):
        checkpoint = write_checkpoint(folder, step, partial(fill, step))
    (checkpoint.path / "weights").write_bytes(b"x" * SIZE)


def newest(ranks: Ranks, folder: Path) -> Any:
    """The step of the newest sound checkpoint, and how many files of weights this rank hashed to find it."""
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
    return found and found.step, hashed.count(SIZE)


def test_one_rank_hashes_a_checkpoint_and_tells_the_others(tmp_path: Path) -> None:
    first, second = run_ranks([newest], tmp_path)["newest"]
    assert first == (1, 2)
    assert second == (1, 0)


def read_back(ranks: Ranks, folder: Path) -> list[str]:
    """Save weights and optimizer state in shards, overwrite both in memory, and read them back; returns the names of
    those of this rank that differ in a bit."""
    with sharded_setup(folder, ranks) as setup:
        context, named = setup.context, setup.context.loaded.trainable()
        StepTransaction(context).run(1, setup.order.step(1))
        storage = context.strategy.checkpoint_storage(context.optimizer)
        held = {**dict(named), **dict(state_tensors(context.optimizer, named))}
        before = {name: tensor.detach().clone() for name, tensor in held.items()}

        def save() -> None:
            storage.write_weights(folder / "saved" / "weights")
            storage.write_optimizer(folder / "saved")

        ranks.run_on_rank0(save)
        with torch.no_grad():
            for tensor in held.values():
                tensor.fill_(1)
        context.loaded.load_weights(folder / "saved" / "weights")
        storage.read_optimizer(folder / "saved")
        return [name for name, tensor in held.items() if not torch.equal(tensor.detach(), before[name])]


@NEEDS_SHARDS
def test_every_rank_reads_its_part_of_weights_and_optimizer_state_back_bit_for_bit(tmp_path: Path) -> None:
    assert run_ranks([read_back], tmp_path, size=3)["read_back"] == [[], [], []]
