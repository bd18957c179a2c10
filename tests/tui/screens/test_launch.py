"""The Launch screen's keys: choosing, typing, fixes, tabs, starting, saving."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from textual import events
from textual._compositor import ChopsUpdate, Compositor

from engine.config.load import dump_run_spec
from engine.journal.directory import create_run_directory
from tests.tui.conftest import SIZES, Opener
from tests.tui.console_pilot import ConsolePilot
from tui.launch.choice import Choice
from tui.launch.evaluate import evaluate_choice
from tui.screens.launch import LaunchScreen

pytestmark = pytest.mark.asyncio
DEMO = {"profile": "demo", "recipe": "demo"}


def budget(pilot: ConsolePilot) -> str:
    """The text of the budget: verdict, bar, legend, status line."""
    return str(pilot.screen.query_one("#budget").text)


async def to_row(pilot: ConsolePilot, key: str) -> None:
    """Move the cursor to a field with keys."""
    rows = [row.key for row in pilot.screen.state.field_rows()]
    await pilot.press("g", *["j"] * rows.index(key))
    assert pilot.screen.view.fields.row.key == key


async def type_in(pilot: ConsolePilot, key: str, text: str) -> None:
    """Type a text into a field and end the editing."""
    await to_row(pilot, key)
    await pilot.press("enter", "end", "ctrl+u", *text, "enter")


async def test_an_own_recipe_comes_first_and_the_cursor_is_on_what_it_lacks(
    console: Opener, empty_folder: Path
) -> None:
    (empty_folder / "profiles" / "recipes").mkdir(parents=True)
    text = Path(__file__).parents[3].joinpath("profiles/recipes/demo.toml").read_text()
    mine = text.replace('name = "demo"', 'name = "mine"').replace('"builtin:dates"', '"rows.jsonl"', 1)
    (empty_folder / "profiles" / "recipes" / "mine.toml").write_text(mine)
    async with console(120, 36) as pilot:
        await pilot.sees("recipe         mine", "profile        this-cpu", "cannot start", "rows.jsonl", "▶ Settings")
        assert pilot.screen.view.fields.row.key == "data.sources.dates"
        await pilot.press("enter", "end", "ctrl+u", *"builtin:dates", "enter")
        await pilot.sees("s starts with micro-batch 64, one for a step of 64 of the longest sequences")


async def test_d_opens_the_tab_that_it_fills(console: Opener) -> None:
    """Regression: the samples were read behind another tab."""
    async with console(120, 36, **DEMO) as pilot:
        await pilot.press("d")
        await pilot.sees("reading the data: a process with the tokenizer is starting")


async def test_the_name_of_a_setting_is_whole_where_there_is_room(console: Opener) -> None:
    """Regression: "train.activat…" stood in a screen of 200 columns."""
    async with console(80, 24, **DEMO) as pilot:
        await pilot.sees("fits with micro-batch")
        pilot.app.open_screen("launch", {**DEMO, "overrides": ["train.activation_offload=true"]})
        await pilot.sees("1 changed")
        await pilot.press("G")
        await pilot.sees("train.activation_offload true")


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_verdict_bar_and_start_key_are_in_sight(console: Opener, width: int, height: int) -> None:
    async with console(width, height, **DEMO) as pilot:
        assert isinstance(pilot.screen, LaunchScreen)
        await pilot.sees("fits with micro-batch 17", "simulated", "300 %", "activations", "s start", "q quit")
        assert all(len(line) <= width for line in pilot.text.splitlines())


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_no_verdict_is_cut_and_no_value_abbreviated(console: Opener, size: tuple[int, int]) -> None:
    async with console(*size, **DEMO) as pilot:
        await pilot.sees("profile        demo", "Settings", "command", "builtin:tiny", "fits with micro-batch 17  ")
        await pilot.sees(
            "train.micro_batch = auto", "2.8 MiB left", "same result", "longest possible sequence, 64 tokens"
        )
        await pilot.press("R")
        await pilot.sees(
            "◐ fits with micro-batch 17", "mixtral-8x7b-attention ✗ made for 4xh200", "qwen3-4b-longcontext"
        )


async def test_without_room_one_pane_is_shown_and_tab_goes_on_to_the_next(console: Opener) -> None:
    async with console(60, 15, **DEMO) as pilot:
        await pilot.sees("Settings")
        for shown in ("micro_batch = auto", "builtin:tiny"):
            await pilot.press("tab")
            await pilot.sees(shown, "128.2 MiB missing")
        await pilot.press("P")
        await pilot.sees("this machine", "24gb")


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_a_pane_is_enlarged_and_esc_shows_all_again(console: Opener, size: tuple[int, int]) -> None:
    async with console(*size, **DEMO) as pilot:
        await pilot.sees("fixes", "Settings")
        await pilot.press("z")
        await pilot.until(lambda: "fixes" not in pilot.text, "the settings alone")
        await pilot.sees("Settings", "builtin:tiny", "128.2 MiB missing")
        await pilot.press("tab")
        await pilot.sees("fixes", "128.2 MiB missing")
        await pilot.press("escape")
        await pilot.sees("fixes", "Settings")
        assert isinstance(pilot.screen, LaunchScreen)


async def test_moving_in_the_list_shows_what_it_costs_and_esc_goes_back(console: Opener) -> None:
    async with console(120, 36, **DEMO) as pilot:
        await pilot.sees("128.2 MiB missing")
        names = [entry.argument for entry in pilot.screen.state.recipes]
        await pilot.press("R", *["j"] * (names.index("lora") - names.index("demo")))
        await pilot.sees("cannot start", "/train.jsonl", "enter choose", "esc back")
        assert pilot.screen.state.choice.recipe == "lora"
        await pilot.press("escape")
        await pilot.sees("s starts it as written")
        assert pilot.screen.state.choice.recipe == "demo" and not pilot.screen.state.can_undo
        await pilot.press("g", "enter", "j", "enter")
        await pilot.sees("profile        demo-2")
        await pilot.press("u")
        await pilot.sees("profile        demo  ")
        assert pilot.screen.state.choice.profile == "demo"


async def test_the_plan_says_for_which_sequences_it_is_and_why_it_changes(
    console: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: first the recipe's longest length, seconds later that of the data, without a word about it."""
    monkeypatch.setattr("tui.screens.launch.LENGTHS_SECONDS", 0.3)
    async with console(80, 24, **DEMO) as pilot:
        await pilot.sees("for the longest possible sequence, 64 tokens; reading the data ...", "192.2 of 64.0 MiB")
        await pilot.sees(
            "for the longest sequence in the data, 41 tokens", "fits with micro-batch 28", "126.7 of 64.0 MiB"
        )
        await pilot.sees("the data has been read: the longest sequence has 41 tokens, not 64")


async def test_a_tab_says_what_differs_from_the_last_run_of_the_recipe(console: Opener, runs: Path) -> None:
    async with console(120, 36, **DEMO) as pilot:
        await pilot.press("left_square_bracket")
        await pilot.sees("no earlier run of demo in this folder")
        spec = evaluate_choice(Choice("demo", "demo", {"train.learning_rate": "0.1"})).spec
        assert spec is not None
        run = create_run_directory(runs, "demo", dump_run_spec(spec), {})
        await pilot.press("left_square_bracket", "right_square_bracket")
        await pilot.sees(f"1 setting differs from {run.name}", "train.learning_rate  0.1 -> 0.003")


async def test_the_bar_follows_every_letter_and_letters_are_no_keys_while_editing(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await to_row(pilot, "train.micro_batch")
        before = budget(pilot)
        await pilot.press("enter", "end", "backspace")
        assert budget(pilot) != before and "s starts with micro-batch 6, 11 of them for a step of 64" in budget(pilot)
        await pilot.press("q")
        await pilot.sees('"6q" is text')
        await pilot.press("backspace", "backspace", "8", "enter")
        assert pilot.screen.state.choice.overrides == {"train.micro_batch": "8"}
        await pilot.press("u")
        assert pilot.screen.state.choice.overrides == {}


async def test_esc_discards_what_was_typed_and_the_footer_offers_no_letters(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await to_row(pilot, "train.micro_batch")
        before = budget(pilot)
        await pilot.press("enter", "end", "backspace")
        assert budget(pilot) != before
        footer = pilot.text.splitlines()[-1]
        assert "enter keep" in footer and "esc discard" in footer
        assert "start" not in footer and "quit" not in footer
        await pilot.press("escape")
        assert pilot.screen.state.choice.overrides == {}
        assert budget(pilot).splitlines()[-1] == before.splitlines()[-1]
        assert isinstance(pilot.screen, LaunchScreen)
        await pilot.sees("s start", "q quit")


async def test_a_bar_that_is_not_of_what_is_written_says_of_what_it_is(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await to_row(pilot, "train.micro_batch")
        await pilot.press("enter", "end", "ctrl+u", *"12345")
        await pilot.sees("no plan for these settings; this one is for micro-batch 12", "cannot start")
        assert "fits" not in budget(pilot)


async def test_a_model_that_cannot_be_had_promises_no_start_and_says_why_in_full(console: Opener) -> None:
    model = "an-owner-of-some-length/a-model-that-nobody-has-and-whose-name-is-long"
    async with console(**DEMO) as pilot:
        await type_in(pilot, "model.id", model)
        await pilot.sees("cannot start", "HF_HUB_OFFLINE is set")
        assert "s starts" not in budget(pilot)


async def test_keys_that_come_in_one_burst_are_obeyed_in_their_order(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await to_row(pilot, "train.micro_batch")
        await pilot.press("enter")
        for key in ("5", "6", "backspace", "ctrl+u", "4", "0", "left", "1"):
            pilot.app.post_message(events.Key(key, key if len(key) == 1 else None))
        await pilot.until(lambda: pilot.screen.state.choice.overrides == {"train.micro_batch": "410"}, "410")


async def test_keys_of_one_burst_follow_the_focus_that_the_keys_before_them_move(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await pilot.app.workers.wait_for_complete()
        for key in ("P", "j", "enter", "g", "j", "j", "j", "j", "enter", "ctrl+u", "9", "6", "enter", "k"):
            pilot.app.post_message(events.Key(key, key if len(key) == 1 else None))
        await pilot.until(lambda: pilot.screen.state.choice.overrides == {"data.max_length": "96"}, "96")
        await pilot.until(lambda: pilot.screen.view.fields.row.key == "data.sources.dates", "the row above")
        assert pilot.screen.state.choice.profile == "demo-2"


async def test_the_bar_is_painted_with_its_letter_and_without_a_layout_pass(
    console: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    painted: list[str] = []
    layouts: list[object] = []
    partial = Compositor.render_partial_update

    def spy(compositor: Compositor) -> ChopsUpdate | None:
        update = partial(compositor)
        if update is not None:
            painted.append(budget(pilot))
        return update

    async with console(120, 36, **DEMO) as pilot:
        await to_row(pilot, "train.micro_batch")
        await pilot.press("enter", "end", "backspace")
        await pilot.until(lambda: pilot.screen.state.compute_next_verdict() is False, "every recipe's verdict")
        before = budget(pilot)
        pilot.screen.screen_layout_refresh_signal.subscribe(pilot.screen, layouts.append)
        monkeypatch.setattr(Compositor, "render_partial_update", spy)
        pilot.app.post_message(events.Key("7", "7"))
        await pilot.until(lambda: painted, "a repaint")
        assert budget(pilot) != before
        assert painted[0] == budget(pilot)
        assert layouts == []


async def test_what_is_wrong_is_said_below_the_row_and_start_refuses_with_it(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await type_in(pilot, "train.batch_size", "many")
        await pilot.sees('"many" is text', "cannot start: train.batch_size")
        await pilot.press("s")
        await pilot.sees("cannot start: train.batch_size")
        assert isinstance(pilot.screen, LaunchScreen)
        await pilot.press("backspace")
        assert pilot.screen.state.choice.overrides == {}


async def test_enter_turns_a_choice_to_its_next_value(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await to_row(pilot, "data.packing")
        await pilot.press("enter")
        assert pilot.screen.state.choice.overrides == {"data.packing": "true"}
        await pilot.press("enter")
        assert pilot.screen.state.choice.overrides == {}


async def test_any_key_of_the_recipe_can_be_typed(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await pilot.press("G", "enter", *"train.eps=1e-7", "enter")
        assert pilot.screen.state.choice.overrides == {"train.eps": "1e-7"}
        assert pilot.screen.state.evaluated.spec.recipe.train.eps == 1e-7


async def test_one_key_applies_the_first_fix(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await pilot.sees("train.micro_batch = auto")
        await pilot.press("a")
        await pilot.sees("applied train.micro_batch = auto", "✓ fits", "MiB left")


async def test_the_next_step_names_the_fix_that_a_applies(console: Opener) -> None:
    async with console(140, 36, **DEMO) as pilot:
        await pilot.sees("to show recovery from an out-of-memory error; a applies fix 1: train.micro_batch = auto")
        await pilot.press("tab", "G")
        count = len(pilot.screen.state.advice().suggestions)
        await pilot.until(lambda: f"a applies fix {count}" in budget(pilot), "the fix under the cursor")


async def test_enter_on_a_fix_applies_that_one(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await pilot.sees("2 ", "slower")
        last = pilot.screen.state.advice().suggestions[-1]
        await pilot.press("tab", "G", "enter")
        assert set(pilot.screen.state.choice.overrides) == set(last.changes)


async def test_the_command_tab_shows_what_start_runs(console: Opener, runs: Path) -> None:
    async with console(120, 36, **DEMO) as pilot:
        await pilot.press("a", "right_square_bracket", "right_square_bracket")
        await pilot.sees("tunedeck train -p demo -r demo", "--set train.micro_batch=auto", "--runs", "--detach")


async def test_samples_are_read_by_another_process_and_learned_text_is_marked(console: Opener) -> None:
    shutil.rmtree(os.environ["TUNEDECK_CACHE"], ignore_errors=True)  # data that are cached are read in an instant
    async with console(120, 36, **DEMO) as pilot:
        await pilot.press("right_square_bracket", "tab", "enter")
        await pilot.sees("reading the data")
        contents = pilot.screen.tab_contents
        await pilot.until(lambda: "sample 1, dates" in pilot.text or "tunedeck" in contents.samples_status, "a sample")
        await pilot.sees("<eos>⟧", "20,000 sequences")


async def test_data_that_cannot_be_read_is_said_in_the_samples_tab(console: Opener, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("[red]no json[/red]\n")
    async with console(120, 36, **DEMO) as pilot:
        pilot.screen.state.set_field("data.sources.dates", str(tmp_path / "bad.jsonl"))
        await pilot.press("right_square_bracket", "d")
        await pilot.until(lambda: "reading the data" not in pilot.text, "an answer")
        await pilot.sees("bad.jsonl")


async def test_the_screen_opens_on_what_a_run_was_made_from(console: Opener) -> None:
    async with console() as pilot:
        await pilot.press("1")
        settings = {"profile": "demo", "recipe": "demo", "overrides": ["train.batch_size=32", "train.micro_batch=8"]}
        pilot.app.open_screen("launch", settings)
        await pilot.sees("8 × 4 accumulated × 1 device = 32", "Settings  2 changed")


async def test_a_strangers_title_is_shown_as_it_is_written(
    console: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = Path(__file__).parents[3].joinpath("profiles/recipes/demo.toml").read_text()
    (tmp_path / "profiles" / "recipes").mkdir(parents=True)
    (tmp_path / "profiles" / "recipes" / "a.toml").write_text(
        text.replace('name = "demo"', 'name = "a"').replace("Demo: a tiny model", "[red]L[/red]\\u001b[31m")
    )
    async with console(120, 36, profile="demo", recipe="a") as pilot:
        await pilot.sees("[red]L[/red]\\x1b[")


async def test_in_ascii_nothing_else_is_drawn(console: Opener) -> None:
    async with console(120, 36, ascii=True, **DEMO) as pilot:
        await pilot.sees("fits with", "aaaaaaaa", "64 x 1 accumulated x 1 device")
        assert pilot.text.isascii(), [letter for letter in pilot.text if not letter.isascii()]


async def test_the_field_that_is_edited_covers_its_own_row_only(console: Opener) -> None:
    async with console(**DEMO) as pilot:
        await pilot.sees("builtin:tiny")
        await pilot.press("enter", "end", "x")
        assert pilot.screen.query_one("#field-input").region.height == 1
        await pilot.sees("builtin:tinyx", "builtin:dates")
