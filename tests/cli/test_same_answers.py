"""Every command that leads to a run gives the same answer about a recipe: the same problems in the same words, whether
it refuses them or only reports them, and the same exit code where it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe
from tests.cli.test_gate import LLAMA, LORA, OWN_CODE
from tui.launch.choice import Choice
from tui.launch.evaluate import evaluate_choice

Change = tuple[str, str]

ROWS = "".join(json.dumps({"text": f"{n} plus 1 is {n + 1}"}) + "\n" for n in range(8))
"""Rows of which no command has anything to say."""

MODEL, FULL, BATCH, PATH = 'id = "builtin:tiny"', 'kind = "full"', "batch_size = 2", 'path = "data.jsonl"'
OWN_FOLDER, PRETRAINED = (MODEL, 'id = "./model"'), ('init = "random"', 'init = "pretrained"')
TRACKER = '\n[trackers]\nuse = ["mlflow"]\n'
SHORT_ANSWERS = "\n[generate]\nmax_new_tokens = 8\n"
VALIDATION = '\n[[data.validation]]\nname = "held"\npath = "{path}"\n'

COMMANDS = {
    "check": ("recipes", "check", "RECIPE"),
    "plan": ("plan", "-p", "PROFILE", "-r", "RECIPE"),
    "advise": ("advise", "-p", "PROFILE", "-r", "RECIPE"),
    "launch": ("launch", "-p", "PROFILE", "-r", "RECIPE", "--slurm"),
    "data": ("data", "-p", "PROFILE", "-r", "RECIPE"),
    "queue": ("queue", "add", "-p", "PROFILE", "-r", "RECIPE"),
    "train": ("train", "-p", "PROFILE", "-r", "RECIPE"),
}
"""In the order in which fewer problems are only reported. "screen" comes beside them."""

EVERY = frozenset({*COMMANDS, "screen", "screen queue"})
NEEDS_ROWS = frozenset({"data", "train", "screen"})
NEEDS_MACHINE = frozenset({"queue", "train", "screen", "screen queue"})
NEEDS_PERMISSION = EVERY - {"check", "data"}


class Broken(NamedTuple):
    """A recipe: changes of its text, text added to it, what is made beside it, the number of its problems, and who
    refuses it."""

    changes: tuple[Change, ...] = ()
    more: str = ""
    beside: Callable[[Path], object] = lambda folder: None
    problems: int = 1
    refused_by: frozenset[str] = EVERY
    exceptions: frozenset[str] = frozenset()
    """Commands that refuse it for a reason of their own."""


def model(config: object = LLAMA) -> Callable[[Path], object]:
    """A model folder without weights."""

    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))

    return write


def adapter(folder: Path) -> None:
    (folder / "adapter").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "builtin:tiny", "r": 8, "target_modules": ["q_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))


def link(folder: Path) -> None:
    (folder / "rows.jsonl").symlink_to("gone")


def replaced(old: str, new: str) -> tuple[Change, ...]:
    return ((old, new),)


def with_model(key: str, *more: Change) -> tuple[Change, ...]:
    return ((MODEL, f"{MODEL}\n{key}"), *more)


BROKEN = {
    "unknown key": Broken(replaced(BATCH, f"{BATCH}\nbatchsize = 3")),
    "wrong type": Broken(replaced(BATCH, 'batch_size = "two"')),
    "two warm-ups": Broken(replaced(BATCH, f"{BATCH}\nwarmup_ratio = 0.1\nwarmup_steps = 1")),
    "two contradictions": Broken(
        replaced(BATCH, f'{BATCH}\nrestarts = 3\nscheduler = "constant"\nmin_learning_rate = 1e-5'), problems=2
    ),
    "unknown model that is built in": Broken(replaced(MODEL, 'id = "builtin:tyny"')),
    "evaluation without data": Broken(more="\n[eval]\nevery_steps = 1\n"),
    "value of a sweep": Broken(more='\n[sweep]\n"train.batch_size" = [0]\n'),
    "stage from none": Broken(more='\n[[stages]]\nname = "a"\nfrom = "b"\n'),
    "missing feature": Broken(((FULL, f"{LORA[1]}\ndropout = 0.1"), (BATCH, f"{BATCH}\ncompile = true"))),
    "missing feature and file": Broken(
        ((FULL, f"{LORA[1]}\ndropout = 0.1"), (BATCH, f"{BATCH}\ncompile = true"), (PATH, 'path = "gone.jsonl"')),
        problems=2,
    ),
    "missing file": Broken(replaced(PATH, 'path = "gone.jsonl"'), refused_by=NEEDS_ROWS),
    "missing validation file": Broken(more=VALIDATION.format(path="gone.jsonl"), refused_by=NEEDS_ROWS),
    "two missing files": Broken(
        replaced(PATH, 'path = "lost.jsonl"'), VALIDATION.format(path="gone.jsonl"), problems=2, refused_by=NEEDS_ROWS
    ),
    "glob without a match": Broken(replaced(PATH, 'path = "*.parquet"'), refused_by=NEEDS_ROWS),
    "empty folder": Broken(
        replaced(PATH, 'path = "empty"'), beside=lambda folder: (folder / "empty").mkdir(), refused_by=NEEDS_ROWS
    ),
    "unknown suffix": Broken(
        replaced(PATH, 'path = "rows.xlsx"'),
        beside=lambda folder: (folder / "rows.xlsx").write_text("x"),
        refused_by=NEEDS_ROWS,
    ),
    "link to nothing": Broken(replaced(PATH, 'path = "rows.jsonl"'), beside=link, refused_by=NEEDS_ROWS),
    "missing prompts": Broken(
        more=f'\n[eval]\nprompts = "gone.txt"\n{VALIDATION.format(path="data.jsonl")}{SHORT_ANSWERS}',
        refused_by=NEEDS_ROWS,
    ),
    "missing tracker": Broken(more=TRACKER, refused_by=NEEDS_MACHINE),
    "missing tracker and file": Broken(
        replaced(PATH, 'path = "gone.jsonl"'), TRACKER, problems=2, refused_by=NEEDS_MACHINE | NEEDS_ROWS
    ),
    "missing tracker and glob": Broken(replaced(FULL, f'{FULL}\ntrain_only = ["**.lm_haed.**"]'), TRACKER, problems=2),
    "missing model folder": Broken(replaced(MODEL, 'id = "./nowhere"')),
    "file for a model": Broken(replaced(MODEL, 'id = "./data.jsonl"')),
    "model folder without a config": Broken(
        replaced(MODEL, 'id = "./model"'), beside=lambda folder: (folder / "model").mkdir()
    ),
    "config that is no JSON": Broken((OWN_FOLDER,), beside=model("{")),
    "encoder-decoder": Broken((OWN_FOLDER,), beside=model({"model_type": "t5"})),
    "too long": Broken((OWN_FOLDER,), beside=model({**LLAMA, "max_position_embeddings": 32})),
    "too long in a sweep": Broken(
        more='\n[sweep]\n"data.max_length" = [64, 4096]\n', exceptions=frozenset({"launch", "screen", "screen queue"})
    ),
    "code of its own": Broken((OWN_FOLDER,), beside=model(OWN_CODE), refused_by=NEEDS_PERMISSION),
    "no weights": Broken((OWN_FOLDER, PRETRAINED), beside=model(), refused_by=NEEDS_MACHINE),
    "no such run": Broken((PRETRAINED, (MODEL, 'id = "run:gone"'))),
    "full glob": Broken(replaced(FULL, f'{FULL}\ntrain_only = ["**.lm_haed.**"]')),
    "glob of adapters": Broken(replaced(FULL, f'{LORA[1]}\ntargets = ["q_prj"]')),
    "missing adapter": Broken(with_model('adapter = "./nowhere"', LORA, PRETRAINED)),
    "adapter of another rank": Broken(
        with_model('adapter = "./adapter"', (FULL, f"{LORA[1]}\nrank = 4"), PRETRAINED), beside=adapter
    ),
    "missing tokenizer": Broken(replaced('tokenizer = "builtin:bytes"', 'tokenizer = "./nowhere"')),
    "missing template": Broken(with_model('chat_template = "gone.jinja"')),
}


def write_case(case: Broken, folder: Path) -> tuple[Path, Path]:
    """Write the recipe, what is beside it, and a profile; returns the paths of profile and recipe."""
    recipe = write_recipe(folder, *case.changes, more=case.more, data=ROWS)
    case.beside(folder)
    return write_profile(folder), recipe


def sentences(text: str, recipe: Path) -> list[str]:
    """What a command says is wrong, without file, "expected" and "fix"."""
    lines = [line.strip().removeprefix("tunedeck: ") for line in text.splitlines()]
    return [
        re.sub(rf"^({re.escape(str(recipe))}|{recipe.stem})(:\d+)?: ", "", line)
        for line in lines
        if not line.startswith(("expected: ", "fix: "))
    ]


def on_screen(profile: Path, recipe: Path) -> tuple[list[str], dict[str, int]]:
    """(sentences, exit code of each way to start: 1 for a refusal)."""
    evaluated = evaluate_choice(Choice(str(profile), str(recipe)))
    found = [re.sub(rf" \({recipe.name}:\d+\)$", "", problem.text) for problem in evaluated.problems] + list(
        evaluated.notices
    )
    codes = {"screen": evaluated.start_refusal("start"), "screen queue": evaluated.start_refusal("queue")}
    return found, {name: int(refusal is not None) for name, refusal in codes.items()}


def same(one: str, other: str) -> bool:
    """Whether two sentences tell of one problem: one may have its key before it, or its fix behind it."""
    one, other = (re.sub(r"^[\w.\"-]+: ", "", text) for text in (one, other))
    return one.startswith(other) or other.startswith(one)


@pytest.mark.parametrize("name", BROKEN)
def test_every_command_gives_the_same_answer(tunedeck: Tunedeck, tmp_path: Path, name: str) -> None:
    case = BROKEN[name]
    profile, recipe = write_case(case, tmp_path)
    places = {"PROFILE": str(profile), "RECIPE": str(recipe)}
    said: dict[str, list[str]] = {}
    codes: dict[str, int] = {}
    for command, words in COMMANDS.items():
        outcome = tunedeck(*(places.get(word, word) for word in words))
        said[command], codes[command] = sentences(outcome.err, recipe), outcome.code
    said["screen"], screen_codes = on_screen(profile, recipe)
    canonical = said["train"]
    assert len(canonical) == case.problems, canonical
    for command, found in said.items():
        if command not in case.exceptions:
            assert len(found) == case.problems, (command, found)
            assert all(any(same(each, known) for known in canonical) for each in found), (command, found, canonical)
    refused = {command for command, code in {**codes, **screen_codes}.items() if code != 0}
    assert refused == case.refused_by
    assert {codes[command] for command in refused & codes.keys() - case.exceptions} == {codes["train"]}
    assert not [run for run in tmp_path.glob("runs/*") if not run.name.startswith(".")] or "queue" not in refused
