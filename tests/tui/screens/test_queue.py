"""The Queue screen: moving and removing runs, reasons of disabled keys, and a worker that continues when the screen is
closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.queue import Queue
from engine.journal.summary import summarise
from tests.tui.conftest import SIZES, Opener
from tests.tui.console_pilot import ConsolePilot
from tui.keys import of_screen

pytestmark = pytest.mark.asyncio

SPEC = 'name = "{name}"\n[profile]\nname = "demo"\n[recipe]\nname = "{name}"\n[recipe.model]\nid = "builtin:tiny"\n'


def queued(runs: Path, *names: str) -> list[str]:
    made = [create_run_directory(runs, name, SPEC.format(name=name), {}) for name in names]
    for run in made:
        Queue(runs).add(run)
    return [run.name for run in made]


async def open_queue(pilot: ConsolePilot) -> None:
    await pilot.press("4")
    await pilot.until(lambda: pilot.screen.screen_name == "queue")


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_what_waits_is_listed_in_order(console: Opener, runs: Path, size: tuple[int, int]) -> None:
    queued(runs, "first", "second")
    async with console(*size) as pilot:
        await open_queue(pilot)
        await pilot.sees("first", "second", "the queue is not started")
        assert pilot.text.index("first") < pilot.text.index("second")


async def test_runs_of_one_recipe_are_told_apart_by_what_was_changed(console: Opener, runs: Path) -> None:
    for seed in (3, 4):
        changed = SPEC.format(name="demo") + f'[provenance]\nset = ["train.seed={seed}"]\n'
        Queue(runs).add(create_run_directory(runs, "demo", changed, {}))
    async with console(80, 24) as pilot:
        await open_queue(pilot)
        await pilot.sees("seed=3", "seed=4")


async def test_runs_are_moved_by_keys_and_the_cursor_goes_along(console: Opener, runs: Path) -> None:
    a, b, c = queued(runs, "a", "b", "c")
    async with console() as pilot:
        await open_queue(pilot)
        await pilot.sees("queued   a", "queued   b", "queued   c")
        await pilot.press("J", "J")
        assert Queue(runs).read().waiting == [b, c, a]
        await pilot.press("J")
        await pilot.sees("it is already the last of the waiting runs")
        await pilot.press("K")
        assert Queue(runs).read().waiting == [b, a, c]


async def test_removing_takes_two_presses_and_keeps_the_folder_in_the_trash(console: Opener, runs: Path) -> None:
    a, b = queued(runs, "a", "b")
    async with console() as pilot:
        await open_queue(pilot)
        await pilot.sees("queued   a", "queued   b")
        await pilot.press("x")
        await pilot.sees("x again removes")
        assert Queue(runs).read().waiting == [a, b]
        await pilot.press("x")
        assert Queue(runs).read().waiting == [b]
        assert RunDirectory(runs / ".trash" / a).exists()


async def test_an_empty_queue_says_how_to_fill_it(console: Opener) -> None:
    async with console() as pilot:
        await open_queue(pilot)
        await pilot.sees("the queue is empty", "tunedeck queue add")
        for key in of_screen("queue"):
            assert pilot.screen.disabled_reason(key.action), key


async def test_a_damaged_list_is_said_and_the_console_stays(console: Opener, runs: Path) -> None:
    queued(runs, "a")
    (runs / ".queue" / "order.json").write_text("{", "utf-8")
    async with console() as pilot:
        await open_queue(pilot)
        await pilot.sees("cannot be read")


async def test_the_queue_is_worked_on_by_a_process_of_its_own(console: Opener, runs: Path) -> None:
    (name,) = queued(runs, "broken")
    async with console(120, 36) as pilot:
        await open_queue(pilot)
        await pilot.sees(name[17:])
        await pilot.press("s")
        # The spec above is none that an engine accepts: the queue worker notes it and goes on to the end.
        await pilot.until(lambda: "ended with" in Queue(runs).log.read_text("utf-8"))
        await pilot.sees("the queue is empty")
    assert summarise(RunDirectory(runs / name)).status != "queued"
