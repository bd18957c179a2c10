"""The Run screen: what it says of a run in every state and at every size, and what its keys ask for."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from engine.journal.control import pending
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.summary import summarise
from tests.journal.samples import backoff_fields, step_fields
from tests.tui.conftest import SIZES, Opener, Spawn
from tests.tui.console_pilot import Desk
from tests.tui.recorded_runs import add, make_run
from tui.screens.run import PANES

pytestmark = pytest.mark.asyncio


async def open_run(desk: Desk) -> None:
    """Open the run that the list's cursor is on."""
    await desk.until(lambda: desk.screen.where == "runs" and desk.screen.chosen, "a run in the list")
    await desk.press("enter")
    await desk.until(lambda: desk.screen.where == "run" and desk.screen.status, "the run")


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_state_and_progress_are_in_sight_at_every_size(
    console: Opener, runs: Path, width: int, height: int
) -> None:
    run = make_run(runs)
    async with console(width, height) as desk:
        await open_run(desk)
        await desk.sees(run.name[:20], "✓ done", "(simulated device)", "step 30 of 100  30 %", "result in model")


async def test_at_80x24_loss_and_figures_stand_over_one_pane_of_words(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(80, 24) as desk:
        await open_run(desk)
        await desk.sees("loss", "25 × 2, batch 64", "1 time, survived", "exact match    8.2 %")
        await desk.sees("redone with at most 25")
        await desk.press("tab")
        await desk.sees("peak planned", "129 MiB", "of 64 MiB, over", "peak measured", "58 MiB")
        assert "redone with" not in desk.text


async def test_at_120x36_every_pane_is_in_sight(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    run.log.write_text("a line of the log\n")
    async with console(120, 36) as desk:
        await open_run(desk)
        await desk.sees("tokens/s", "redone with at most 25", "activations", "120 MiB", "49 MiB", "a line of the log")
        await desk.press("tab")
        await desk.sees("every pane is in sight")


async def test_at_60x15_tab_goes_through_the_panes_one_at_a_time(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(60, 15) as desk:
        await open_run(desk)
        for pane in PANES["one"]:
            shown = [name for name in PANES["one"] if desk.screen.query_one(f"#{name}").region.area]
            assert shown == [pane]
            await desk.press("tab")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("paused", ["‖ paused", "r goes on with it"]),
        ("stopped", ["■ stopped", "r goes on from the last checkpoint"]),
        ("failed", ["✗ failed", "r tries again", "nothing to train on"]),
        ("oom", ["▲ oom", "o shows what used the memory"]),
        ("stale", ["? stale", "r goes on from the last checkpoint", "without recording how"]),
        ("queued", ["○ queued", "waits for its turn"]),
    ],
)
async def test_a_run_that_does_not_run_says_what_can_be_done(
    console: Opener, runs: Path, status: str, words: list[str]
) -> None:
    make_run(runs, status=status, error="nothing to train on" if status == "failed" else None)
    async with console() as desk:
        await open_run(desk)
        await desk.sees(*words)


async def test_a_key_that_can_do_nothing_says_why(console: Opener, runs: Path) -> None:
    make_run(runs, status="paused")
    async with console() as desk:
        await open_run(desk)
        await desk.press("p")
        await desk.sees("the run is paused: there is no engine to ask")


async def test_what_the_engine_writes_appears_while_it_is_watched(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console(120, 36) as desk:
        await open_run(desk)
        await desk.sees("● running", "step ")
        before = desk.screen.watch_of.step
        await desk.until(lambda: desk.screen.watch_of.step > before + 5, "more steps")


async def test_checkpoint_and_pause_are_asked_for_and_the_answer_is_shown(
    console: Opener, runs: Path, spawn: Spawn
) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console() as desk:
        await open_run(desk)
        await desk.sees("● running")
        await desk.press("c")
        await desk.sees("checkpoint accepted")
        await desk.press("p")
        await desk.sees("‖ paused", "r goes on with it")


async def test_only_a_yes_stops_a_run(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console() as desk:
        await open_run(desk)
        await desk.sees("● running")
        await desk.press("s")
        await desk.sees("Stop this run after the present step", "y stop it")
        await desk.press("n")
        await desk.until(lambda: desk.screen.where == "run", "the question gone")
        assert not pending(run)
        await desk.press("s", "y")
        await desk.sees("■ stopped")


async def test_a_second_stop_ends_an_engine_that_does_not_obey(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    child = spawn(run, "stubborn")
    async with console() as desk:
        await open_run(desk)
        await desk.sees("● running")
        await desk.press("s", "y")
        await desk.sees("◐ stopping")
        await desk.press("s")
        await desk.until(lambda: child.poll() is not None, "the engine's end")
        await desk.sees("■ stopped")
    assert summarise(run).reason == "stopped by force"


async def test_leaving_the_console_leaves_the_engine_alone(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    child = spawn(run, "obey")
    async with console() as desk:
        await open_run(desk)
        await desk.sees("● running")
        await desk.press("q")
    assert child.poll() is None
    assert not pending(run)


async def test_the_out_of_memory_screen_shows_sentences_and_reports(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    run.oom.mkdir()
    tensor = {"size_bytes": 66060288, "shape": [4, 5], "dtype": "float32", "name": "[red]layer 3[/red]"}
    report = {"step": 7, "attempt": 1, "phase": "backward", "device": "a device", "text": "no", "largest": [tensor]}
    (run.oom / "step-1.json").write_text(json.dumps(report))
    (run.oom / "step-2.json").write_text('{"held_by')
    (run.oom / "step-3.json").write_text('{"largest": [{}]}')
    async with console(80, 36) as desk:
        await open_run(desk)
        await desk.press("o")
        await desk.sees("step 1: out of memory in backward", "step 7, attempt 1")
        await desk.sees("63 MiB  4x5 float32  [red]layer 3[/red]")
        await desk.sees("cannot be read: it may have been cut off", "is no report as this version writes them")
        await desk.press("escape")
        assert desk.screen.where == "run"


async def test_without_a_backoff_there_is_no_report_to_open(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "finish").wait()
    async with console() as desk:
        await open_run(desk)
        await desk.press("o")
        await desk.sees("memory never ran out in this run")


async def test_loss_can_be_seen_on_a_log_axis_smoothed_and_closer(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console() as desk:
        await open_run(desk)
        await desk.sees("30")
        await desk.press("y", "m", "z")
        await desk.sees("loss last half, log, smoothed")


async def test_text_from_a_run_is_never_markup_and_never_moves_the_cursor(console: Opener, runs: Path) -> None:
    run = make_run(runs, model="[bold red]evil[/]")
    add(run, lambda writer: writer.write("warning", code="x", text="[link=file:///]click\x1b[2J\x1b[H[/link]", fix=""))
    run.log.write_text("[blink]log\x1b[2J\n")
    async with console(120, 36) as desk:
        await open_run(desk)
        await desk.sees("[link=file:///]click", "[/link]", "[blink]log")
        assert "\x1b" not in desk.text


async def test_a_run_folder_that_vanishes_leaves_the_console_up(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    async with console() as desk:
        await open_run(desk)
        shutil.rmtree(run.path)
        await desk.sees("the run's folder is gone", "step 30 of 100")
        await desk.press("escape")
        await desk.sees("no runs in")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_request_that_cannot_be_written_says_so(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console() as desk:
        await open_run(desk)
        await desk.sees("● running")
        run.control.chmod(0o500)
        await desk.press("p")
        await desk.sees("the request cannot be written")
        run.control.chmod(0o700)


async def test_a_flood_of_events_and_log_lines_leaves_the_keys_alive(console: Opener, runs: Path) -> None:
    run = make_run(runs, status="queued")
    async with console(120, 36) as desk:
        await open_run(desk)
        with EventWriter(run) as writer, run.log.open("w") as log:
            writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
            for step in range(1, 20_001):
                writer.write("step", **step_fields(step))
                log.write(f"line {step}\n")
                if step % 100 == 0:
                    writer.write("backoff", **backoff_fields(step))
        await desk.press("y")
        await desk.sees("log  ", "line 20000", "step 20,000")


async def test_a_storm_of_resizes_leaves_everything_in_its_place(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(120, 36) as desk:
        await open_run(desk)
        for width in (20, 200, 79, 80, 1, 120, 60):
            for height in (5, 50, 23, 24, 1, 36):
                await desk.pilot.resize_terminal(width, height)
        await desk.pilot.resize_terminal(120, 36)
        await desk.sees("✓ done", "tokens/s", "redone with at most 25", "activations")


async def test_a_clone_is_what_the_run_was_started_with(runs: Path) -> None:
    from tui.run.clone import recipe_of

    run = make_run(runs)
    assert recipe_of(run) == {"profile": "demo", "recipe": "demo", "overrides": ["train.max_steps=100"]}
    assert recipe_of(RunDirectory(runs / "nowhere")) == {"profile": "", "recipe": "", "overrides": []}
