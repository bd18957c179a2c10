"""The console as a whole: its imports, flags, key table, navigation, themes and ASCII mode."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console as RichConsole
from textual.strip import Strip

from tests.tui.conftest import SIZES, Opener
from tests.tui.console_pilot import ConsolePilot
from tests.tui.recorded_runs import make_run
from tui import keys
from tui.arguments import Flags, parse, theme_name, without_flags
from tui.screens.doctor import DoctorScreen
from tui.screens.table import SCREENS
from tui.theme import STATES, THEMES
from tui.widgets.row_list import RowList

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN_KEYS = {"ctrl+a", "ctrl+b", "ctrl+s"}

OPEN_ALL = """
import asyncio, sys
sys.argv = ["tunedeck"]
from tui.app import TunedeckApp
from tui.arguments import Flags
from tui.screens.table import SCREENS
async def main():
    app = TunedeckApp(Flags(runs=sys.argv[0] + "-nowhere"))
    async with app.run_test(size=(80, 24)) as pilot:
        for row in SCREENS:
            if row.key:
                await pilot.press(row.key)
        await pilot.pause()
asyncio.run(main())
heavy = ("torch", "transformers", "peft", "datasets", "numpy", "typer")
print("LOADED", [name for name in heavy if name in sys.modules])
"""


def test_every_screen_opens_without_torch_or_typer_in_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPEN_ALL], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["LOADED []"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ([], Flags()),
        (["--ascii", "--runs", "there"], Flags(runs="there", ascii=True)),
        (["--runs=there", "--theme", "light"], Flags(runs="there", theme="light")),
        (["-p", "demo", "-r", "demo"], Flags(profile="demo", recipe="demo")),
        (["--set", "a.b=1", "--set=a.c=d=e"], Flags(overrides=("a.b=1", "a.c=d=e"))),
        (["--set"], None),
        (["runs"], None),
        (["--runs", "there", "runs"], None),
        (["--runs"], None),
        (["--help"], None),
    ],
)
def test_the_console_is_meant_where_only_its_own_flags_are_given(arguments: list[str], flags: Flags | None) -> None:
    assert parse(arguments) == flags


def test_help_behind_flags_of_the_console_is_the_help() -> None:
    assert without_flags(["-p", "demo", "--help"]) == ["--help"]
    assert without_flags(["--ascii", "--version"]) == ["--version"]
    for kept in (["--help"], ["train", "--help"], ["-p", "--help"], ["-p", "demo"], []):
        assert without_flags(kept) == kept


@pytest.mark.parametrize(
    ("terminal", "theme"),
    [
        ({"TERM": "xterm-256color"}, "dark"),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, "dark"),
        ({"TERM": "tmux-256color", "TMUX": "/tmp/a,1,0"}, "dark"),
        ({"TERM": "screen", "TMUX": "/tmp/a,1,0"}, "ansi"),
        ({"TERM": "xterm"}, "ansi"),
    ],
)
def test_where_sixteen_colours_are_drawn_the_theme_is_of_sixteen(terminal: dict[str, str], theme: str) -> None:
    """In more colours, parts of the memory bar would look alike where they are drawn in sixteen."""
    assert theme_name(Flags(), terminal) == theme
    drawn = RichConsole(force_terminal=True, _environ=terminal).color_system
    assert (drawn == "standard") == (theme == "ansi")


def test_without_a_terminal_its_flags_are_answered_with_the_way_out() -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tunedeck.py"), "--ascii"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tunedeck: the console needs a terminal")


def test_no_key_is_one_that_tmux_screen_or_the_terminal_keeps_for_itself() -> None:
    used = {key for row in keys.KEYS for key in row.keys.split(",")}
    assert not used & FORBIDDEN_KEYS


def test_no_key_means_two_things_on_one_screen() -> None:
    everywhere = [*keys.of_screen(keys.EVERYWHERE)]
    for where in {row.screen for row in keys.KEYS} - {keys.EVERYWHERE}:
        used = [key for row in [*keys.of_screen(where), *everywhere] for key in row.keys.split(",")]
        used += [row.key for row in SCREENS if row.key]
        assert len(used) == len(set(used)), where


def test_every_key_of_a_screen_does_something() -> None:
    for screen in SCREENS:
        made = getattr(import_module(screen.module), screen.class_name)
        missing = [row.action for row in keys.of_screen(screen.name) if not hasattr(made, f"do_{row.action}")]
        assert not missing, screen.name


def test_states_can_be_told_apart_without_colour_and_in_ascii() -> None:
    assert len({state.glyph for state in STATES.values()}) == len(STATES)
    assert all(state.letter.isascii() for state in STATES.values())


@pytest.mark.asyncio
@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_an_empty_folder_says_so(console: Opener, width: int, height: int) -> None:
    async with console(width, height) as pilot:
        await pilot.press("1")
        await pilot.sees("no runs in", "? help", "q quit")


@pytest.mark.asyncio
@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_help_shows_the_keys_of_the_screen_it_was_asked_on_first(
    console: Opener, width: int, height: int
) -> None:
    async with console(width, height) as pilot:
        await pilot.press("4", "question_mark")
        await pilot.until(lambda: pilot.screen.screen_name == "help", "help")
        lines = [line.strip() for line in pilot.text.splitlines()]
        assert lines[1] == "Queue"
        await pilot.sees("start no more runs")
        await pilot.press("escape")
        assert pilot.screen.screen_name == "queue"


@pytest.mark.asyncio
@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_doctor_tells_what_a_process_of_its_own_found(console: Opener, width: int, height: int) -> None:
    async with console(width, height) as pilot:
        await pilot.press("6")
        await pilot.sees("python", "torch", "ok")
        await pilot.press("R")
        await pilot.until(lambda: re.search(r"checking this machine.*: \d+ s", " ".join(pilot.text.split())), "seconds")


@pytest.mark.asyncio
async def test_a_digit_comes_back_to_a_screen_as_it_was_left(console: Opener) -> None:
    async with console() as pilot:
        await pilot.press("1", "slash", "a", "b", "enter")
        first = pilot.screen
        await pilot.press("4", "1")
        assert pilot.screen is first
        await pilot.sees("no run matches ab")


@pytest.mark.asyncio
async def test_escape_goes_back_screen_by_screen_to_the_list_of_runs(console: Opener) -> None:
    async with console() as pilot:
        await pilot.press("2", "3", "question_mark")
        seen = [pilot.screen.screen_name]
        for _ in range(3):
            await pilot.press("escape")
            seen.append(pilot.screen.screen_name)
        assert seen == ["help", "library", "launch", "runs"]
        await pilot.press("escape")
        await pilot.sees("this is the first screen")


@pytest.mark.asyncio
async def test_escape_goes_back_to_the_run_from_which_a_screen_was_opened(console: Opener, runs: Path) -> None:
    run = make_run(runs)
    async with console() as pilot:
        await pilot.press("enter", "n", "4")
        seen = [pilot.screen.screen_name]
        for _ in range(4):
            await pilot.press("escape")
            seen.append(pilot.screen.screen_name)
        assert seen == ["queue", "launch", "run", "runs", "runs"]
        await pilot.press("enter", "n")
        shutil.rmtree(run.path)
        await pilot.press("escape")
        assert pilot.screen.screen_name == "runs"


@pytest.mark.asyncio
async def test_with_ascii_no_screen_draws_anything_else(console: Opener, runs: Path) -> None:
    make_run(runs)
    async with console(80, 24, ascii=True) as pilot:
        await pilot.sees("D done")
        for keys in (("enter",), ("o",), ("escape", "escape", "2"), ("3",), ("enter",), ("escape", "4"), ("5",),
                     ("colon",), ("escape", "question_mark")):  # fmt: skip
            await pilot.press(*keys)
            assert pilot.text.isascii(), pilot.text


@pytest.mark.asyncio
async def test_the_palette_offers_the_keys_of_the_screen_by_name(console: Opener) -> None:
    async with console() as pilot:
        await pilot.press("1", "colon", *"delete")
        await pilot.sees("delete (x)", "asks for confirmation")
        await pilot.press("escape")


@pytest.mark.asyncio
async def test_themes_go_round_and_ctrl_c_names_the_way_out(console: Opener) -> None:
    async with console() as pilot:
        seen = []
        for _ in THEMES:
            await pilot.press("T")
            seen.append(pilot.app.theme)
        assert sorted(seen) == sorted(theme.name for theme in THEMES)
        await pilot.press("ctrl+c")
        await pilot.sees("q leaves the console; training continues")


@pytest.mark.asyncio
async def test_keys_screens_and_tabs_are_clickable_and_a_click_on_a_row_only_selects(
    console: Opener, runs: Path
) -> None:
    older = make_run(runs, "older")
    make_run(runs, "newer")
    async with console(120, 36) as pilot:
        await pilot.sees("older", "newer")
        row = "older "
        await pilot.click(row)
        await pilot.click(row)
        assert pilot.screen.screen_name == "runs" and pilot.screen.chosen.directory.name == older.name
        await pilot.click(row, times=2)
        await pilot.until(lambda: pilot.screen.screen_name == "run", "the Run screen")
        await pilot.click("esc back")
        assert pilot.screen.screen_name == "runs"
        await pilot.click("2 Launch")
        await pilot.until(lambda: pilot.screen.screen_name == "launch", "the Launch screen")
        await pilot.click("command")
        assert pilot.screen.view.panel.tab == "command"
        await pilot.click("? help")
        await pilot.until(lambda: pilot.screen.screen_name == "help", "the help")


@pytest.mark.asyncio
async def test_a_short_message_leaves_room_for_keys(console: Opener, runs: Path) -> None:
    async with console(120, 36) as pilot:
        pilot.screen.show_message("it is so")
        await pilot.sees("it is so", "q quit")


def _as_written(pilot: ConsolePilot, strip: Strip) -> Strip:
    """The line as the application's filters change it before it is written to the terminal."""
    for line_filter in pilot.app._filters:
        if line_filter.enabled:
            strip = strip.apply_filter(line_filter, pilot.app.screen.styles.background)
    return strip


@pytest.mark.asyncio
async def test_without_colour_nothing_is_coloured(console: Opener, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    make_run(runs)
    async with console() as pilot:
        await pilot.sees("✓ done")
        colours = {
            colour
            for strip in pilot.app.screen._compositor.render_strips()
            for segment in _as_written(pilot, strip)
            if segment.style
            for colour in (segment.style.color, segment.style.bgcolor)
            if colour is not None and not colour.is_default
        }
        assert colours == set()


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["1", "3"])
@pytest.mark.parametrize("has_colours", [False, True], ids=["NO_COLOR", "16 colours"])
async def test_the_row_under_the_cursor_is_seen(
    has_colours: bool, key: str, console: Opener, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_colours:
        monkeypatch.setenv("NO_COLOR", "1")
    for name in ("one", "two"):
        make_run(runs, name)
    async with console(80, 24, theme="ansi") as pilot:
        await pilot.press(key)
        await pilot.sees(*(("one", "two") if key == "1" else ("demo-2", "shipped")))
        here, below = (_look_of_row(pilot, offset) for offset in (0, 1))
        assert here != below
        assert has_colours or (here[0] and not below[0]), "reversed"


def _look_of_row(pilot: ConsolePilot, offset: int) -> tuple[bool, str, str]:
    """(reversed, colour, background) of the row so many rows below the cursor in the list that has the focus."""
    rows = pilot.app.focused
    assert isinstance(rows, RowList)
    strip = pilot.app.screen._compositor.render_strips()[rows.region.y + rows.cursor - rows.top + offset]
    style = next(segment.style for segment in _as_written(pilot, strip) if segment.text.strip() and segment.style)
    return bool(style.reverse), str(style.color), str(style.bgcolor)


@pytest.mark.asyncio
async def test_the_palette_finds_runs_recipes_settings_and_events(console: Opener, runs: Path) -> None:
    run = make_run(runs, "autumn")
    async with console(120, 36) as pilot:
        await pilot.press("1", "ctrl+p", *"recipe full")
        await pilot.sees("recipe full", "open Launch with it")
        await pilot.press("escape", "ctrl+p", *"setting seed")
        await pilot.sees("train.seed: on Launch")
        await pilot.press("enter")
        await pilot.until(lambda: pilot.screen.screen_name == "launch", "Launch")
        await pilot.until(lambda: pilot.screen.view.fields.row.key == "train.seed", "the setting")
        await pilot.press("1", "ctrl+p", *"autumn")
        await pilot.sees(run.name)
        await pilot.press("enter")
        await pilot.until(lambda: pilot.screen.screen_name == "run" and pilot.screen.status, "the run")
        await pilot.press("ctrl+p", *"event checkpoint")
        await pilot.sees("checkpoint_saved")
        await pilot.press("enter")
        await pilot.until(lambda: "redone with" not in pilot.text, "that event alone")
        await pilot.press("escape")
        await pilot.sees("redone with")


@pytest.mark.parametrize("width", [80, 120])
def test_findings_of_doctor_begin_in_one_column_also_beside_long_topics(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DoctorScreen, "glyphs", lambda _screen, text: text)
    screen = DoctorScreen()
    topics = ("torch", "flash-linear-attention")
    screen._findings = [{"topic": topic, "state": "ok", "text": f"found {'word ' * 20}"} for topic in topics]
    lines = [line.plain for line in screen.text_lines(width)]
    assert len({line.index("found") for line in lines if "found" in line}) == 1
    assert all(len(line) <= width for line in lines)
