"""What the keys of the Run screen ask an engine for, and what becomes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.journal.summary import summarise
from tests.tui.conftest import Opener, Spawn
from tests.tui.recorded_runs import make_run
from tests.tui.screens.test_run import open_run

pytestmark = pytest.mark.asyncio


async def test_what_the_engine_writes_appears_while_it_is_watched(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console(120, 36) as pilot:
        await open_run(pilot)
        await pilot.sees("● running", "step ")
        before = pilot.screen.run_watch.step
        await pilot.until(lambda: pilot.screen.run_watch.step > before + 5, "more steps")


async def test_checkpoint_and_pause_are_asked_for_and_the_answer_is_shown(
    console: Opener, runs: Path, spawn: Spawn
) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console() as pilot:
        await open_run(pilot)
        await pilot.sees("● running")
        await pilot.press("w")
        await pilot.sees("checkpoint accepted")
        await pilot.press("p")
        await pilot.sees("‖ paused", "r resumes it")


async def test_only_a_yes_stops_a_run(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console() as pilot:
        await open_run(pilot)
        await pilot.sees("● running")
        await pilot.press("x")
        await pilot.sees("Stop this run after the current step", "y stop it")
        await pilot.press("n")
        await pilot.until(lambda: pilot.screen.screen_name == "run", "the question gone")
        assert not list(run.control.glob("*.json"))
        await pilot.press("x", "y")
        await pilot.sees("■ stopped")


async def test_a_second_stop_ends_an_engine_that_does_not_obey(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    child = spawn(run, "stubborn")
    async with console() as pilot:
        await open_run(pilot)
        await pilot.sees("● running")
        await pilot.press("x", "y")
        await pilot.sees("◐ stopping")
        await pilot.press("x")
        await pilot.until(lambda: child.poll() is not None, "the engine's end")
        await pilot.sees("■ stopped")
    assert summarise(run).reason == "stopped by force"


async def test_leaving_the_console_leaves_the_engine_alone(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    child = spawn(run, "obey")
    async with console() as pilot:
        await open_run(pilot)
        await pilot.sees("● running")
        await pilot.press("q")
    assert child.poll() is None
    assert not list(run.control.glob("*.json"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_request_that_cannot_be_written_says_so(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console() as pilot:
        await open_run(pilot)
        await pilot.sees("● running")
        run.control.chmod(0o500)
        await pilot.press("p")
        await pilot.sees("the request cannot be written")
        run.control.chmod(0o700)
