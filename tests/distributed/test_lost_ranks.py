"""If a rank is killed, stopped or broken at any moment, the run restarts once and loses nothing; a slow rank causes no
restart."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from engine.device.metered import MeteredDevice
from engine.distributed.ranks import Ranks
from engine.journal.events import Journal
from engine.train.run.setup import set_up
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import SAMPLES, spec_of
from tests.distributed.supervised import (
    LIMIT_SECONDS,
    SHARING,
    VOTE_SECONDS,
    engine_ends,
    events,
    first_process,
    rank_process,
    restarts,
    wait_for,
    wait_for_lines,
    wait_for_step,
    with_ranks,
)
from tests.small_disk import fill, small_disk
from tests.train.run_helpers import losses, new_run, of_kind, write_samples

BLOWS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
LEFT_BYTES = 64 << 10
"""For journals and logs, not for a checkpoint."""

LINES = 28
"""Of the journal, that a run under the supervisor has written well before its end."""

BREAKING = """
import os, pathlib
broken = pathlib.Path(os.environ["BROKEN_DEVICE"])
if os.environ.get("RANK") == "1" and not broken.exists():
    import torch
    whole, calls = torch.nn.functional.embedding, []

    def embedding(*arguments, **named):
        calls.append(None)
        if len(calls) == 40:
            broken.touch()
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)
        return whole(*arguments, **named)

    torch.nn.functional.embedding = embedding
"""
"""A device on which a kernel goes wrong once, in some step: a module that Python imports at its start."""


@pytest.mark.torture
@pytest.mark.parametrize("moment", ["early", "late"])
@pytest.mark.parametrize("blow", BLOWS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("sharing", SHARING)
def test_a_rank_killed_or_stopped_at_any_moment_costs_a_restart_and_nothing_else(
    sharing: str, rank: int, blow: str, moment: str, folder: Path, curve: dict[int, float]
) -> None:
    """ "early": up to three seconds after the rank's process has started, while it imports, joins or is set up. "late":
    at a random line of the journal, also while rank 0 writes alone."""
    name = f"{sharing}-{rank}-{blow}-{moment}"
    drawn = random.Random(name)
    place = new_run(folder / name, with_ranks(folder, 2, VOTE_SECONDS, sharing=sharing))

    def strike() -> None:
        process = first_process(place, rank)
        if moment == "early":
            time.sleep(drawn.uniform(0.0, 3.0))
        else:
            wait_for_lines(place, drawn.randrange(1, LINES))
        process.send_signal(BLOWS[blow])

    assert engine_ends(place, meanwhile=strike) == 0
    assert len(restarts(place)) == 1
    assert losses(events(place)) == pytest.approx(curve, rel=1e-5)


@pytest.mark.torture
def test_rank_0_stopped_while_it_works_alone_is_noticed_within_the_bound(folder: Path, curve: dict[int, float]) -> None:
    place = new_run(folder / "alone-stopped", with_ranks(folder, 2, VOTE_SECONDS))

    def stop() -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any(event["name"] == "saving" for event in of_kind(events(place), "phase")):
            assert time.monotonic() < deadline
        rank_process(place, 0).send_signal(signal.SIGSTOP)

    assert engine_ends(place, meanwhile=stop) == 0
    assert ["rank 0" in text for text in restarts(place)] == [True]
    assert losses(events(place)) == pytest.approx(curve, rel=1e-5)


@pytest.mark.torture
@pytest.mark.parametrize("sharing", SHARING)
def test_a_broken_device_costs_a_restart_of_all_and_nothing_else(
    sharing: str, folder: Path, curve: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = folder / f"broken-{sharing}"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(BREAKING)
    monkeypatch.setenv("PYTHONPATH", str(hook), prepend=":")
    monkeypatch.setenv("BROKEN_DEVICE", str(hook / "once"))
    place = new_run(hook, with_ranks(folder, 2, VOTE_SECONDS, sharing=sharing))
    assert engine_ends(place) == 0
    (reason,) = restarts(place)
    assert "rank 1 reports a device error that requires a new process" in reason
    assert losses(events(place)) == pytest.approx(curve, rel=1e-5)


def test_a_rank_killed_while_all_wait_for_room_is_what_the_run_tells(
    folder: Path, curve: dict[int, float], tmp_path: Path
) -> None:
    with small_disk(tmp_path, mebibytes=256) as disk:
        place = new_run(disk, with_ranks(folder, 2, VOTE_SECONDS))

        def strike() -> None:
            wait_for_step(place, 1)
            ballast = fill(disk, left=LEFT_BYTES)
            wait_for(lambda: any(event["code"] == "disk_full" for event in of_kind(events(place), "warning")))
            rank_process(place, 1).send_signal(signal.SIGKILL)
            wait_for(lambda: bool(restarts(place)))
            ballast.unlink()

        assert engine_ends(place, meanwhile=strike) == 0
        assert ["rank 1" in text for text in restarts(place)] == [True]
        assert "asked to end" not in place.events.read_text()
        assert losses(events(place)) == pytest.approx(curve, rel=1e-5)


PATIENCE_SECONDS = 15.0


def slow_tokenising(ranks: Ranks, folder: Path) -> Any:
    """Set up a run in which tokenising on rank 0 is slow; returns the number of samples, and the seconds until this
    rank was set up."""
    device = MeteredDevice(2**30)
    if ranks.is_rank0:
        write_samples(folder / SAMPLES, seed=4711)
        tokenizers: Any = PreTrainedTokenizerBase
        tokenizers.__call__ = slow_at_first(tokenizers.__call__)
    ranks.all_gather_object("written")
    began = time.monotonic()
    with device.activate():
        setup = set_up(spec_of(folder, ranks.size, {}), device, Journal(None), lambda _backoff: None, ranks)
    return len(setup.context.data), time.monotonic() - began


def slow_at_first(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its first call takes longer than ranks wait for a vote."""
    slow = iter([2 * PATIENCE_SECONDS])

    def calling(*arguments: Any, **named: Any) -> Any:
        threading.Event().wait(next(slow, 0.0))
        return call(*arguments, **named)

    return calling


@pytest.mark.torture
def test_ranks_outwait_a_tokenisation_that_takes_longer_than_a_vote_may(tmp_path: Path) -> None:
    seen = run_ranks([slow_tokenising], tmp_path, limit_seconds=PATIENCE_SECONDS)["slow_tokenising"]
    (count, first_seconds), (same, second_seconds) = seen
    assert count == same > 0
    assert min(first_seconds, second_seconds) > 2 * PATIENCE_SECONDS
