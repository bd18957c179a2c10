"""Every command that README and docs print works.

Commands that take seconds are run as printed, in a folder with a finished run. Those that need a GPU, the hub, a
cluster or minutes are parsed by the command line and, where they name profile and recipe, planned.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tomli
import typer

from engine.budget.advise.parallel import settle_parallel
from engine.budget.advise.plan import make_plan
from engine.cli import app
from engine.config.load import resolve
from tests.docs.blocks import ROOT, Command, blocks, commands, inline_commands
from tests.forked_command import write_command
from tui import arguments

LABELS = {"sh", "text", "toml", "json"}
"""What a block may be labelled with; only "sh" is for commands."""

RUN = (
    "runs", "show", "watch", "wait", "eval last", "eval slow", "merge last", "compare", "plan", "advise", "queue add",
    "queue list", "recipes", "profiles", "doctor", "log last",
)  # fmt: skip
"""Beginnings of commands that are run."""

NOT_RUN = ("--exact", "capitals.toml", "--runs /shared", "doctor --gpus", "--harness", "axolotl.yml")
"""Words that make a command one that is only parsed and planned: it takes long, or needs what is not there."""

SHORT_RUN = (
    "--set", "method.kind=lora", "--set", "train.max_steps=2", "--set", "train.warmup_steps=1",
    "--set", "data.sources.dates.limit=200", "--set", "eval.limit=8", "--set", "evaluate.limit=8",
    "--set", "checkpoint.every_steps=1",
)  # fmt: skip


def is_run(command: Command) -> bool:
    """True if a test runs this command; False if the command is only parsed and planned."""
    if command.words[0] != "tunedeck" or any(words in command.text for words in NOT_RUN):
        return False
    return " ".join(command.words[1:]).startswith(RUN)


COMMANDS = commands()
OF_TUNEDECK = [command for command in COMMANDS if command.tunedeck_arguments is not None]
OTHERS = [command for command in COMMANDS if command.tunedeck_arguments is None]
PAGES = sorted({command.page for command in COMMANDS if is_run(command)})


def shell(text: str, folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """One printed command in a shell that finds `tunedeck`."""
    environment = {
        **os.environ,
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        "TUNEDECK_STATE": str(folder / "state"),
        "TUNEDECK_CONFIG": str(folder / "config"),
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for $PATH with the command in it."""
    return write_command(tmp_path_factory.mktemp("path"))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, path: Path) -> Path:
    """A folder with the profiles and the recipe that the pages speak of, and the finished runs "slow" and "fast"."""
    folder = tmp_path_factory.mktemp("workplace")
    for made in ("profiles/hardware", "profiles/recipes", "data"):
        (folder / made).mkdir(parents=True)
    for name in ("mine", "other", "my-profile"):
        text = (ROOT / "profiles/hardware/24gb.toml").read_text().replace('name = "24gb"', f'name = "{name}"')
        (folder / f"profiles/hardware/{name}.toml").write_text(text)
    cluster = (ROOT / "profiles/hardware/4xh100.toml").read_text().replace('name = "4xh100"', 'name = "my-cluster"')
    (folder / "profiles/hardware/my-cluster.toml").write_text(cluster + "\n[nodes]\ncount = 2\n")
    recipe = (ROOT / "profiles/recipes/lora.toml").read_text().replace('name = "lora"', 'name = "my-recipe"')
    (folder / "profiles/recipes/my-recipe.toml").write_text(recipe)
    (folder / "data/train.jsonl").write_text('{"prompt": "1 + 1", "completion": "2"}\n')
    for name in ("slow", "fast"):
        done = shell(" ".join(["tunedeck train -p demo -r demo --name", name, *SHORT_RUN]), folder, path)
        assert done.returncode == 0, done.stderr
    return folder


def parse(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command's name and its options. Raises what the command line raises for arguments that it cannot parse."""
    if list(words) == [
        "--install-completion"
    ]:  # an option of the command itself, which would write to the shell's files
        assert words[0] in {name for option in typer.main.get_command(app).params for name in option.opts}
        return "tunedeck", {}
    if not words or (words[0].startswith("-") and words[0] not in ("--help", "--version")):
        assert arguments.parse(list(words)) is not None, words
        return "console", {}
    command: Any = typer.main.get_command(app)
    context = command.make_context("tunedeck", list(words))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return context.command_path, context.params


def test_every_block_says_what_it_is() -> None:
    unlabelled = [f"{block.page}:{block.line}" for block in blocks() if block.label not in LABELS]
    assert not unlabelled
    assert len(OF_TUNEDECK) > 40
    assert len([command for command in OF_TUNEDECK if is_run(command)]) > 20


@pytest.mark.parametrize("command", OF_TUNEDECK, ids=str)
def test_the_command_line_knows_the_command(command: Command) -> None:
    parse(command.tunedeck_arguments or [])


@pytest.mark.parametrize("command", inline_commands(), ids=str)
def test_the_command_line_knows_the_command_in_a_sentence(command: Command) -> None:
    """A sentence may name a command without its arguments, such as `tunedeck launch`; then only the name is checked."""
    words = [word for word in command.tunedeck_arguments or [] if word != "--help"]
    if len(words) == 1 and not words[0].startswith("-"):
        known: Any = typer.main.get_command(app)
        assert words[0] in known.commands
    else:
        parse(words)


@pytest.mark.parametrize("command", [command for command in OF_TUNEDECK if " -p " in command.text], ids=str)
def test_profile_and_recipe_can_be_planned(command: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    _, options = parse(command.tunedeck_arguments or [])
    if options.get("profile") and options.get("recipe") and "capitals.toml" not in command.text:
        changes = options.get("sets") or options.get("set") or []
        plan = make_plan(settle_parallel(resolve(options["profile"], options["recipe"], changes).spec).spec)
        assert plan.verdict != "does_not_fit"


@pytest.mark.parametrize("page", PAGES)
def test_the_quick_commands_of_a_page_work_as_printed(page: str, workplace: Path, path: Path, tmp_path: Path) -> None:
    """One after another, in a copy of the workplace; `new` in an empty folder."""
    folder = tmp_path / "workplace"
    shutil.copytree(workplace, folder)
    for command in COMMANDS:
        if command.page == page and is_run(command):
            done = shell(command.text, tmp_path if " new " in command.text else folder, path)
            assert done.returncode == 0, f"{command}: {command.text}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_other_commands_name_what_exists(command: Command) -> None:
    words = [word for word in command.words if not re.fullmatch(r"[A-Z_]+=.*", word)]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert words[1] in targets
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2])
    elif words[:2] == ["python", "-c"]:
        compile(words[2], str(command), "exec")
    elif words[:2] == ["pip", "install"]:
        extras = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = re.findall(r"\[([\w,]+)\]", " ".join(words))
        assert {extra for group in asked for extra in group.split(",")} <= set(extras)
    else:
        pytest.fail(f"{command}: what should be looked at in {command.text}?")


def test_each_line_of_the_page_of_security_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    fuzzed = set(re.findall(r'Target\("([^"]+)"', (ROOT / "tests" / "fuzz" / "targets.py").read_text()))
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    rows = [row for row in rows if row[1] not in ("test", "---")]
    assert len(rows) > 20 and fuzzed
    for line, tests in rows:
        files, targets = re.findall(r"`(tests/[\w/]+\.py)`", tests), re.findall(r'"([^"]+)"', tests)
        written = "\n".join((ROOT / file).read_text() for file in files)
        assert files or targets, line
        assert all(f"def {name}(" in written for name in re.findall(r"`(test_\w+)`", tests)), line
        assert fuzzed.issuperset(targets), line
    assert fuzzed <= set(re.findall(r'"([^"]+)"', page)), "each target is told"
