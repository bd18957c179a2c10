"""Typical mistakes of a new user: each gives an exit code, one short error message on stderr, and a fix that works when
typed.

Each row is what was typed, the exit code and words of the block. The fix is read from the block and typed; where it is
a piece of a command, it is put into the command that was refused. `train` is typed as `plan`, which resolves and checks
the same without starting an engine.

Try: `pytest tests/cli/test_first_hour.py -k option`
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.commands.wrong_usage import OPTIONS_OF_TRAIN
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import GOOD_DATA, RECIPE, write_profile

MY = ("-p", "mine", "-r", "my.toml")


class Wrong(NamedTuple):
    """The typed command, its exit code, words of the error message, and the right command if the message contains
    none."""

    typed: str
    code: int
    words: tuple[str, ...]
    right: str = ""


USAGE: dict[str, Wrong] = {
    "command of another tool": Wrong("finetune -p mine -r my.toml", 2, ("fix: tunedeck train -p mine -r my.toml",)),
    "start for train": Wrong("start -p mine -r my.toml", 2, ("No such command 'start'", "tunedeck train")),
    "run for train": Wrong("run", 2, ("No such command 'run'.\n", "tunedeck train -p mine -r demo")),
    "profile before the command": Wrong("-p mine train -r my.toml", 2, ("fix: tunedeck train -r my.toml -p mine",)),
    "recipe before the data": Wrong("-p mine --recipe=my.toml data", 2, ("fix: tunedeck data --recipe=my.toml",)),
    "runs before the command": Wrong("--runs runs --ascii runs", 2, ("fix: tunedeck runs --runs runs",)),
    "setting before the command": Wrong(
        "--set train.max_steps=1 -p mine plan -r my.toml", 2,
        ("--set is before the command", "fix: tunedeck plan -r my.toml --set train.max_steps=1 -p mine"),
    ),
    "option of train without a command": Wrong(
        "-p mine -r my.toml --set train.max_steps=1 --json", 2,
        ("No such option without a command: --json", "fix: tunedeck train -p mine -r my.toml"),
    ),
    "option of nothing without a command": Wrong(
        "-p mine -r my.toml --nonsense", 2, ("No such option without a command: --nonsense", "fix: tunedeck --help"),
        "--help",
    ),
    "profile without its value": Wrong("-r my.toml -p", 2, ("Option '-p' needs a value",), "--help"),
    "misspelled command": Wrong("trian -p mine -r my.toml", 2, ("Did you mean 'train'", "fix: tunedeck train -p mine")),
    "misspelled command of a group": Wrong("profiles lst", 2, ("fix: tunedeck profiles list",)),
    "help as a command": Wrong("help", 2, ("fix: tunedeck --help",)),
    "version as a command": Wrong("version", 2, ("fix: tunedeck --version",)),
    "ls for runs": Wrong("ls", 2, ("fix: tunedeck runs",)),
    "recipe without -r": Wrong("train my.toml", 2, ("fix: tunedeck train -r my.toml -p mine",)),
    "recipe behind a profile": Wrong("train -p mine my.toml", 2, ("fix: tunedeck train -p mine -r my.toml",)),
    "neither profile nor recipe": Wrong("plan", 2, ("'--profile'", "fix: tunedeck plan -p mine -r demo")),
    "no recipe": Wrong("plan -p mine", 2, ("'--recipe'", "fix: tunedeck plan -p mine -r demo")),
    "train without anything": Wrong("train", 2, ("-p PROFILE and -r RECIPE", "fix: add -p mine -r demo")),
    "option --lr": Wrong("train -p mine -r my.toml --lr 1e-3", 2, ("--set train.learning_rate=0.001",)),
    "option --epochs": Wrong("train --epochs=2 -p mine -r my.toml", 2, ("--set train.epochs=2",)),
    "option --per-device-train-batch-size": Wrong(
        "train -p mine -r my.toml --per-device-train-batch-size 2", 2, ("--set train.batch_size=2",)
    ),
    "option --bf16": Wrong("train --bf16 -p mine -r my.toml", 2, ("--set model.dtype=bfloat16",)),
    "option --optim": Wrong("train -p mine -r my.toml --optim adamw_torch", 2, ("--set train.optimizer=adamw",)),
    "option --output-dir": Wrong("train -p mine -r my.toml --output-dir out", 2, ("--runs out",)),
    "option --dataset": Wrong("plan -p mine -r my.toml --dataset rows.jsonl", 2, ("data.sources.0.path=rows.jsonl",)),
    "option --data of a score": Wrong(
        "eval builtin:tiny -p mine --data rows.jsonl", 2, ("data.sources.0.path=rows.jsonl -r demo",)
    ),
    "option --model": Wrong("plan -p mine -r my.toml --model builtin:tiny", 2, ("--set model.id=builtin:tiny",)),
    "option that nobody has": Wrong("plan -p mine -r my.toml --frobnicate", 2, ("fix: tunedeck plan --help",)),
    "--set with a space": Wrong("plan -p mine -r my.toml --set train.batch_size 4", 2, ("--set train.batch_size=4",)),
    "--set without a table": Wrong(
        "plan -p mine -r my.toml --set batch_size=4", 2, ("it belongs in train.batch_size",),
        "plan -p mine -r my.toml --set train.batch_size=4",
    ),
    "--set of another tool's key": Wrong(
        "plan -p mine -r my.toml --set lr=1e-3", 2, ("train.learning_rate = 0.001",),
        "plan -p mine -r my.toml --set train.learning_rate=0.001",
    ),
    "--set of a typo": Wrong(
        "plan -p mine -r my.toml --set train.lerning_rate=1e-3", 2, ("did you mean train.learning_rate?",),
        "plan -p mine -r my.toml --set train.learning_rate=1e-3",
    ),
    "--set of the wrong type": Wrong(
        "plan -p mine -r my.toml --set train.batch_size=many", 2, ('"many" is text', "an integer, 1 or more"),
        "plan -p mine -r my.toml --set train.batch_size=2",
    ),
    "--set of another tool's word": Wrong(
        "plan -p mine -r my.toml --set model.dtype=bf16", 2, ('did you mean "bfloat16"?',),
        "plan -p mine -r my.toml --set model.dtype=bfloat16",
    ),
    "recipe file without .toml": Wrong("plan -p mine -r my", 2, ("fix: -r my.toml, as a path",)),
    "data as a recipe": Wrong("train -p mine -r rows.jsonl", 2, ("tunedeck recipes new my-recipe",)),
    "recipe path that is not there": Wrong("plan -p mine -r ./me.toml", 2, ("no such file", "fix: -r ./my.toml")),
    "misspelled recipe": Wrong("plan -p demo -r dmeo", 2, ("did you mean demo?", "fix: -r demo")),
    "misspelled profile": Wrong("plan -p dem0 -r demo", 2, ("did you mean demo?", "fix: -p demo")),
    "profile that is a word": Wrong("plan -p cpu -r my.toml", 2, ('no profile named "cpu"', "tunedeck profiles list")),
    "profile and recipe exchanged": Wrong(
        "plan -p my.toml -r mine", 2, ("there is a profile with that name: use -p",), "plan -p mine -r my.toml"
    ),
    "profile as a recipe": Wrong(
        "plan -p mine -r ./profiles/hardware/mine.toml", 2, ('"profile", a file for -p',), "plan -p mine -r my.toml"
    ),
    "YAML as a recipe": Wrong(
        "plan -p mine -r ./axolotl.yml", 2, ("YAML file of another tool", "tunedeck recipes import"),
        "plan -p mine -r my.toml",
    ),
    "keys of another tool": Wrong(
        "plan -p mine -r theirs.toml", 2, ("train.micro_batch = 4", "method.rank = 8"), "plan -p mine -r my.toml"
    ),
    "no data": Wrong("train -p mine -r lora", 5, ("does not exist", "--set data.sources.main.path=rows.jsonl")),
    "misspelled data": Wrong("train -p mine -r misspelt.toml", 5, ("row.jsonl does not exist", "path=rows.jsonl")),
    "no GPU": Wrong("train -p 24gb -r my.toml", 6, ("needs a GPU, but this machine has none", "fix: use -p mine")),
    "too few GPUs": Wrong("train -p 4xh100 -r my.toml", 6, ("needs 4 GPUs", "fix: use -p mine")),
    "model that is too large": Wrong(
        "train -p mine -r full --set model.id=Qwen/Qwen2.5-1.5B", 3, ("does not fit", "fix: tunedeck advise -p ")
    ),
    "model that is not here": Wrong(
        "plan -p mine -r lora --set model.id=nobody/nothing", 6, ("nobody/nothing", "hf download"),
        "plan -p mine -r lora",
    ),
    "model as a run": Wrong("eval builtin:tiny", 2, ("needs -p PROFILE and -r RECIPE",), "eval --help"),
    "half of a model": Wrong("eval builtin:tiny -p mine", 2, ("missing: -r RECIPE", "-p mine -r demo"), "eval --help"),
    "run that is not there": Wrong("show capitals", 2, ("no run matches 'capitals'", "fix: list them: tunedeck runs")),
    "last run of none": Wrong("resume last", 2, ("no run matches 'last'", "tunedeck runs")),
    "name with capitals": Wrong("profiles new Mine-2 --detect", 2, ("fix: call it mine-2",)),
    "name with its suffix": Wrong("recipes new capitals.toml", 2, ("without .toml", "fix: call it capitals")),
    "name of the run with a space": Wrong(
        "train -p mine -r my.toml --name 'my run'", 2, ('--name "my run"', "letters, digits"), "plan -p mine -r my.toml"
    ),
    "name that exists": Wrong("profiles new mine", 2, ("exists", "--force"), "profiles new mine --force"),
    "devices of a CPU": Wrong(
        "train -p mine -r my.toml --devices 0", 2, ("--devices selects GPUs", "leave out --devices"),
        "plan -p mine -r my.toml",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a new user's folder: a data file, a recipe for it, recipes with mistakes, and a profile of a CPU called
    mine."""
    monkeypatch.setenv("TUNEDECK_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "rows.jsonl").write_text(GOOD_DATA)
    recipe = RECIPE.replace('name = "{name}"\n', "").replace("data.jsonl", "rows.jsonl")
    (tmp_path / "my.toml").write_text(recipe)
    (tmp_path / "misspelt.toml").write_text(recipe.replace("rows.jsonl", "row.jsonl"))
    (tmp_path / "theirs.toml").write_text(recipe + "lora_r = 8\nper_device_train_batch_size = 4\n")
    (tmp_path / "axolotl.yml").write_text("base_model: Qwen/Qwen2.5-0.5B\nlora_r: 8\n")
    folder = tmp_path / "profiles" / "hardware"
    folder.mkdir(parents=True)
    write_profile(folder, name="mine")


def right_command(wrong: Wrong, block: str) -> list[str]:
    """The command that the block's fix says to type."""
    typed = shlex.split(wrong.typed)
    if wrong.right:
        return shlex.split(wrong.right)
    fix = block.partition("fix: ")[2].strip()
    if "tunedeck " in fix:
        right = shlex.split(re.split(r"[;,]", fix.partition("tunedeck ")[2])[0])
    elif found := re.match(r"add (-.*?)(?:;|, |$)", fix):
        right = [*typed, *shlex.split(found[1])]
    elif found := re.match(r"(?:use )?(-[pr]) (\S+?)(?:,|$)", fix):
        at = typed.index(found[1])
        right = [*typed[: at + 1], found[2], *typed[at + 2 :]]
    else:
        assert fix.startswith("call it "), fix
        right = [*typed[:2], fix.removeprefix("call it "), *typed[3:]]
    return ["plan" if word == "train" else word for word in right]


@pytest.mark.parametrize("wrong", USAGE.values(), ids=USAGE.keys())
def test_wrong_usage_is_one_block_whose_fix_works_when_typed(tunedeck: Tunedeck, tmp_path: Path, wrong: Wrong) -> None:
    outcome = tunedeck(*shlex.split(wrong.typed))
    outcome.complains(wrong.code, *wrong.words)
    assert not (tmp_path / "runs").exists(), "refused before a run directory exists"
    right = tunedeck(*right_command(wrong, outcome.err))
    assert right.code == 0, right.err
    assert right.out or "no runs in" in right.err


def test_what_is_said_to_be_of_train_is(tunedeck: Tunedeck) -> None:
    shown = tunedeck("train", "--help").out.split()
    assert [option for option in OPTIONS_OF_TRAIN if option not in shown] == []


def test_without_a_profile_of_ones_own_the_fix_writes_one(tunedeck: Tunedeck, tmp_path: Path) -> None:
    (tmp_path / "profiles" / "hardware" / "mine.toml").unlink()
    outcome = tunedeck("train", "-p", "24gb", "-r", "my.toml")
    outcome.complains(6, "fix: tunedeck profiles new here --detect", "then use -p here")
    assert tunedeck("profiles", "new", "here", "--detect").code == 0
    assert tunedeck("plan", "-p", "here", "-r", "my.toml").code == 0
    assert not (tmp_path / "runs").exists()


def test_data_that_the_fix_names_are_read(tunedeck: Tunedeck, tmp_path: Path) -> None:
    outcome = tunedeck("data", "-r", "misspelt.toml")
    outcome.complains(5, "row.jsonl does not exist", "fix: add --set data.sources.main.path=rows.jsonl")
    assert "8 sequences" in tunedeck("data", "-r", "misspelt.toml", "--set", "data.sources.main.path=rows.jsonl").out


def test_a_warm_up_longer_than_the_run_is_no_error(tunedeck: Tunedeck) -> None:
    outcome = tunedeck("plan", "-p", "demo", "-r", "demo", "--set", "train.max_steps=5")
    assert outcome.code == 0 and "the warm-up takes 4" in outcome.err


def test_help_names_the_console_and_cuts_no_summary(tunedeck: Tunedeck) -> None:
    shown = tunedeck("--help").out
    assert all(option in shown for option in ("console", "--profile", "--recipe", "--theme", "--ascii", "--runs"))
    for group in ("", "queue", "profiles", "recipes"):
        shown = tunedeck(*group.split(), "--help").out
        assert "..." not in shown.replace("[ARGS]...", ""), shown


def test_no_cell_is_wrapped_or_cut_in_a_pipe(
    tunedeck: Tunedeck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "a-source-with-a-name-of-more-than-forty-letters"
    recipe = tmp_path / "my.toml"
    recipe.write_text(recipe.read_text().replace('name = "main"', f'name = "{name}"'))
    assert any(name in line and "prompt-completion" in line for line in tunedeck("data", "-r", recipe).out.splitlines())


def test_plan_and_train_plan_for_the_same_lengths_once_the_data_were_read(tunedeck: Tunedeck) -> None:
    before = tunedeck("plan", *MY)
    assert "64 tokens is data.max_length; to measure the data, run tunedeck data" in before.out
    assert tunedeck("data", "-r", "my.toml").code == 0
    document = json.loads(tunedeck("plan", *MY, "--json").out)
    assert (document["basis"], document["length"]) == ("data", 17)
    assert "17 tokens is the longest sequence in the data" in tunedeck("plan", *MY).out
