"""The Library screen and the editor: reading, editing with the checker's problems, copying, importing, exporting."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.files.find import user_folder
from tests.tui.conftest import SIZES, Opener
from tests.tui.console_pilot import ConsolePilot
from tui.files.annotated import LABEL, annotated_text, line_problems
from tui.screens.editor import EditorScreen
from tui.screens.launch import LaunchScreen
from tui.screens.library import LibraryScreen

pytestmark = pytest.mark.asyncio
SHIPPED = Path(__file__).parents[3] / "profiles"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe that has two problems."""
    monkeypatch.chdir(tmp_path)
    recipes = tmp_path / "profiles" / "recipes"
    recipes.mkdir(parents=True)
    text = (SHIPPED / "recipes" / "demo.toml").read_text().replace('name = "demo"', 'name = "mine"')
    text = text.replace("batch_size = 64", 'batch_sise = "64"', 1).replace(
        "learns to rewrite", "learns to [b]rewrite[/b]", 1
    )
    (recipes / "mine.toml").write_text(text)
    return tmp_path


async def to_file(pilot: ConsolePilot, stem: str, kind: str = "recipe") -> None:
    """Move the cursor to a file of the list with keys."""
    await pilot.press("3")
    await pilot.until(lambda: isinstance(pilot.screen, LibraryScreen) and pilot.screen._items, "the list")
    names = [(item.kind, item.entry.path.stem if item.entry else "") for item in pilot.screen._items]
    await pilot.press("g", *["j"] * names.index((kind, stem)))


@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_every_file_is_listed_with_where_it_comes_from(console: Opener, width: int, height: int) -> None:
    async with console(width, height) as pilot:
        await pilot.press("3")
        await pilot.sees("Profiles", "24gb", "shipped", "detected", "enter edit", "q quit")
        await pilot.press("G")
        await pilot.sees("qlora")


async def test_the_first_file_is_chosen_and_shown_at_once(console: Opener) -> None:
    async with console(120, 36) as pilot:
        await pilot.press("3")
        await pilot.sees("kind = ", "enter edit")
        assert pilot.screen.chosen.entry is not None


async def test_the_text_is_shown_with_what_is_wrong_below_its_line(console: Opener, project: Path) -> None:
    async with console(120, 70) as pilot:
        await to_file(pilot, "mine")
        await pilot.sees("project", "unknown key; did you mean train.batch_size?", "learns to [b]rewrite[/b]")


async def test_the_text_is_enlarged_and_list_and_text_come_back(console: Opener) -> None:
    async with console() as pilot:
        await pilot.press("3")
        await pilot.sees("Profiles", "no problems")
        await pilot.press("tab", "z")
        await pilot.until(lambda: "Profiles" not in pilot.text, "the text alone")
        assert pilot.screen.query_one("#text").size.width == 80
        await pilot.press("z")
        await pilot.sees("Profiles", "no problems")


async def test_where_there_is_room_for_one_pane_tab_shows_the_text(console: Opener, project: Path) -> None:
    async with console(60, 15) as pilot:
        await to_file(pilot, "mine")
        assert "schema = 1" not in pilot.text
        await pilot.press("tab")
        await pilot.sees("schema = 1")


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_the_checker_follows_the_typing(console: Opener, project: Path, size: tuple[int, int]) -> None:
    async with console(*size) as pilot:
        await to_file(pilot, "mine")
        await pilot.press("enter")
        await pilot.sees("2 problems")
        await pilot.press("f3")
        line = pilot.screen.area.cursor_location[0]
        assert pilot.screen.area.document.get_line(line).startswith("batch_sise")
        await pilot.press("end", "ctrl+u", *"batch_size = 64")
        await pilot.sees("no problems")
        await pilot.press("f2")
        await pilot.sees("saved")
    assert "batch_size = 64\n" in (project / "profiles" / "recipes" / "mine.toml").read_text()


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_each_message_stands_on_its_line(console: Opener, project: Path, size: tuple[int, int]) -> None:
    async with console(*size) as pilot:
        await to_file(pilot, "mine")
        await pilot.press("enter", "f3")
        await pilot.sees("did you mean")
        assert any("batch_sise =" in line and "✗ train.batch_sise:" in line for line in pilot.text.splitlines())


async def test_tab_completes_keys_and_values(console: Opener, project: Path) -> None:
    async with console() as pilot:
        await to_file(pilot, "mine")
        await pilot.press("enter", "f3", "end", "enter", *"schedu")
        await pilot.sees("scheduler", "Learning rate schedule")
        await pilot.press("tab", "down", "enter", "enter", *"seed = 1", "escape")
        lines = pilot.screen.area.text.splitlines()
        assert lines[lines.index('scheduler = "linear"') :][:2] == ['scheduler = "linear"', "seed = 1"]
        assert isinstance(pilot.screen, EditorScreen)


async def test_a_shipped_file_is_edited_as_a_copy_in_the_project(console: Opener, project: Path) -> None:
    before = (SHIPPED / "recipes" / "lora.toml").read_bytes()
    async with console() as pilot:
        await to_file(pilot, "lora")
        await pilot.press("enter", *"# mine", "enter", "f2")
        await pilot.sees("saved")
    assert (SHIPPED / "recipes" / "lora.toml").read_bytes() == before
    assert (project / "profiles" / "recipes" / "lora.toml").read_text().startswith("# mine\nschema = 1")


async def test_leaving_an_unsaved_text_takes_two_keys(console: Opener, project: Path) -> None:
    async with console() as pilot:
        await to_file(pilot, "mine")
        await pilot.press("enter", "x", "escape")
        await pilot.sees("not saved; f2 saves")
        assert isinstance(pilot.screen, EditorScreen)
        await pilot.press("escape")
        assert isinstance(pilot.screen, LibraryScreen)
    assert (project / "profiles" / "recipes" / "mine.toml").read_text().startswith("schema")


async def test_a_file_changed_by_another_program_is_not_overwritten(console: Opener, project: Path) -> None:
    path = project / "profiles" / "recipes" / "mine.toml"
    async with console() as pilot:
        await to_file(pilot, "mine")
        await pilot.press("enter", "x")
        path.write_text("theirs")
        await pilot.press("f2")
        await pilot.sees("was changed by another program")
    assert path.read_text() == "theirs"


async def test_a_new_file_has_its_own_name_in_it(console: Opener, project: Path) -> None:
    async with console() as pilot:
        await to_file(pilot, "24gb", "profile")
        await pilot.press("w", *["backspace"] * 20, *"my-card", "enter", "f2")
        await pilot.sees("saved", "no problems")
    assert 'name = "my-card"' in (project / "profiles" / "hardware" / "my-card.toml").read_text()


async def test_a_strangers_file_is_imported_only_when_it_is_sound(console: Opener, project: Path) -> None:
    (project / "good.toml").write_text((SHIPPED / "recipes" / "demo.toml").read_text().replace('"demo"', '"theirs"', 1))
    async with console(120, 36) as pilot:
        await to_file(pilot, "mine")
        await pilot.press("i", *"profiles/recipes/mine.toml", "enter")
        await pilot.sees("nothing was imported")
        await pilot.press("i", *"good.toml", "enter")
        await pilot.sees("imported the recipe theirs")
    assert (user_folder() / "recipes" / "theirs.toml").exists()
    (user_folder() / "recipes" / "theirs.toml").unlink()


async def test_a_file_is_exported_under_the_name_given(console: Opener, project: Path) -> None:
    async with console() as pilot:
        await to_file(pilot, "lora")
        await pilot.press("e", "enter")
        await pilot.sees("exported to")
    assert (project / "lora.toml").read_bytes() == (SHIPPED / "recipes" / "lora.toml").read_bytes()


async def test_a_recipe_is_taken_to_the_launch_screen(console: Opener, project: Path) -> None:
    async with console() as pilot:
        await to_file(pilot, "demo")
        await pilot.press("n")
        await pilot.until(lambda: isinstance(pilot.screen, LaunchScreen), "the Launch screen")
        assert pilot.screen.state.choice.recipe == "demo"


async def test_escape_codes_of_a_file_are_written_out() -> None:
    lines = annotated_text("a = 1\x1b[31m\nb", line_problems([f"{LABEL}:2: b: \x1b[1mno"]), 60, ascii_only=True)
    assert [line.plain for line in lines] == ["1 a = 1\\x1b[31m", "2 b", "  x b: \\x1b[1mno"]


async def test_a_file_is_edited_in_another_program_or_its_path_copied(
    console: Opener, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.delenv("EDITOR", raising=False)
    async with console(120, 36) as pilot:
        await pilot.press("3")
        await pilot.sees("shipped")
        await pilot.press("f4")
        await pilot.sees("neither $VISUAL nor $EDITOR names a program")
        await pilot.press("Y")
        assert pilot.app.clipboard.endswith(".toml")
        monkeypatch.setenv("EDITOR", "an-editor-that-is-not-there")
        await pilot.press("f4")
        await pilot.sees("an-editor-that-is-not-there cannot be started")


async def test_names_of_shipped_files_are_whole_and_long_ones_end_in_an_ellipsis(
    console: Opener, project: Path
) -> None:
    own = project / "profiles" / "recipes"
    (own / "mine.toml").rename(own / f"{'long-' * 8}name.toml")
    async with console() as pilot:
        await pilot.press("3", "G")
        await pilot.sees("mixtral-8x7b-attention shipped", "qwen3-4b-longcontext   shipped", "long-long-long-long-l…")
