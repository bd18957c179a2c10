"""Proofs at the start of a run: their events, the state that they do not change, and what follows from one that
fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.distributed.ranks import Ranks
from engine.journal.event_text import describe_event
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import LORA as RANK_LORA
from tests.distributed.rank_workbench import RankWorkbench
from tests.events import read_events
from tests.present import metered, present
from tests.train.proofs.proved import LORA, break_attention, proved, small_setup, wrong_scale
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, train, write_samples

EVERY_RUN = {"allocator", "oom_in_backward"}


def test_each_proof_has_a_line_and_is_made_once_for_a_machine_and_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and peak memory are exactly equal in a run that makes its proofs and a run that uses stored results."""
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "cache"))
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), method=LORA, train={"max_steps": 3})
    (code, first), (again, second) = (train(new_run(tmp_path / "runs", spec)) for _ in range(2))
    assert code == again == 0
    lines = {event["name"]: event for event in of_kind(first, "proof")}
    assert [event["name"] for event in of_kind(first, "proof")] == [
        "allocator", "oom_in_backward", "attention", "loss", "adapter", "optimizer", "copies",
        "host_syncs", "tiled_mlp",
    ]  # fmt: skip
    assert all(event["passed"] and not event["cached"] and event["detail"] for event in lines.values())
    assert {event["name"] for event in of_kind(second, "proof") if not event["cached"]} == EVERY_RUN
    assert losses(first) == losses(second)
    peaks = [[event["peak_bytes"] for event in of_kind(events, "step")] for events in (first, second)]
    assert peaks[0] == peaks[1]
    assert [describe_event(event) for event in lines.values()] == [None] * len(lines)


def test_proofs_leave_nothing_behind(tmp_path: Path) -> None:
    with small_setup(tmp_path) as setup:
        device, context = setup.context.device, setup.context
        torch.manual_seed(5)
        random, allocated = torch.random.get_rng_state(), device.memory().allocated_bytes
        weights = {name: tensor.clone() for name, tensor in context.loaded.model.state_dict().items()}
        budget = context.budget
        assert all(result.passed for result in proved(setup, tmp_path).values())
        assert torch.equal(torch.random.get_rng_state(), random)
        # The copies of the weights are this test's own.
        own_bytes = sum(-(-tensor.nbytes // 512) * 512 for tensor in weights.values())
        assert device.memory().allocated_bytes == device.memory().peak_bytes == allocated + own_bytes
        now = context.loaded.model.state_dict()
        assert all(torch.equal(now[name], weights[name]) for name in weights)
        assert context.budget is budget and context.active_remedies == []
        assert all(parameter.grad is None for parameter in context.loaded.model.parameters())


def test_a_block_that_looks_at_other_tokens_is_computed_whole(tmp_path: Path) -> None:
    with small_setup(tmp_path) as setup:
        tiles = present(setup.context.loaded.tiles)
        for _, block in tiles.blocks:
            block.get_submodule("gate_proj").register_forward_hook(lambda module, given, out: out + out.mean(1, True))
        found = proved(setup, tmp_path)["tiled_mlp"]
        assert found.passed is False and "in pieces is off by" in found.detail
        assert found.fallback.startswith("feed-forward blocks are computed whole")
        assert setup.context.loaded.tiles is None


@pytest.mark.parametrize("allocation", [1, 5, 30, 90, 200, 400])
def test_running_out_of_memory_inside_a_proof_is_no_failure(allocation: int, tmp_path: Path) -> None:
    with small_setup(tmp_path) as setup:
        metered(setup.context.device).fail_at(allocation)
        found = proved(setup, tmp_path)
        metered(setup.context.device).fail_at(None)
        assert not [result for result in found.values() if result.passed is False and result.name not in EVERY_RUN]
        assert setup.context.loaded.attention == "sdpa" and setup.context.loss.implementation == "chunked"
        assert all(result.passed for result in proved(setup, tmp_path).values())


def test_a_failed_proof_is_told_and_is_made_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path / "cache"))
    with small_setup(tmp_path) as setup:
        break_attention(setup, wrong_scale)
        proved(setup, tmp_path, afresh=False)
        break_attention(setup, wrong_scale)
        assert proved(setup, tmp_path, afresh=False)["attention"].passed is False
    events = [event for event in read_events(tmp_path / "proved" / "events.jsonl") if event["name"] == "attention"]
    assert describe_event(events[0]) == (
        f"check of attention failed: {events[0]['detail']}; fallback: attention = sdpa"
    )


def broken_on_rank_1(ranks: Ranks, folder: Path, strategy: dict[str, Any]) -> Any:
    work = RankWorkbench(folder, ranks, {**RANK_LORA, **strategy})
    break_attention(work.setup, wrong_scale if ranks.rank == 1 else _right)
    own = folder / f"rank-{ranks.rank}"
    own.mkdir(exist_ok=True)
    found = proved(work.setup, own)["attention"]
    kernel = work.setup.context.loaded.attention
    work.close()
    return found.passed, found.detail, kernel


def _right(right: Callable[..., Any], *given: Any, **options: Any) -> Any:
    return right(*given, **options)


@pytest.mark.parametrize("strategy", [{}, {"parallel": {"strategy": "sharded"}}], ids=["replicated", "sharded"])
def test_what_fails_on_one_rank_is_used_by_none(strategy: dict[str, Any], tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.jsonl")
    found = run_ranks([partial(broken_on_rank_1, strategy=strategy)], tmp_path)["broken_on_rank_1"]
    assert found[0] == found[1]
    passed, detail, kernel = found[0]
    assert passed is False and detail.startswith("rank 1: ") and kernel == "sdpa"
