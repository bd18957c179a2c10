"""`tunedeck profiles` and `tunedeck recipes`, run as commands on real files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.cli import app
from engine.config.files.find import SHIPPED_FOLDER
from engine.config.files.machine import detect_device
from engine.config.files.write import import_spec_file
from engine.errors import SpecError, TunedeckError
from tui.files.user_files import new_file_path


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def said(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.exception
    return result.stdout


def refused(*arguments: str) -> TunedeckError:
    error = run(*arguments).exception
    assert isinstance(error, TunedeckError)
    assert error.exit_code == 2
    return error


SHARED = 'kind = "recipe"\nname = "shared"\n[model]\nid = "{model}"\n[[data.sources]]\nname = "a"\npath = "{path}"\n'


def shared(folder: Path, *, model: str = "org/name", path: str = "data/a.jsonl", more: str = "") -> str:
    file = folder / "downloaded (1).toml"
    file.write_text(SHARED.format(model=model, path=path) + more)
    return str(file)


def test_list_names_title_and_origin_of_all_and_marks_the_broken(tmp_path: Path) -> None:
    broken = tmp_path / "profiles/recipes/torn.toml"
    broken.parent.mkdir(parents=True)
    broken.write_text('kind = "recipe"\ntitle = "\\u001b[31m"')
    rows = {row["name"]: row for row in json.loads(said("recipes", "list", "--json"))}
    assert rows["lora"]["origin"] == "shipped"
    assert rows["torn"]["title"].startswith("invalid: 2 problems")
    assert "demo" in said("profiles", "list")
    assert "\x1b" not in said("recipes", "list")


def test_show_prints_the_file_or_all_its_values() -> None:
    assert 'targets = "attention"' in said("recipes", "show", "attention-lora")
    assert json.loads(said("profiles", "show", "24gb", "--json"))["device"]["count"] == 1


def test_check_reports_the_problems_of_every_file_with_exit_code_2(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(f'kind = "recipe"\nname = "{name}"\nlr = 1\n')
    found = refused("recipes", "check", "a.toml", "b.toml", "lora").render()
    assert found.count("train.learning_rate = 1") == 2
    result = run("recipes", "check", "a.toml", "--json")
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (2, False)
    assert "2 files checked, no errors, 2 notes" in said("recipes", "check", "lora", "demo")  # its data are the user's


@pytest.mark.parametrize(("group", "options"), [("recipes", []), ("profiles", []), ("profiles", ["--detect"])])
def test_a_new_file_is_found_by_name_and_checks_clean(group: str, options: list[str]) -> None:
    said(group, "new", "mine", *options)
    assert "checked, no " in said(group, "check", "mine")
    assert "exists" in refused(group, "new", "mine").found
    said(group, "new", "mine", "--force")
    assert "is not a valid name" in refused(group, "new", "../mine").found


def test_a_new_recipe_may_be_a_copy_of_another(tmp_path: Path) -> None:
    said("recipes", "new", "mine", "--from", "qwen2.5-7b-lora")
    mine = (tmp_path / "profiles/recipes/mine.toml").read_text()
    shipped = said("recipes", "export", "qwen2.5-7b-lora")
    assert mine == shipped.replace('name = "qwen2.5-7b-lora"', 'name = "mine"')
    (tmp_path / "there").mkdir()
    own = shared(tmp_path / "there")
    said("recipes", "new", "theirs", "--from", own)
    source = json.loads(said("recipes", "show", "theirs", "--json"))["data"]["sources"][0]
    assert source["path"] == str(tmp_path / "there/data/a.jsonl")
    assert "no recipe named" in refused("recipes", "new", "other", "--from", "nobody").found


def test_list_shows_the_profile_a_recipe_is_meant_for_and_whether_it_fits_there(tmp_path: Path) -> None:
    folder = tmp_path / "profiles/recipes"
    folder.mkdir(parents=True)
    for name, profile, model in (
        ("a", "nothing", "org/name"),
        ("b", "demo", "Qwen/Qwen2.5-7B"),
        ("c", "24gb", "org/name"),
    ):
        file = shared(folder, model=model, more="")
        (folder / f"{name}.toml").write_text(f'profile = "{profile}"\n' + Path(file).read_text())
    (folder / "d.toml").write_text(Path(shared(folder, model="org/name", more="")).read_text())
    rows = {row["name"]: (row["profile"], row["verdict"]) for row in json.loads(said("recipes", "list", "--json"))}
    assert rows["qwen2.5-7b-lora"] == ("24gb", "fits") and rows["d"] == (None, None)
    assert rows["a"] == ("nothing", "no plan") and rows["c"] == ("24gb", "no plan")
    assert rows["b"] == ("demo", "does not fit")
    assert re.search(r"qwen2.5-7b-lora +shipped +24gb +fits +Qwen", said("recipes", "list"))


def test_nothing_of_ones_own_lands_among_the_shipped_files(tmp_path: Path) -> None:
    (tmp_path / "profiles").symlink_to(SHIPPED_FOLDER)  # as ./profiles is in a checkout
    shipped = {path.name for path in SHIPPED_FOLDER.rglob("*.toml")}
    for group, folder in (("recipes", "recipes"), ("profiles", "hardware")):
        target = tmp_path / "config" / "profiles" / folder / "mine.toml"
        assert str(target.relative_to(tmp_path)) in said(group, "new", "mine")
        assert target.is_file() and "user" in said(group, "list")
    said("recipes", "import", shared(tmp_path))
    assert new_file_path("recipe", "other") == tmp_path / "config/profiles/recipes/other.toml"
    assert {path.name for path in SHIPPED_FOLDER.rglob("*.toml")} == shipped


def test_check_notes_a_name_that_differs_from_the_files(tmp_path: Path) -> None:
    shared(tmp_path)
    (tmp_path / "downloaded (1).toml").rename(tmp_path / "theirs.toml")
    result = run("recipes", "check", "theirs.toml", "--json")
    document = json.loads(result.stdout)
    note = document["notes"][0]
    assert document["ok"] and note.endswith(
        'theirs.toml:2: name: "shared" is not used; the name is that of the file: "theirs"'
    )
    assert result.exit_code == 0


def test_detection_reads_what_the_machine_has() -> None:
    device, title, notes = detect_device()
    assert device["memory_gib"] > device["reserve_gib"] > 0
    assert device["host_memory_gib"] > 0
    assert title
    assert "memory_gib" in notes


def test_export_and_import_carry_a_file_over(tmp_path: Path) -> None:
    said("recipes", "export", "lora", "--to", "passed-on.toml")
    assert said("recipes", "export", "lora") == (tmp_path / "passed-on.toml").read_text()
    said("recipes", "import", "passed-on.toml")
    rows = {row["name"]: row["origin"] for row in json.loads(said("recipes", "list", "--json"))}
    assert rows["lora"] == "user"


def test_a_recipe_is_checked_although_the_profile_that_it_names_is_elsewhere(tmp_path: Path) -> None:
    theirs = said("recipes", "export", "lora").replace('profile = "24gb"', 'profile = "their-machine"')
    assert "their-machine" in theirs
    (tmp_path / "theirs.toml").write_text(theirs)
    assert "1 file checked, no errors" in said("recipes", "check", "theirs.toml")


def test_a_written_file_can_be_read_by_everybody_and_run_by_nobody(tmp_path: Path) -> None:
    said("recipes", "export", "lora", "--to", "passed-on.toml")
    assert (tmp_path / "passed-on.toml").stat().st_mode & 0o777 == 0o644


def test_import_never_overwrites_without_force(tmp_path: Path) -> None:
    said("recipes", "import", shared(tmp_path))
    changed = shared(tmp_path, model="org/other")
    assert "exists" in refused("recipes", "import", changed).found
    assert json.loads(said("recipes", "show", "shared", "--json"))["model"]["id"] == "org/name"
    said("recipes", "import", changed, "--force")
    assert json.loads(said("recipes", "show", "shared", "--json"))["model"]["id"] == "org/other"


REACHING = [
    {"path": "/etc/passwd"},
    {"path": "../x.jsonl"},
    {"path": "a/../../x"},
    {"path": "~/x"},
    {"path": "C:\\\\x"},
    {"path": "..\\\\x"},
    {"path": "file:///etc/passwd"},
    {"path": "FILE:///etc/passwd"},
    {"path": "$HOME/x.jsonl"},
    {"path": "s3://bucket/x.jsonl"},
    {"path": "memory://x.jsonl"},
    {"path": "zip://x.jsonl::file:///home/me/x.zip"},
    {"model": "/models/x"},
    {"model": "../x"},
    {"model": "run:/tmp/x"},
    {"more": 'image_root = "/"\n'},
    {"more": '[[data.validation]]\nname = "v"\npath = "/x"\n'},
    {"more": '[[evaluate.sources]]\nname = "v"\npath = "../x"\n'},
    {"more": '[[stages]]\nname = "s"\nmodel = {adapter = "/x"}\n'},
]


@pytest.mark.parametrize("reaching", REACHING, ids=[str(row) for row in REACHING])
def test_import_refuses_absolute_and_climbing_paths(tmp_path: Path, reaching: dict[str, str]) -> None:
    words = refused("recipes", "import", shared(tmp_path, **reaching)).render()
    assert re.search(
        "absolute path|leaves the recipe's folder|can refer to files of this machine|environment variable", words
    )
    assert not (tmp_path / "config").exists()


def test_import_refuses_links_huge_files_and_broken_ones(tmp_path: Path) -> None:
    os.symlink(shared(tmp_path), tmp_path / "link.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * (2 << 20))
    (tmp_path / "remote.toml").write_text(SHARED.format(model="a/b", path="x") + "[train]\ntrust_remote_code = true\n")
    for name, words in {
        "link": "symbolic link",
        "huge": "larger than",
        "remote": "remote code",
        "gone": "cannot be read",
    }.items():
        assert words in refused("recipes", "import", f"{name}.toml").render()
    assert not (tmp_path / "config").exists()


def test_a_profiles_overrides_may_not_reach_out_either(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    override = '[overrides.model]\nadapter = "/x"\n'
    file.write_text(f'kind = "profile"\nname = "p"\n[device]\nkind = "cpu"\nmemory_gib = 1.0\n{override}')
    with pytest.raises(SpecError, match="absolute path"):
        import_spec_file("profile", file)


@pytest.mark.parametrize("group", ["profiles", "recipes"])
def test_the_json_schema_describes_every_key(group: str) -> None:
    schema = json.loads(said(group, "schema"))
    assert schema["additionalProperties"] is False
    tables = [schema, *schema["$defs"].values()]
    bare = [
        f"{table['title']}.{key}"
        for table in tables
        for key, field in table["properties"].items()
        if not field.get("description") and "$ref" not in field
    ]
    assert bare == []
