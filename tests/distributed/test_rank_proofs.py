"""Proofs among ranks hold on ranks that are whole, and each catches what it is about when that is broken on purpose."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.spawn import ProcessExitedException, start_processes
from torch.nn import Parameter

from engine.distributed.ranks import Ranks
from engine.distributed.sharded import ShardedModel
from engine.distributed.votes import LostRankError, VotedGroup
from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.train.run import doctor
from engine.train.run.training_setup import TrainingSetup
from engine.verify import among_ranks, sharded
from engine.verify.record import DisprovedError, ProvedRun
from engine.verify.verify import AMONG_RANKS
from tests.distributed.proofs_of_ranks import Break, outcome, sharded_setup
from tests.distributed.rank_processes import arguments_of_ranks, member, run_ranks
from tests.distributed.rank_workbench import NEEDS_SHARDS

GIB = 2**30
PROOFS = {proof.name: proof for proof in AMONG_RANKS}


def _lost_exchange(patch: pytest.MonkeyPatch, setup: TrainingSetup) -> None:
    right = dist.all_to_all_single

    def exchange(received: Tensor, sent: Tensor, **named: Any) -> None:
        right(received, sent, **named)
        received[-1] = 0

    patch.setattr(dist, "all_to_all_single", exchange)


def _wrong_scale(patch: pytest.MonkeyPatch, setup: TrainingSetup) -> None:
    """Gradients are averaged over ranks in place of being summed."""
    right, size = FSDPModule.set_gradient_divide_factor, setup.context.ranks.size
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda module, factor: right(module, factor * size))


def _stale_weights(patch: pytest.MonkeyPatch, setup: TrainingSetup) -> None:
    """The optimizer of rank 1 updates a copy of what is gathered."""
    right = ShardedModel.local_parameters

    def copies(model: ShardedModel) -> dict[str, Parameter]:
        parts = right(model)
        copied = {name: Parameter(part.detach().clone()) for name, part in parts.items()}
        for name, part in copied.items():
            part.grad = parts[name].grad
        return copied

    if setup.context.ranks.rank == 1:
        patch.setattr(ShardedModel, "local_parameters", copies)


def _swallowed(patch: pytest.MonkeyPatch, setup: TrainingSetup) -> None:
    right = sharded.Layer.forward

    def forward(layer: sharded.Layer, x_BSW: Tensor) -> Tensor:
        try:
            return right(layer, x_BSW)
        except torch.OutOfMemoryError:
            return x_BSW

    patch.setattr(sharded.Layer, "forward", forward)


def _leaking(patch: pytest.MonkeyPatch, setup: TrainingSetup) -> None:
    patch.setattr(sharded, "SECONDS_TO_FREE", 0.1)
    patch.setattr(ShardedModel, "recover", lambda model: None)


def _nudged_weights(patch: pytest.MonkeyPatch, setup: TrainingSetup) -> None:
    right = ShardedModel.recover

    def recover(model: ShardedModel) -> None:
        right(model)
        with torch.no_grad():
            for part in model.local_parameters().values():
                part.mul_(1.01)

    if setup.context.ranks.rank == 1:
        patch.setattr(ShardedModel, "recover", recover)


BROKEN: list[tuple[str, Break, str]] = [
    ("bandwidth", _lost_exchange, "the all-to-all between the ranks gives a wrong result at 1 MiB"),
    ("sharded_step", _wrong_scale, "in step 1, compared with one rank's, is off by"),
    ("sharded_step", _stale_weights, "in step 2, compared with one rank's, is off by"),
    ("sharded_step", _swallowed, "the outcomes by rank are ['', '']"),
    ("sharded_step", _leaking, "bytes stay allocated"),
    ("sharded_step", _nudged_weights, "has changed"),
]


def whole_and_broken(ranks: Ranks, folder: Path) -> Any:
    """Make every proof on whole ranks, then with each break; returns the outcomes."""
    with sharded_setup(folder, ranks) as setup:
        held = setup.context.device.memory().allocated_bytes
        whole = {name: outcome(setup, proof) for name, proof in PROOFS.items() if proof.applies(setup)}
        broken = [outcome(setup, PROOFS[name], breaking) for name, breaking, _ in BROKEN]
        whole_again = outcome(setup, PROOFS["sharded_step"])
        return whole, broken, whole_again, setup.context.device.memory().allocated_bytes - held


@NEEDS_SHARDS
def test_each_proof_holds_on_whole_ranks_and_catches_what_is_broken(tmp_path: Path) -> None:
    results = run_ranks([whole_and_broken], tmp_path)["whole_and_broken"]
    for whole, broken, whole_again, left_bytes in results:
        assert set(whole) == set(PROOFS) - {"transfers", "communicators"}
        assert [outcome for outcome in (*whole.values(), whole_again) if outcome[0] is not True] == []
        for (_, _, text), (passed, detail, _) in zip(BROKEN, broken, strict=True):
            assert passed is False and text in detail, (text, detail)
        assert left_bytes == 0


def _rehearse(ranks: Ranks, folder: Path, *, notices: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not notices:
            ranks.patience_seconds = 0.2
            patch.setattr(VotedGroup, "ready", _deaf(VotedGroup.ready))
        doctor.rehearse(RunDirectory(folder), ranks)


def _deaf(right: Any) -> Any:
    def ready(group: VotedGroup) -> None:
        try:
            right(group)
        except LostRankError:
            return

    return ready


@pytest.mark.parametrize("notices", [True, False])
def test_a_killed_rank_is_noticed_and_a_rank_that_does_not_notice_is_named(notices: bool, tmp_path: Path) -> None:
    """The processes are ended by torch's own launcher of processes as soon as one is gone, as the elastic agent
    does."""
    place = RunDirectory(tmp_path)
    assert not doctor.has_begun(place)
    arguments = arguments_of_ranks([partial(_rehearse, notices=notices)], tmp_path, size=2, limit_seconds=60.0)
    with pytest.raises(ProcessExitedException) as ended:
        start_processes(member, args=arguments, nprocs=2, start_method="forkserver")
    assert (ended.value.error_index, ended.value.signal_name) == (1, signal.SIGKILL.name)
    assert doctor.has_begun(place)
    limit_seconds = 60.0 if notices else -10.0
    result = doctor.judge(place, 2, limit_seconds, "rank 1 was killed (SIGKILL)", 1.0)
    assert result.passed is notices
    assert ("all other ranks notice" if notices else "ranks 0 did not notice") in result.detail
    late = doctor.judge(place, 2, 60.0, "rank 0 exited with 1", 1.0)
    assert late.detail.startswith("the supervisor reports: rank 0")


def _cards(count: int = 2) -> ProvedRun:
    """Ranks on CUDA cards that do not exist."""
    device = SimpleNamespace(kind="cuda", torch_device=torch.device("cuda", 0), capacity_bytes=70 * GIB)
    device.fit_capacity = lambda: setattr(device, "capacity_bytes", 69 * GIB)
    table = SimpleNamespace(capacity_bytes=78 * GIB, reserve_gib=2.0)
    spec = SimpleNamespace(profile=SimpleNamespace(device=table), limits=SimpleNamespace(devices=[]))
    context = SimpleNamespace(ranks=SimpleNamespace(size=count), device=device)
    return cast(ProvedRun, SimpleNamespace(context=context, spec=spec))


def test_memory_outside_torch_is_compared_with_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    run, proof = _cards(), among_ranks.COMMUNICATORS
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (75 * GIB, 80 * GIB))
    assert proof.applies(run)
    assert proof.prove(run).startswith("1.0 GiB of 2.0 GiB reserved memory is held outside torch")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (73 * GIB, 80 * GIB))
    with pytest.raises(DisprovedError, match=r"3\.0 GiB are held outside torch, but the profile leaves 2\.0 GiB"):
        proof.prove(run)
    assert proof.fall_back(run) == "training with 69.0 GiB; to plan with this, set device.reserve_gib = 3.0"


def test_pairs_without_peer_access_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run, proof = _cards(4), among_ranks.TRANSFERS
    assert proof.applies(run)
    monkeypatch.setattr(among_ranks, "exchange", lambda ranks, value: [value] * 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other == 1)
    monkeypatch.setattr(among_ranks, "disk_usage", lambda path: SimpleNamespace(total=64 * 10**6))
    assert proof.prove(run) == "peer access between 2 of 6 pairs of GPUs on a machine; /dev/shm has 64 MB"
    monkeypatch.setattr(among_ranks, "disk_usage", lambda path: SimpleNamespace(total=32 * 10**6))
    with pytest.raises(DisprovedError, match="/dev/shm has 32 MB, but the other pairs need 40 MB"):
        proof.prove(run)
    assert "--shm-size" in proof.fall_back(run)


def test_two_ranks_on_one_card_are_refused_before_their_communicators_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["GPU-0", "GPU-1"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: SimpleNamespace(uuid=own[place.index]))
    device = _cards().context.device

    def ranks(other: str) -> Ranks:
        return cast(Ranks, SimpleNamespace(all_gather_object=lambda value: [["node-7", other], value]))

    among_ranks.refuse_shared_cards(device, ranks("GPU-1"))
    with pytest.raises(EnvironmentProblem, match="ranks 0 and 1 both use GPU GPU-0 of"):
        among_ranks.refuse_shared_cards(device, ranks("GPU-0"))
