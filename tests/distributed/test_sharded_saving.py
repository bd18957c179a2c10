"""A checkpoint of weights in shards: every rank writes and hashes a part of it, none receives the whole model, and a
failure on any rank leaves no checkpoint."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.journal import checkpoints_on_disk
from engine.journal.checkpoints_on_disk import Checkpoint, damage, find_checkpoints
from engine.model.tensor_file import write_tensors
from engine.train.run.checkpoint_files import write_checkpoint
from engine.train.strategy import checkpoint_storage
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import FULL, NEEDS_SHARDS, RankWorkbench, sharded, small_model

pytestmark = NEEDS_SHARDS

RANKS = 3
"""Not a divisor of the number of rows of most weights."""
CASES: dict[str, dict[str, Any]] = {
    "fp32": sharded(FULL, "parameters"),
    "bf16, tied": {**sharded(FULL, "gradients", tied=True), "model": {"dtype": "bfloat16"}},
}
KINDS = ("none", "disk", "memory")
"""What fails on the last rank."""


def saved(ranks: Ranks, folder: Path) -> Any:
    """Write checkpoints of every case, then one for each kind of failure, followed by one without. Returns the bytes
    that this rank received and wrote for each case, the files that it hashed by reading, and how the writing ended."""
    found: dict[str, Any] = {}
    for name, tables in CASES.items():
        small = small_model(folder, tables)
        work = RankWorkbench(folder, ranks, {**small, "model": {**small["model"], **tables.get("model", {})}})
        place = folder / f"{name} on {ranks.size}"
        storage = work.setup.context.strategy.checkpoint_storage(work.setup.context.optimizer)
        with noted() as seen:
            ranks.run_on_rank0(lambda: write(storage, place, 1))  # noqa: B023
        found[name] = seen
        if ranks.size > 1 and name == "fp32":
            found["ended"] = [failing(work, storage, place, kind) for kind in KINDS[1:]]
            ranks.run_on_rank0(lambda: write(storage, place, 9))  # noqa: B023
        work.close()
    return found


def write(storage: Any, place: Path, step: int) -> None:
    write_checkpoint(place, step, lambda path: storage.write_weights(path / "weights") | storage.write_optimizer(path))


def failing(work: RankWorkbench, storage: Any, place: Path, kind: str) -> Any:
    """Write a checkpoint while a file of the last rank cannot be written; returns the error on rank 0."""

    def attempt() -> str:
        try:
            write(storage, place, 5)
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        except MemoryError:
            return "memory"
        return "written"

    def full(path: Path, *_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with pytest.MonkeyPatch.context() as patch:
        if work.ranks.rank == work.ranks.size - 1 and kind == "disk":
            patch.setattr(checkpoint_storage, "write_tensors", full)
        if work.ranks.rank == work.ranks.size - 1 and kind == "memory":
            work.device.fail_host_at(20)
        ended = work.ranks.run_on_rank0(attempt)
    work.device.fail_host_at(None)
    return ended


@contextmanager
def noted() -> Iterator[dict[str, Any]]:
    """Context manager that notes what this rank receives, writes and reads for a checkpoint."""
    seen: dict[str, Any] = {"received": 0, "written": {}, "read": []}
    send, hashed = dist.all_to_all_single, checkpoints_on_disk.sha256

    def exchanging(received: Tensor, *arguments: Any, **named: Any) -> Any:
        seen["received"] += received.numel()
        return send(received, *arguments, **named)

    def writing(path: Path, *arguments: Any, **named: Any) -> str:
        digest = write_tensors(path, *arguments, **named)
        seen["written"][path.name] = path.stat().st_size
        return digest

    def reading(path: Path) -> str:
        seen["read"].append(path.name)
        return hashed(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchanging)
        patch.setattr(checkpoint_storage, "write_tensors", writing)
        patch.setattr(checkpoints_on_disk, "sha256", reading)
        yield seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[Any]:
    saved(SINGLE_PROCESS, folder)
    return run_ranks([saved], folder, size=RANKS)["saved"]


def tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in checkpoint.weights.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("case", CASES)
def test_ranks_write_the_weights_of_one_process(case: str, seen: list[Any], folder: Path) -> None:
    (alone,) = find_checkpoints(folder / f"{case} on 1")
    together = find_checkpoints(folder / f"{case} on {RANKS}")[-1]
    assert damage(together) is None
    expected, found = tensors(alone), tensors(together)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    reopened = AutoModelForCausalLM.from_pretrained(together.weights, dtype="auto").state_dict()
    assert all(torch.equal(reopened[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("case", CASES)
def test_every_rank_writes_a_part_and_none_receives_the_model(case: str, seen: list[Any], folder: Path) -> None:
    alone = tensors(find_checkpoints(folder / f"{case} on 1")[0]).values()
    sizes = [tensor.numel() * tensor.itemsize for tensor in alone]
    received = [rank[case]["received"] for rank in seen]
    assert sum(received) == sum(sizes)
    assert max(received) <= sum(sizes) / RANKS + max(sizes)
    for number, rank in enumerate(seen, 1):
        weights, state = f"model-{number:05d}-of-{RANKS:05d}", f"shard-{number:05d}-model-00001-of-00001"
        assert list(rank[case]["written"]) == [f"{weights}.safetensors", f"{state}.safetensors"]


def test_no_tensor_is_read_again_to_be_hashed(seen: list[Any]) -> None:
    read = [name for rank in seen for case in CASES for name in rank[case]["read"]]
    assert "config.json" in read
    assert [name for name in read if name.endswith(".safetensors")] == []
    assert [rank[case]["read"] for rank in seen[1:] for case in CASES] == [[]] * (RANKS - 1) * len(CASES)


def test_a_failure_on_one_rank_leaves_no_checkpoint_and_the_next_is_written(seen: list[Any], folder: Path) -> None:
    assert seen[0]["ended"] == ["ENOSPC", "memory"]
    place = folder / f"fp32 on {RANKS}"
    assert [checkpoint.step for checkpoint in find_checkpoints(place)] == [9, 1]
    assert not list(place.glob(".step-*"))
    assert all(damage(checkpoint) is None for checkpoint in find_checkpoints(place))
    listed = json.loads((find_checkpoints(place)[0].path / "manifest.json").read_text())["files"]
    assert sum(name.endswith(".safetensors") for name in listed) == 2 * RANKS
