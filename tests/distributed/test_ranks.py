"""Votes, requests of rank 0, and summed gradients on two real processes."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from engine.distributed.gradient_all_reduce import GradientAllReduce, broadcast_tensors
from engine.distributed.ranks import SINGLE_PROCESS, Ranks, signs_of_life
from engine.distributed.votes import SLOT_BYTES, LostRankError
from engine.errors import DeviceBusyError, EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.train.run.external_launcher import require_shared
from engine.train.run.main import all_gather_busy
from tests.distributed.rank_processes import run_ranks
from tests.events import read_events


def votes(ranks: Ranks, _folder: Path) -> Any:
    gathered = ranks.all_gather_object({"rank": ranks.rank, "cause": "é" * (3 + ranks.rank)})
    return gathered, ranks.broadcast_object(["of", ranks.rank])


def too_long(ranks: Ranks, _folder: Path) -> Any:
    with pytest.raises(ValueError, match="slot"):
        ranks.all_gather_object("x" * SLOT_BYTES)
    return ranks.all_gather_object(ranks.rank)


def errand(ranks: Ranks, folder: Path) -> Any:
    def work() -> str:
        with (folder / "who.txt").open("a") as file:
            file.write(f"{ranks.rank}\n")
        return "made"

    return [ranks.run_on_rank0(work) for _ in range(2)], (folder / "who.txt").read_text()


def noted_errors(ranks: Ranks, _folder: Path) -> Any:
    before = ranks.noted_error()
    ranks.all_gather_object(None)
    if ranks.rank == 1:
        ranks.note_error({"found": "the disk is gone"})
    ranks.all_gather_object(None)
    return before, ranks.noted_error()


def gradients(ranks: Ranks, _folder: Path) -> Any:
    """Sum gradients twice, over four parameters: one with gradients on both ranks, one on rank 1 alone, one on no rank,
    and a large one that spans several buckets. Returns for each time the indices of parameters that had a gradient on
    the other rank only, and all gradients."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3,), (2, 2), (5,), (9, 7))]
    total = GradientAllReduce(parameters, bucket_bytes=4 * 16)
    seen = []
    for factor in (1.0, 10.0):
        for parameter in parameters:
            parameter.grad = None
        parameters[0].grad = torch.full((3,), factor * (ranks.rank + 1))
        if ranks.rank == 1:
            parameters[1].grad = torch.full((2, 2), factor * 7.0)
        parameters[3].grad = factor * torch.arange(63.0).view(9, 7) * (ranks.rank + 1)
        missing = total.agree()
        total.fill(missing)
        total.sum()
        seen.append((missing, [None if p.grad is None else p.grad.clone() for p in parameters]))
    return seen


def half_gradients(ranks: Ranks, _folder: Path) -> Any:
    """Sum the gradients of a bf16 parameter and an fp32 one; returns the sums."""
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, ranks.rank + 1.0)
    total = GradientAllReduce(parameters)
    total.fill(total.agree())
    total.sum()
    return [parameter.grad for parameter in parameters]


def replicas(ranks: Ranks, _folder: Path) -> Any:
    torch.manual_seed(ranks.rank)
    layer = torch.nn.Linear(3, 3)
    broadcast_tensors(list(layer.parameters()))
    return layer.weight.detach()


def blind_rank(ranks: Ranks, folder: Path) -> Any:
    """Let rank 1 look for the run in a folder that does not contain one. Returns the reported problem with the recorded
    status and exit code; None where nothing is raised."""
    here = folder / ("here" if ranks.is_rank0 else "elsewhere")
    here.mkdir(exist_ok=True)
    if ranks.is_rank0:
        RunDirectory(here).launch.write_text(json.dumps({"token": "abc"}))
    try:
        require_shared(ranks, RunDirectory(here), "abc", patience_seconds=0.2)
    except EnvironmentProblem as problem:
        ranks.all_gather_object("recorded")
        end = list(read_events(folder / "here" / "events.jsonl"))[-1]
        return problem.found, end["status"], end["exit_code"]
    return None


def busy_devices(ranks: Ranks, _folder: Path) -> Any:
    """Gather which devices are busy, with rank 1's in use: only rank 0 decides that the wait is over."""
    busy = DeviceBusyError("held by pid 7") if ranks.rank == 1 else None
    return [all_gather_busy(ranks, busy, over=ranks.is_rank0), all_gather_busy(ranks, None, over=not ranks.is_rank0)]


CASES = [busy_devices, votes, too_long, errand, noted_errors, gradients, half_gradients, replicas, blind_rank]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_ranks(CASES, tmp_path_factory.mktemp("crew"))


def test_every_rank_hears_what_every_rank_told(seen: dict[str, list[Any]]) -> None:
    told = [{"rank": 0, "cause": "ééé"}, {"rank": 1, "cause": "éééé"}]
    assert seen["votes"] == [(told, ["of", 0])] * 2


def test_a_value_too_long_for_a_vote_is_refused_before_it_is_sent(seen: dict[str, list[Any]]) -> None:
    assert seen["too_long"] == [[0, 1]] * 2


def test_an_errand_is_done_by_rank_0_alone_and_all_get_its_result(seen: dict[str, list[Any]]) -> None:
    assert [results for results, _ in seen["errand"]] == [["made", "made"]] * 2
    assert seen["errand"][1][1] == "0\n0\n"


def test_rank_0_finds_the_word_a_failing_rank_left(seen: dict[str, list[Any]]) -> None:
    assert seen["noted_errors"] == [(None, {"rank": 1, "found": "the disk is gone"})] * 2


def test_gradients_are_summed_and_what_no_rank_has_stays_none(seen: dict[str, list[Any]]) -> None:
    for rank, steps in enumerate(seen["gradients"]):
        for factor, (missing, found) in zip((1.0, 10.0), steps, strict=True):
            assert missing == ([1] if rank == 0 else [])
            assert torch.equal(found[0], torch.full((3,), 3 * factor))
            assert torch.equal(found[1], torch.full((2, 2), 7 * factor))
            assert found[2] is None
            assert torch.equal(found[3], 3 * factor * torch.arange(63.0).view(9, 7))


def test_gradients_keep_their_dtype(seen: dict[str, list[Any]]) -> None:
    for half, full in seen["half_gradients"]:
        assert half.dtype == torch.bfloat16 and full.dtype == torch.float32
        assert half.tolist() == full.tolist() == [3.0] * 4


def test_replicas_start_from_the_values_of_rank_0(seen: dict[str, list[Any]]) -> None:
    assert torch.equal(*seen["replicas"])


def test_a_folder_that_one_machine_does_not_see_ends_the_run_everywhere(seen: dict[str, list[Any]]) -> None:
    for found, status, code in seen["blind_rank"]:
        assert "not the same folder on all machines" in found
        assert (status, code) == ("failed", 6)


def test_all_ranks_wait_for_a_device_that_one_of_them_waits_for(seen: dict[str, list[Any]]) -> None:
    assert seen["busy_devices"] == [[("rank 1: held by pid 7", True), ("", False)]] * 2


def test_rank_0_may_work_alone_for_longer_than_the_others_patience_as_long_as_it_lives() -> None:
    store = HashStore()
    first, second = (Ranks(rank, 2, rank, None, store, patience_seconds=0.2) for rank in (0, 1))
    with ThreadPoolExecutor(1) as pool, signs_of_life(store, 0.02):
        waiting = pool.submit(second.run_on_rank0, lambda: "not its own")

        def work() -> str:
            deadline = time.monotonic() + 4 * 0.2
            while time.monotonic() < deadline:
                assert not waiting.done()
            return "made"

        assert first.run_on_rank0(work) == waiting.result() == "made"


def test_a_rank_0_that_gives_no_sign_of_life_is_lost() -> None:
    second = Ranks(1, 2, 1, None, HashStore(), patience_seconds=0.1)
    with pytest.raises(LostRankError, match="has not responded"):
        second.run_on_rank0(lambda: None)


def test_a_run_of_one_process_asks_nobody() -> None:
    assert SINGLE_PROCESS.all_gather_object(5) == [5]
    assert SINGLE_PROCESS.broadcast_object("a") == "a"
    assert SINGLE_PROCESS.run_on_rank0(lambda: 3) == 3


class EndsMeanwhile(HashStore):
    """A store in which rank 0 posts its last message and ends the run right after rank 1 has asked for something."""

    def check(self, keys: list[str]) -> bool:
        """Answer as before rank 0's message, then let rank 0 end the run."""
        found = bool(super().check(keys))
        if not super().check(["over"]):
            rank0 = Ranks(rank=0, size=2, store=self)
            assert rank0.run_on_rank0(lambda: "made") == "made"
            rank0.mark_finished()
        return found


def test_the_last_message_of_rank_0_is_read_although_the_run_is_over() -> None:
    assert Ranks(rank=1, size=2, store=EndsMeanwhile()).run_on_rank0(lambda: None) == "made"
