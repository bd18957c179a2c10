"""The out-of-memory screen: sentences, reports, and what would have avoided the failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tui.conftest import Opener, Spawn
from tests.tui.recorded_runs import make_run
from tests.tui.screens.test_run import open_run

pytestmark = pytest.mark.asyncio


async def test_the_out_of_memory_screen_shows_sentences_and_reports(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    run.oom.mkdir()
    tensor = {"size_bytes": 66060288, "shape": [4, 5], "dtype": "float32", "name": "[red]layer 3[/red]"}
    report = {"step": 7, "attempt": 1, "phase": "backward", "device": "a device", "text": "no", "largest": [tensor]}
    (run.oom / "step-1.json").write_text(json.dumps(report))
    (run.oom / "step-2.json").write_text('{"held_by')
    (run.oom / "step-3.json").write_text('{"largest": [{}]}')
    async with console(80, 36) as pilot:
        await open_run(pilot)
        await pilot.press("o")
        await pilot.sees("step 1: out of memory in backward", "step 7, attempt 1")
        await pilot.sees("63 MiB  4x5 float32  [red]layer 3[/red]")
        await pilot.sees("step-2.json", "step-3.json", "cannot be read: it may be incomplete")
        await pilot.sees("not in the format of this version's reports")
        await pilot.press("escape")
        assert pilot.screen.screen_name == "run"


async def test_what_would_have_avoided_an_oom_comes_first_and_is_applied(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    run.oom.mkdir()
    ways = [
        {"changes": {"train.micro_batch": 3}, "peak_bytes": (64 << 20) - 99_999, "slower_percent": 0,
         "tight": True, "changes_learning": False},
        {"changes": {"train.gradient_checkpointing": True}, "peak_bytes": 20 << 20, "slower_percent": 30.0,
         "changes_arithmetic": True, "changes_learning": False},
    ]  # fmt: skip
    report = {"step": 1, "attempt": 1, "phase": "backward", "capacity_bytes": 64 << 20, "avoided_by": ways}
    for attempt in (1, 2):
        (run.oom / f"step-1-{attempt}.json").write_text(json.dumps({**report, "attempt": attempt}))
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.press("o")
        await pilot.sees(
            "step 1, attempt 1",
            "the latest error",
            "1  train.micro_batch = 3: a peak of 63.9 of 64.0 MiB, tight, same speed",
        )
        await pilot.sees("a peak of 20 of 64 MiB, about 30 % slower, changes arithmetic")
        assert pilot.text.count("train.micro_batch = 3") == 1
        await pilot.press("down", "down", "a")
        await pilot.sees("Settings  2 changed")
        screen: Any = pilot.screen
        assert screen.screen_name == "launch"
        assert screen.state.choice.overrides["train.gradient_checkpointing"] == "true"


async def test_what_was_wanted_is_seen_to_exceed_what_was_left(console: Opener, runs: Path) -> None:
    """Regression: wanted 1 MiB, allocated 63 MiB, capacity 64 MiB looked as if it fitted."""
    run = make_run(runs)
    run.oom.mkdir()
    figures = {"requested_bytes": 1344000, "allocated_bytes": 66508800, "capacity_bytes": 64 << 20}
    report = {"step": 1, "attempt": 1, "phase": "backward", "text": "no", **figures}
    (run.oom / "step-1.json").write_text(json.dumps(report))
    async with console(80, 36) as pilot:
        await open_run(pilot)
        await pilot.press("o")
        await pilot.sees("wanted       1.3 MiB", "allocated    63.4 MiB", "capacity     64.0 MiB")


async def test_without_a_backoff_there_is_no_report_to_open(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "finish").wait()
    async with console() as pilot:
        await open_run(pilot)
        await pilot.press("o")
        await pilot.sees("this run has had no out-of-memory errors")
