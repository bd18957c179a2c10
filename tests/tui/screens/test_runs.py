"""The Runs screen: every state, filters, many runs, and its keys."""

from __future__ import annotations

import os
import shutil
import signal
import time
from math import inf
from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from engine.journal.index import list_runs
from engine.journal.labels import Labels, read_labels
from engine.journal.liveness import engine_process
from engine.journal.summary import summarise
from tests.cli.small_recipes import make_run as make_real_run
from tests.cli.small_recipes import write_recipe
from tests.tui.conftest import SIZES, Opener, Spawn
from tests.tui.console_pilot import ConsolePilot
from tests.tui.recorded_runs import add, make_run
from tests.tui.recorded_stages import make_staged_run
from tests.tui.run.test_tree import make_sweep
from tui.run import listing
from tui.run.listing import RunList
from tui.widgets.row_list import RowList

pytestmark = pytest.mark.asyncio

STATES = ("queued", "paused", "done", "stopped", "failed", "oom", "stale")


async def listed(pilot: ConsolePilot, count: int) -> None:
    await pilot.until(lambda: len(pilot.screen.shown) == count and not pilot.screen.runs.unread, f"{count} runs")
    await pilot.textual_pilot.pause()


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_every_state_has_its_word_and_glyph(
    console: Opener, runs: Path, spawn: Spawn, width: int, height: int
) -> None:
    for status in STATES:
        make_run(runs, status, status=status)
    spawn(make_run(runs, "running", status="queued"), "obey")
    async with console(width, height) as pilot:
        await pilot.sees("● running", "○ queued", "‖ paused", "✓ done", "■ stopped", "✗ failed", "▲ oom", "? stale")


async def test_in_ascii_nothing_else_is_drawn(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(120, 36, ascii=True) as pilot:
        await pilot.sees("D done")
        await pilot.press("enter")
        await pilot.sees("<=25 x 2, batch 64")
        assert pilot.text.isascii()


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("state:done", {"small", "big"}),
        ("state:done model:qwen", {"big"}),
        ("sma", {"small"}),
        ("state:paused big", set()),
    ],
)
async def test_a_filter_lets_through_what_holds_every_word(
    console: Opener, runs: Path, typed: str, names: set[str]
) -> None:
    make_run(runs, "small")
    make_run(runs, "big", model="Qwen/Qwen2.5-7B")
    make_run(runs, "later", status="paused")
    async with console() as pilot:
        await listed(pilot, 3)
        await pilot.press("slash", *("space" if letter == " " else letter for letter in typed), "enter")
        assert {entry.summary.name for entry in pilot.screen.shown} == names
        await pilot.press("escape")
        assert len(pilot.screen.shown) == 3


async def test_the_arrows_move_in_a_filtered_list(console: Opener, runs: Path) -> None:
    make_run(runs, "small")
    make_run(runs, "smaller")
    async with console() as pilot:
        await listed(pilot, 2)
        await pilot.press("slash", *"small", "enter", "home", "down")
        assert pilot.screen.query_one(RowList).cursor == 1


async def test_a_run_started_elsewhere_appears_and_a_removed_one_goes(console: Opener, runs: Path) -> None:
    first = make_run(runs, "first")
    async with console() as pilot:
        await pilot.sees("first")
        make_run(runs, "second")
        await pilot.sees("second")
        shutil.rmtree(first.path)
        await pilot.until(lambda: "first" not in pilot.text, "the first run gone")


async def test_the_cursor_stays_on_its_run_when_others_come(console: Opener, runs: Path) -> None:
    old = RunDirectory(make_run(runs, "old").path.rename(runs / "20200101T000000Z-old"))
    async with console() as pilot:
        await pilot.sees("✓ done     old ")
        make_run(runs, "new")
        await pilot.sees("✓ done     new ")
        assert pilot.screen.chosen.directory.path == old.path


async def test_delete_asks_and_moves_the_run_into_the_trash(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    async with console() as pilot:
        await listed(pilot, 1)
        await pilot.press("x")
        await pilot.sees("Delete", "y delete it")
        await pilot.press("n")
        assert run.path.is_dir()
        await pilot.press("x", "y")
        await pilot.sees("moved to")
    assert not run.path.exists()
    assert (runs / ".trash" / run.name).is_dir()


async def test_u_moves_a_deleted_run_back(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    async with console() as pilot:
        await listed(pilot, 1)
        await pilot.press("x", "y")
        await listed(pilot, 0)
        await pilot.press("u")
        await pilot.sees("moved back: ", run.name)
        await pilot.press("u")
        await pilot.sees("the trash is empty")
    assert run.path.is_dir()


async def test_rows_are_sorted_and_columns_chosen(console: Opener, runs: Path) -> None:
    for name, steps in (("short", 3), ("long", 30), ("middle", 9)):
        make_run(runs, name, steps=steps)
    async with console() as pilot:
        await listed(pilot, 3)
        await pilot.sees("age", "eval", "time", "0.25")
        await pilot.press("greater_than_sign")
        await pilot.press("greater_than_sign")
        await pilot.sees("by step", "step ↑")
        assert [row.summary.step for row in pilot.screen.shown] == [3, 9, 30]
        await pilot.press("less_than_sign")
        assert [row.summary.step for row in pilot.screen.shown] == [30, 9, 3]
        await pilot.sees("step ↓")
        await pilot.press("C", "ctrl+u", *"wrong", "enter")
        await pilot.sees("there is no column wrong; available: age, step")
        await pilot.press("C", "ctrl+u", *"time changed", "enter")
        await pilot.sees("max_steps=100")
        assert pilot.screen.query_one(".heading").text.split() == ["state", "run", "time", "changed"]
        await pilot.press("C")
        await pilot.sees("available: age step loss curve eval", "empty: the default columns")
        await pilot.press("ctrl+u", "enter")
        await pilot.sees("age", "eval", "time", "0.25")


async def test_a_long_name_is_cut_in_its_middle_and_the_details_have_it_whole(console: Opener, runs: Path) -> None:
    for name in ("qwen2.5-7b-lora-summaries-first-try", "qwen2.5-7b-lora-summaries-second-try"):
        make_run(runs, name)
    async with console() as pilot:
        await listed(pilot, 2)
        await pilot.sees("s-second-try", "s-first-try", " now ")
        await pilot.sees(f" {pilot.screen.chosen.directory.name} ")
        await pilot.textual_pilot.resize_terminal(120, 36)
        await pilot.sees("curve", "█▅▄▃▃▂▂▂▁▁")


async def test_why_a_run_ended_is_told_to_its_end(console: Opener, runs: Path) -> None:
    """Regression: at 80 columns the error ended before its fix, though the list above it was empty."""
    error = "out of memory in the forward pass with 64 sequences, and no remedy is left (63.4 of 64.0 MiB held)"
    make_run(runs, status="failed", error=f"{error}\n  fix: train.activation_offload = true (a peak of 32.7 MiB)")
    async with console() as pilot:
        await listed(pilot, 1)
        await pilot.until(lambda: f"{error}; fix: train.activation_offload = true (a peak of" in flat(pilot.text), "it")


def flat(text: str) -> str:
    return " ".join(text.split())


async def test_tags_and_a_note_are_typed_stored_and_filtered_by(console: Opener, runs: Path) -> None:
    run = make_run(runs, "one")
    make_run(runs, "two")
    async with console() as pilot:
        await listed(pilot, 2)
        await pilot.press("j", "t", *"keep; rank 8", "enter")
        await pilot.sees("#keep", "rank 8")
        assert read_labels(run) == Labels(("keep",), "rank 8")
        await pilot.press("slash", *"tag:keep", "enter")
        await pilot.until(lambda: [row.name for row in pilot.screen.shown] == ["one"], "the tagged run")
        await pilot.press("t", "ctrl+u", "enter")
        assert read_labels(run) == Labels()
        await pilot.press("escape", "Y")
        assert pilot.app.clipboard.startswith(str(runs))


async def test_a_run_is_merged_in_a_process_of_its_own(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    async with console(120, 36) as pilot:
        await listed(pilot, 1)
        await pilot.press("W")
        await pilot.sees("the run has no adapter to merge")
        run.adapter.mkdir()
        await pilot.press("W")
        await pilot.sees("tunedeck merge ended with exit code")
        assert (run.path / "merge.log").read_text()


async def test_a_result_is_sent_to_the_repository_that_was_typed(
    console: Opener, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = make_run(runs)
    async with console(120, 36) as pilot:
        await listed(pilot, 1)
        await pilot.press("U")
        await pilot.sees("no result to push")
        run.adapter.mkdir()
        await pilot.press("U")
        await pilot.sees("push to the hub as OWNER/NAME", "enter send  esc discard")
        assert "r resume" not in pilot.text, "letters are no keys while text is typed"
        await pilot.press("enter")
        assert not (run.path / "push.log").exists(), "nothing was typed"
        await pilot.press("U", *"me/mine", "enter")
        await pilot.sees("tunedeck push ended with exit code")
        assert (run.path / "push.log").read_text()


async def test_the_time_of_a_run_includes_that_before_it_was_resumed(runs: Path) -> None:
    run = make_run(runs, status="paused")
    add(run, lambda writer: writer.write("run_finished", status="paused", exit_code=130, result=None, seconds=100.0))
    add(run, lambda writer: writer.write("run_started", run=run.name, pid=1, world_size=1, versions={}))
    add(run, lambda writer: writer.write("run_finished", status="done", exit_code=0, result="model", seconds=20.0))
    summary = summarise(run)
    assert (summary.seconds, summary.total_seconds) == (20.0, 120.0)


async def test_a_running_run_can_be_neither_deleted_nor_resumed(console: Opener, runs: Path, spawn: Spawn) -> None:
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console() as pilot:
        await pilot.sees("● running")
        await pilot.press("x")
        await pilot.sees("the run is running; stop it first")
        await pilot.press("r")
        await pilot.sees("the run is already running")


async def test_a_spec_that_no_engine_takes_is_refused_with_its_faults(console: Opener, runs: Path) -> None:
    make_run(runs, status="paused")
    async with console(120, 36) as pilot:
        await listed(pilot, 1)
        await pilot.press("r")
        await pilot.sees("memory_gib: missing")
        assert pilot.screen.screen_name == "runs"


async def test_an_engine_that_is_killed_after_resume_is_told_of(console: Opener, runs: Path, tmp_path: Path) -> None:
    run = make_real_run(tmp_path, write_recipe(tmp_path))
    started = {"run": run.name, "pid": 1, "world_size": 1, "versions": {}}
    add(run, lambda writer: writer.write("run_started", **started))
    add(run, lambda writer: writer.write("run_finished", status="paused", exit_code=130, result=None))
    async with console(120, 36) as pilot:
        await listed(pilot, 1)
        await pilot.press("r")
        await pilot.until(lambda: pilot.screen.screen_name == "run", "the run")
        engine = engine_process(run)
        assert engine is not None
        os.kill(engine.pid, signal.SIGKILL)
        await pilot.sees("the engine was killed (SIGKILL")


async def test_a_run_that_cannot_be_read_says_so_and_the_others_are_there(console: Opener, runs: Path) -> None:
    make_run(runs, "good")
    bad = make_run(runs, "bad")
    bad.events.write_text('{"kind":"step","step":"x"}\n{"kind":"eval"}\n{"kind":"resumed"}\n')
    async with console() as pilot:
        await pilot.sees("✓ done     good", "✗ damaged  bad")


async def test_a_thousand_runs_are_listed_at_once_and_read_bit_by_bit(runs: Path) -> None:
    model = make_run(runs)
    for number in range(1000):
        place = runs / f"20200101T{number:06d}Z-copy"
        place.mkdir()
        (place / "run.toml").write_bytes(model.run_toml.read_bytes())
        (place / "events.jsonl").write_bytes(model.events.read_bytes())
    found = RunList.of_folder(runs)
    found.refresh(seconds=0.0)
    assert len(found.entries) == 1001
    assert found.unread >= 999
    deadline = time.monotonic() + 60
    while found.unread and time.monotonic() < deadline:
        found.refresh(seconds=0.05)
    assert {entry.summary.status for entry in found.entries if entry.summary} == {"done"}


async def test_the_folder_is_not_listed_again_for_each_run_that_is_read(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "RELIST_SECONDS", inf)
    for name in ("one", "two", "three"):
        make_run(runs, name)
    asked: list[Path] = []

    def find() -> list[RunDirectory]:
        asked.append(runs)
        return list_runs(runs)

    found = RunList(find)
    for left in (2, 1, 0):
        found.refresh(seconds=0.0)
        assert (found.unread, len(asked)) == (left, 1)
    found.refresh(seconds=0.0)
    assert len(asked) == 2


async def test_of_a_long_list_only_rows_that_are_seen_are_drawn(console: Opener, runs: Path) -> None:
    """Regression: with 500 runs each reading of the folder drew 500 rows, which took a second of each opening."""
    model = make_run(runs)
    for number in range(99):
        (runs / f"20200101T{number:06d}Z-copy").mkdir()
        (runs / f"20200101T{number:06d}Z-copy" / "run.toml").write_bytes(model.run_toml.read_bytes())
    async with console(80, 24) as pilot:
        await pilot.sees("Runs  100")
        rows = pilot.screen.query_one(RowList)
        assert len(rows._lines) == 100 and len(rows._lines._made) <= 24
        await pilot.press("G")
        await pilot.sees("↑")
        assert "copy" in rows._lines[-1].plain


async def test_a_run_of_many_steps_keeps_no_other_waiting(runs: Path) -> None:
    for number in range(3):
        make_run(runs, f"short-{number}").path.rename(runs / f"20200101T00000{number}Z-short")
    long = make_run(runs, "long", steps=2000)
    found = RunList.of_folder(runs)
    for _ in range(4):
        found.refresh(seconds=0.0)
    assert [entry.is_read for entry in found.entries] == [False, True, True, True]
    deadline = time.monotonic() + 60
    while found.unread and time.monotonic() < deadline:
        found.refresh(seconds=0.0)
    assert found.entries[0].summary == summarise(long)


async def test_a_run_that_has_ended_is_not_read_again(runs: Path) -> None:
    make_run(runs)
    found = RunList.of_folder(runs)
    found.refresh(seconds=1.0)
    assert not found.refresh(seconds=1.0)
    before = found.entries[0].summary
    found.refresh(seconds=1.0)
    assert found.entries[0].summary is before


async def test_names_with_markup_and_escape_codes_are_shown_as_they_are(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    run.path.rename(runs / "[bold red]x[bold]\x1b[2J")
    async with console() as pilot:
        await pilot.sees("[bold red]x[bold]")
        assert "\x1b" not in pilot.text


async def test_l_opens_a_staged_run_and_h_closes_it(console: Opener, runs: Path) -> None:
    run = make_staged_run(runs, done=2)
    async with console(80, 24) as pilot:
        await listed(pilot, 1)
        await pilot.press("h")
        await pilot.sees("nothing to collapse")
        await pilot.press("l")
        await pilot.sees("└ expert-truthfulqa", "└ mixture", "· pending  └ full")
        await pilot.press("G", "enter")
        await pilot.sees("stage full has not started")
        await pilot.press("g", "j", "j", "x")
        await pilot.sees("a stage is deleted with its run")
        await pilot.press("h")
        assert len(pilot.screen.shown) == 1 and pilot.screen.chosen.directory == run
        await pilot.press("l", "j", "enter")
        await pilot.until(lambda: pilot.screen.screen_name == "run", "the stage's own screen")
        assert pilot.screen.directory.name == "01-expert-truthfulqa"


async def test_a_sweep_opens_and_its_runs_are_compared(console: Opener, runs: Path) -> None:
    make_sweep(runs, "done", "done", "queued")
    async with console(120, 36) as pilot:
        await listed(pilot, 1)
        await pilot.sees("○ queued", "▶ sweep:20261123T020000Z-demo")
        await pilot.press("r")
        await pilot.sees("a sweep has several runs; l expands it, c compares them")
        await pilot.press("enter")
        await pilot.sees("└ ", "demo-seed=0", "demo-seed=2")
        await pilot.press("g", "c")
        await pilot.until(lambda: pilot.screen.screen_name == "compare", "the comparison")
