"""What the keys of the Launch screen make of a choice: a run, a place in the queue, a file."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from engine.journal.index import list_runs
from engine.journal.queue import Queue
from engine.launch.create_run import create_run
from engine.launch.process import force_stop
from tests.tui.conftest import Opener
from tests.tui.screens.test_launch import DEMO, type_in
from tui.screens.launch import LaunchScreen

pytestmark = pytest.mark.asyncio


async def test_without_runs_the_demo_is_open_and_one_key_starts_it(
    console: Opener, runs: Path, empty_folder: Path
) -> None:
    async with console(120, 36) as pilot:
        await pilot.sees("s starts it as written, to show recovery from an out-of-memory error", "▶ Settings")
        await pilot.press("s")
        await pilot.until(lambda: not isinstance(pilot.screen, LaunchScreen), "the run's screen")
        (directory,) = list_runs(runs)
        force_stop(directory)
    assert directory.name.endswith("-demo")


async def test_start_makes_the_run_starts_an_engine_and_opens_its_screen(console: Opener, runs: Path) -> None:
    async with console(**DEMO) as pilot:
        await type_in(pilot, "train.max_steps", "25")
        await pilot.press("s")
        await pilot.until(lambda: not isinstance(pilot.screen, LaunchScreen), "the run's screen")
        (directory,) = list_runs(runs)
        spec = directory.run_toml.read_text()
        force_stop(directory)
    assert "max_steps = 25" in spec and 'set = ["train.max_steps=25"]' in spec


async def test_launch_opens_with_the_settings_of_the_command_line(console: Opener, empty_folder: Path) -> None:
    async with console(120, 36, overrides=("train.max_steps=25", "train.nonsense=1"), **DEMO) as pilot:
        await pilot.sees("2 changed", "max steps", "25", "✗ cannot start: train.nonsense: unknown key")
    async with console(120, 36, overrides=("train.max_steps=25",)) as pilot:
        await pilot.sees("1 changed", "was 300")
        assert pilot.screen.state.choice.overrides == {"train.max_steps": "25"}


async def test_a_run_that_is_being_created_stops_neither_screen_nor_order(
    console: Opener, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_ready = Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        disk_is_ready.wait(120)
        return create_run(*arguments, **options)

    monkeypatch.setattr("tui.launch.make_run.create_run", slow)
    async with console(120, 36, **DEMO) as pilot:
        await pilot.press("s")
        await pilot.sees("creating the run")
        await type_in(pilot, "train.max_steps", "25")
        assert pilot.screen.state.choice.overrides == {"train.max_steps": "25"}
        await pilot.press("s")
        await pilot.sees("a run is being created")
        await pilot.press("q")
        await pilot.sees("the console closes when the run has started")
        disk_is_ready.set()
        await pilot.until(lambda: not pilot.app.is_running, "the end of the console")
    (directory,) = list_runs(runs)
    force_stop(directory)
    assert directory.log.exists() and "max_steps = 25" not in directory.run_toml.read_text()


async def test_a_model_that_cannot_be_fetched_leaves_no_run(console: Opener, runs: Path) -> None:
    async with console(120, 36, **DEMO) as pilot:
        pilot.screen.state.set_field("model.tokenizer", "owner/words")
        await pilot.press("s")
        await pilot.sees("tokenizer owner/words is not in this machine's hub cache", "unset", "or hf download")
        await pilot.press("u")
        assert isinstance(pilot.screen, LaunchScreen)
    assert list_runs(runs) == []


async def test_a_run_can_be_queued_instead(console: Opener, runs: Path) -> None:
    async with console(120, 36, **DEMO) as pilot:
        await pilot.press("Q")
        await pilot.sees("is number 1 in the queue")
    (directory,) = list_runs(runs)
    assert Queue(runs).read().waiting == [directory.name]
    assert json.loads((directory.path / "plan.json").read_text())["verdict"] == "fits_smaller"


async def test_saving_asks_for_a_name_and_esc_takes_the_question_back(
    console: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with console(**DEMO) as pilot:
        await pilot.press("w")
        await pilot.sees("no changes to save")
        await pilot.press("a", "w")
        await pilot.sees("save as a new recipe, named: demo-2")
        await pilot.press("escape")
        assert not (tmp_path / "profiles").exists()
        await pilot.press("w", "enter")
        await pilot.sees("saved", "demo-2")
    assert 'micro_batch = "auto"' in (tmp_path / "profiles" / "recipes" / "demo-2.toml").read_text()
