"""Communicators are made before anything else, checked, and refused with what is the matter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from engine.device.cpu import CpuDevice
from engine.device.cuda import CudaDevice
from engine.distributed import warm_up as module
from engine.distributed.ranks import Ranks
from engine.distributed.sequence_parallel import join_sequence_group
from engine.distributed.votes import LostRankError, raising_lost_rank
from engine.distributed.warm_up import explain, run_each_collective, warm_up
from engine.errors import EnvironmentProblem, MemoryExhaustedError
from engine.train.run.training_setup import TrainingSetup
from engine.verify.among_ranks import COLLECTIVES
from engine.verify.record import DisprovedError
from tests.distributed.rank_processes import run_ranks

GIB = 2**30
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled {} error (run with"
    " NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nLast error:\n"
)
FULL_SHM = (
    "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: "
    "No space left on device (28)"
)
OLD_FULL_SHM = "Call to posix_fallocate failed : No space left on device"


def _zeroed(collective: Any, *tensors: torch.Tensor, **named: Any) -> None:
    collective(*tensors, **named)
    tensors[0].zero_()


def proof_broken_on_rank_1(ranks: Ranks, _folder: Path) -> Any:
    """Make the proof of collectives whole, and with an all-gather that is broken on rank 1 alone; returns what each
    says."""
    setup = cast(TrainingSetup, SimpleNamespace(context=SimpleNamespace(ranks=ranks, device=CpuDevice(GIB))))
    assert COLLECTIVES.applies(setup)
    found = [COLLECTIVES.prove(setup)]
    with pytest.MonkeyPatch.context() as patch:
        right = module._all_gather
        if ranks.rank == 1:
            patch.setattr(module, "_all_gather", lambda *tensors, **named: _zeroed(right, *tensors, **named))
        try:
            found.append(COLLECTIVES.prove(setup))
        except DisprovedError as error:
            found.append(str(error))
    assert "NCCL_P2P_DISABLE" in COLLECTIVES.fall_back(setup)
    return found


def each_kind(ranks: Ranks, _folder: Path) -> Any:
    """Run every kind of collective among all ranks, then with each kind broken in turn; returns the broken kinds that
    were noticed on this rank, and whether the group of all ranks is reused for sequences."""
    device = CpuDevice(GIB)
    warm_up(device, ranks.patience_seconds)
    noticed = []
    kinds = ((dist, "all_reduce"), (module, "_reduce_scatter"), (module, "_all_gather"), (dist, "all_to_all_single"),
             (dist, "broadcast"))  # fmt: skip
    for place, name in kinds:
        with pytest.MonkeyPatch.context() as patch:
            right = getattr(place, name)
            patch.setattr(place, name, lambda *tensors, right=right, **named: _zeroed(right, *tensors, **named))
            try:
                run_each_collective(device.torch_device)
            except EnvironmentProblem as problem:
                noticed.append(problem.found)
    group = join_sequence_group(ranks, ranks.size)
    return noticed, group.group is dist.group.WORLD, group.place == ranks.rank


@pytest.mark.parametrize("size", [2, 4])
def test_every_kind_of_collective_is_run_and_a_broken_one_is_noticed(size: int, tmp_path: Path) -> None:
    results = run_ranks([each_kind, proof_broken_on_rank_1], tmp_path, size=size)
    for rank, (whole, broken) in enumerate(results["proof_broken_on_rank_1"]):
        assert f"between {size} ranks are exact" in whole
        assert ("the all-gather between the ranks gives a wrong result" in broken) == (rank == 1)
    for noticed, reused, place in results["each_kind"]:
        kinds = [text.removeprefix("the ").partition(" between")[0] for text in noticed]
        assert kinds == ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"]
        assert reused and place


@pytest.mark.parametrize("text", [FULL_SHM, OLD_FULL_SHM])
def test_a_small_dev_shm_is_called_by_its_name(text: str) -> None:
    problem = explain(dist.DistBackendError(NCCL.format("system") + text))
    assert isinstance(problem, EnvironmentProblem)
    assert "/dev/shm" in problem.found and "--shm-size" in problem.fix


def test_memory_that_runs_out_in_nccl_is_no_lost_rank() -> None:
    error = dist.DistBackendError(NCCL.format("cuda") + "Cuda failure 2 'out of memory'")
    problem = explain(error)
    assert isinstance(problem, MemoryExhaustedError) and "reserve_gib" in problem.fix
    with pytest.raises(dist.DistBackendError), raising_lost_rank():
        raise error
    with pytest.raises(LostRankError), raising_lost_rank():
        raise dist.DistBackendError("Connection closed by peer [127.0.0.1]:1234")
    assert explain(RuntimeError("Connection closed by peer")) is None


def test_the_cap_is_lowered_to_what_communicators_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    card = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (75 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    roomy = CudaDevice(0, 70 * GIB, "GPU-0", [])
    assert roomy.fit_capacity() == [] and roomy.capacity_bytes == 70 * GIB
    tight = CudaDevice(0, 78 * GIB, "GPU-0", [])
    (notice,) = tight.fit_capacity()
    assert tight.capacity_bytes == 76 * GIB and shares[-1] == 76 / 80 and "2.0 GiB more" in notice
