"""What the footer and the title say beside the keys: messages that end when they are no longer so, and screens named
at 80 columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.conftest import Opener, Spawn
from tests.tui.recorded_runs import make_run
from tui.launch.evaluate import FieldProblem
from tui.launch.fixes import fix_lines
from tui.widgets.title_and_footer import FooterBar

DEMO = {"profile": "demo", "recipe": "demo"}


@pytest.mark.asyncio
async def test_a_message_leaves_the_keys_and_ends_when_it_is_no_longer_so(console: Opener, runs: Path) -> None:
    """Regression: at 80 columns a message hid all keys for eight seconds."""
    make_run(runs)
    async with console(80, 24) as pilot:
        await pilot.sees("✓ done", "enter open")
        said = ["so"]
        text = "a sentence that fills the footer so far that no key has room beside it"
        pilot.screen.query_one(FooterBar).show_message(text, holds=lambda: bool(said))
        await pilot.sees(text, "enter open", "q quit")
        pilot.screen.refresh_title_and_footer()
        await pilot.sees(text)
        said.clear()
        pilot.screen.refresh_title_and_footer()
        await pilot.until(lambda: text not in pilot.text, "no message")


@pytest.mark.asyncio
async def test_a_message_is_not_there_when_its_screen_is_opened_again(console: Opener) -> None:
    async with console(80, 24) as pilot:
        await pilot.press("4")
        await pilot.until(lambda: pilot.screen.screen_name == "queue")
        pilot.screen.show_message("said on this screen")
        await pilot.sees("said on this screen")
        await pilot.press("1", "4")
        await pilot.until(lambda: pilot.screen.screen_name == "queue")
        await pilot.sees("Q on Launch (2) adds a run", "s start")
        assert "said on this screen" not in pilot.text


@pytest.mark.asyncio
async def test_a_pause_is_said_to_be_asked_for_only_until_it_is_there(
    console: Opener, runs: Path, spawn: Spawn
) -> None:
    """Regression: "pause requested" was still shown next to "paused"."""
    run = make_run(runs, status="queued")
    spawn(run, "obey")
    async with console(80, 24) as pilot:
        await pilot.sees("● running")
        await pilot.press("enter")
        await pilot.until(lambda: pilot.screen.screen_name == "run" and pilot.screen.status == "running")
        await pilot.press("p")
        await pilot.sees("r resumes")
        await pilot.until(lambda: "pause requested" not in pilot.text, "no message about the pause")


@pytest.mark.asyncio
async def test_screens_have_names_at_80_columns(console: Opener, runs: Path) -> None:
    """Regression: digits alone stood in the titles of Run, Queue, Compare and Chat."""
    make_run(runs)
    async with console(80, 24) as pilot:
        await pilot.sees("✓ done", "1 Runs  2 Launch")
        await pilot.press("enter")
        await pilot.sees("1 Runs 2 Laun 3 Libr 4 Queu 5 Comp 6 Doct 7 Chat")


@pytest.mark.asyncio
async def test_without_a_run_n_opens_launch(console: Opener) -> None:
    async with console(80, 24, **DEMO) as pilot:
        await pilot.press("1")
        await pilot.sees("no runs in", "n new run")
        await pilot.press("n")
        await pilot.sees("Settings", "too big; fits with micro-batch 17")


@pytest.mark.asyncio
async def test_esc_takes_back_a_value_that_is_refused_before_it_leaves(console: Opener) -> None:
    async with console(80, 24, **DEMO) as pilot:
        await pilot.sees("too big; fits with micro-batch 17", "192.2 of 64.0 MiB", "128.2 MiB missing")
        await pilot.press("g", *["j"] * 6, "enter", *["end", "1", "2", "3", "4"], "enter")
        await pilot.sees("cannot start", "no plan for these settings; this one is for micro-batch")
        await pilot.press("escape")
        await pilot.sees(
            "micro-batch    64 ", "train.micro_batch has the value of its file again", "too big; fits with"
        )
        await pilot.press("u")
        await pilot.sees("641234", "undone")
        await pilot.press("escape", "escape")
        await pilot.until(lambda: pilot.screen.screen_name == "runs")


@pytest.mark.asyncio
async def test_numbers_of_fixes_are_muted_and_ascii_has_a_letter_for_each_state(console: Opener, runs: Path) -> None:
    """Regression: the numbers before fixes looked like the digits that open screens."""
    make_run(runs, status="oom")
    async with console(80, 24, ascii=True, **DEMO) as pilot:
        await pilot.sees("1 train.micro_batch = auto", "~ too big; fits with micro-batch 17")
        (first,) = [line for line, _ in fix_lines(pilot.screen.state.advice(), 78) if line.plain.startswith("1 ")]
        assert (first.spans[0].start, first.spans[0].end, first.spans[0].style) == (0, 2, "$muted")
        await pilot.press("1")
        await pilot.sees("O oom")
        assert pilot.text.isascii()


def test_a_form_names_the_key_and_no_option_of_the_command_line() -> None:
    problem = FieldProblem("model.id", "no such folder; add --set model.id=FOLDER")
    assert problem.sentence == "model.id: no such folder; set model.id=FOLDER"
