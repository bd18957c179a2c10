"""`pip install tunedeck` without torch: what plans and shows works, what trains says what to install."""

from __future__ import annotations

import json
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine.checks.machine import TRAINING_PACKAGES
from engine.config.files.machine import install_command
from tests.package.conftest import Distributions, Installation, install
from tests.package.test_wheel import OPEN_LAUNCH, run


def needed(name: str, found: dict[str, Path]) -> None:
    """Add the files at the top of a distribution, and of all that it requires, to `found` (name = path)."""
    try:
        files, requirements = distribution(name).files or [], distribution(name).requires or []
    except PackageNotFoundError:
        return  # what another Python version or platform would need
    tops = {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}
    if tops <= found.keys():
        return
    found.update({top: Path(sysconfig.get_path("purelib"), top) for top in tops})
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed(requirement.name, found)


@pytest.fixture(scope="module")
def light(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel with what it requires when no extra is asked for, as links to what is installed here."""
    dependencies = tmp_path_factory.mktemp("dependencies")
    installation = install(distributions.wheel, tmp_path_factory.mktemp("light"), dependencies)
    metadata = next(installation.site_packages.glob("tunedeck-*.dist-info/METADATA")).read_text()
    found: dict[str, Path] = {}
    for line in metadata.splitlines():
        name, _, text = line.partition(": ")
        if name == "Requires-Dist" and Requirement(text).marker is None:
            needed(Requirement(text).name, found)
    for top, path in found.items():
        (dependencies / top).symlink_to(path)
    assert not {path.name for path in dependencies.iterdir()} & {*TRAINING_PACKAGES, "numpy"}
    return installation


@pytest.mark.parametrize(
    "command",
    ["plan -p 24gb -r lora", "fit -p 24gb -r lora", "recipes list", "profiles new mine --detect", "runs", "queue list"],
)
def test_what_plans_and_shows_works(light: Installation, tmp_path: Path, command: str) -> None:
    done = run(light.command, *command.split(), cwd=tmp_path, TUNEDECK_STATE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "this needs" not in done.stderr


def test_the_console_opens(light: Installation, tmp_path: Path) -> None:
    done = run(light.python, "-P", "-c", OPEN_LAUNCH, cwd=tmp_path)
    assert done.stdout.startswith("LaunchScreen"), done.stderr


@pytest.mark.parametrize(
    "command",
    ["train -p demo -r demo", "data -r demo", "eval last", "merge last", "plan -p demo -r demo --exact"],
)
def test_what_trains_says_what_to_install_and_leaves_nothing_behind(
    light: Installation, tmp_path: Path, command: str
) -> None:
    done = run(light.command, *command.split(), cwd=tmp_path, TUNEDECK_STATE=str(tmp_path))
    assert (done.returncode, done.stdout) == (6, "")
    first, fix = done.stderr.splitlines()
    assert first.startswith("tunedeck: this needs torch, ")
    assert fix.strip() == f"fix: {install_command('train', TRAINING_PACKAGES)}"
    assert not list(tmp_path.iterdir())


def test_doctor_says_what_is_missing(light: Installation, tmp_path: Path) -> None:
    done = run(light.command, "doctor", "--json", cwd=tmp_path, TUNEDECK_STATE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = {finding["topic"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert (found["torch"]["state"], found["torch"]["fix"]) == ("missing", install_command("train", ["torch"]))
