"""What is packed, and that the installed package works: from any folder, without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomli

from tests.package.conftest import ROOT, USER_FILES, Distributions, Installation, tracked_files


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user's shell would, without the PYTHONPATH of the tests; returns its exit code and output."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        check=False, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def packed(distributions: Distributions) -> dict[str, set[str]]:
    """The paths of the files in the sdist and in the wheel, each as the path that the file has in the repository."""
    with tarfile.open(distributions.sdist) as archive:
        sdist = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    with zipfile.ZipFile(distributions.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    return {"sdist": sdist, "wheel": {name.removeprefix("tunedeck/") for name in names}}


def test_no_file_of_the_user_is_packed(distributions: Distributions) -> None:
    for kind, files in packed(distributions).items():
        assert not files & set(USER_FILES), kind
        made_by_the_build = {"PKG-INFO"} if kind == "sdist" else {"__init__.py", "__main__.py", "py.typed"}
        assert files - set(tracked_files()) == made_by_the_build, kind


@pytest.mark.parametrize(
    ("kind", "folders"), [("sdist", "engine tui profiles tests docs"), ("wheel", "engine tui profiles")]
)
def test_every_file_of_ours_is_packed(distributions: Distributions, kind: str, folders: str) -> None:
    """A new shipped profile or recipe must be named in `[tool.hatch.build] exclude` of pyproject.toml."""
    ours = {name for name in tracked_files() if name.partition("/")[0] in folders.split()}
    assert ours - packed(distributions)[kind] == set()


def test_the_wheel_has_one_name_at_the_top(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as archive:
        assert {name.partition("/")[0] for name in archive.namelist()} == {"tunedeck", distributions.metadata_folder}


def test_an_editable_installation_adds_the_checkout_to_the_path_and_nothing_else(
    distributions: Distributions, tmp_path: Path
) -> None:
    """A `tunedeck/` in site-packages would hide the `tunedeck.py` of the checkout."""
    build = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    done = run(sys.executable, "-P", "-c", build, str(tmp_path), cwd=distributions.checkout)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert names == ["_tunedeck.pth"]
        assert archive.read("_tunedeck.pth").decode() == str(distributions.checkout)


def test_the_metadata_names_licence_and_python(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as archive:
        metadata = archive.read(f"{distributions.metadata_folder}/METADATA").decode()
        assert f"{distributions.metadata_folder}/licenses/LICENSE" in archive.namelist()
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.11", "Classifier: Typing :: Typed"):
        assert f"\n{line}\n" in metadata


def version_of(checkout: Path) -> str:
    return run(sys.executable, "-m", "hatchling", "version", cwd=checkout).stdout.strip()


def test_a_tag_is_the_version(tmp_path: Path) -> None:
    """Without git the wheel has a version, too; with git and without a tag it is that of the next release."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    fallback = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["fallback-version"]
    assert version_of(tmp_path) == fallback
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    assert version_of(tmp_path).startswith(fallback.replace(".dev0", ".dev1+"))
    git("tag", "v7.8.9")
    git("tag", "visited-2026")  # what is no version is passed over
    assert version_of(tmp_path) == "7.8.9"
    git("commit", "--quiet", "--allow-empty", "--message", "two")
    assert version_of(tmp_path).startswith("7.8.10.dev1+")


def test_the_changelog_has_the_next_release() -> None:
    """What the release workflow asks of it: `fallback-version` in pyproject.toml moves on with it."""
    fallback = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["fallback-version"]
    assert f"\n## {fallback.removesuffix('.dev0')}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder like a user's repository, with modules that have the names of our packages; importing any of them ends
    the process."""
    for name in ("engine", "profiles", "tui"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the module of the user was imported')\n")
    return tmp_path


@pytest.mark.parametrize("pythonpath", ["", "."])
@pytest.mark.parametrize("entry", ["command", "module", "file"])
def test_every_way_in_works_beside_a_users_own_engine_module(
    installation: Installation, hostile: Path, entry: str, pythonpath: str
) -> None:
    ways: dict[str, list[str | Path]] = {
        "command": [installation.command],
        "module": [installation.python, "-m", "tunedeck"],
        "file": [installation.python, "-P", installation.site_packages / "tunedeck" / "__init__.py"],
    }
    done = run(*ways[entry], "recipes", "list", "--json", cwd=hostile, PYTHONPATH=pythonpath)
    assert done.returncode == 0, done.stderr
    assert {"demo", "lora"} <= {recipe["name"] for recipe in json.loads(done.stdout)}


def test_the_engine_process_is_the_installed_one(installation: Installation, hostile: Path) -> None:
    """Runs three steps of the demo from a folder whose modules have our names: the first micro-batch does not fit, and
    the run still ends as done."""
    short = ["--set", "train.max_steps=3", "--set", "train.warmup_steps=1", "--set", "eval.limit=8"]
    done = run(installation.command, "train", "-p", "demo", "-r", "demo", *short, "--json", cwd=hostile, PYTHONPATH=".")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert "backoff" in {event["kind"] for event in events}
    assert [event["status"] for event in events if event["kind"] == "run_finished"] == ["done"]
    assert list(hostile.glob("runs/*/model/model.safetensors"))
    assert not list((installation.site_packages / "tunedeck").rglob("runs"))


OPEN_LAUNCH = """
import asyncio, tunedeck
tunedeck._own_packages_first()
import tui.app, tui.arguments

async def first_screen():
    app = tui.app.TunedeckApp(tui.arguments.parse(["-p", "demo", "-r", "demo"]))
    async with app.run_test() as pilot:
        await pilot.pause()
        return type(app.screen).__name__

print(asyncio.run(first_screen()), tui.app.__file__)
"""


def test_the_console_opens_with_its_style_sheet(installation: Installation, hostile: Path) -> None:
    done = run(installation.python, "-P", "-c", OPEN_LAUNCH, cwd=hostile)
    assert done.stdout.split() == ["LaunchScreen", str(installation.site_packages / "tunedeck/tui/app.py")], done.stderr
