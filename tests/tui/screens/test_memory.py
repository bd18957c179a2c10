"""The Memory screen, opened with one key from Launch and from a run, and the bars of a run that is running."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from tests.tui.conftest import Opener, Spawn
from tests.tui.recorded_runs import make_run
from tests.tui.screens.test_run import open_run


@pytest.mark.asyncio
async def test_launch_shows_where_the_peak_lies_and_one_key_the_phases(console: Opener) -> None:
    async with console(120, 36, profile="demo", recipe="demo") as pilot:
        await pilot.sees("the peak is in the backward pass", "to lower activations", "64 MiB simulated")
        await pilot.press("f")
        await pilot.sees("Memory by phase", "as written: 64 sequences of", "it fits with micro-batch")
        await pilot.sees("forward pass: each layer keeps", "optimizer step", "the peak")
        await pilot.press("escape")
        await pilot.sees("Settings")


@pytest.mark.asyncio
async def test_a_run_without_phases_says_so(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(80, 24) as pilot:
        await open_run(pilot)
        await pilot.press("f")
        await pilot.sees("no prediction by phase for this run")


@pytest.mark.asyncio
async def test_the_prediction_stands_above_what_a_running_engine_measures(
    console: Opener, runs: Path, spawn: Spawn
) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.sees("● running", "as written", "measured", "between steps", "more at the peak")
        assert "at the end" not in pilot.text


@pytest.mark.parametrize("text", ["", "[]", '{"phases": 3}', '{"phases": {"load": {}}}'])
def test_a_plan_in_another_format_has_no_phases(tmp_path: Path, text: str) -> None:
    from tui.run.memory import read_planned_memory

    (tmp_path / "plan.json").write_text(text)
    assert read_planned_memory(RunDirectory(tmp_path), "") is None
