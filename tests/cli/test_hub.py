"""What a run takes from the hub is refused before a run directory exists, if it is neither on this machine nor can be
fetched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.checks import machine
from engine.config.load import resolve
from engine.config.schema.run import RunSpec
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe

ROOT = Path(__file__).resolve().parents[2]
STAGES = '\n[[stages]]\nname = "first"\n\n[[stages]]\nname = "second"\nmodel = { id = "owner/other" }\n'
HELD = '\n[[data.validation]]\nname = "held"\nhub = "owner/held"\n'
SCORED = '\n[[evaluate.sources]]\nname = "scored"\nhub = "owner/Scored"\n'
SWEEP = '\n[sweep]\n"model.tokenizer" = ["builtin:bytes", "owner/words"]\n'

MISSING: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "a model": (("model.id=owner/model",), "", ("model owner/model is not in", "add --set model.id=FOLDER")),
    "a revision": (("model.id=owner/model", "model.revision=v2"), "", ("hf download owner/model --revision v2",)),
    "a tokenizer": (("model.tokenizer=owner/words",), "", ("tokenizer owner/words is", "--set model.tokenizer=FOLDER")),
    "an adapter": (
        ("method.kind=lora", "model.init=pretrained", "model.adapter=owner/lora"), "", ("adapter owner/lora is",)
    ),
    "data": (("data.sources.main.hub=owner/data",), "", ("data set owner/data", "--set data.sources.main.path=data")),
    "validation data": ((), HELD, ("data set owner/held is", "--set data.validation.held.path=data")),
    "data to score on": ((), SCORED, ("data set owner/Scored is", "--set evaluate.sources.scored.path=data")),
    "several": (("model.id=owner/model",), SCORED, ("model owner/model and data set owner/Scored are not in",)),
    "a stage's model": ((), STAGES, ("model owner/other is",)),
    "a tokenizer of a sweep": ((), SWEEP, ("tokenizer owner/words is",)),
}  # fmt: skip
"""Overrides, an end of the recipe, and words of the message."""


def asked_for(folder: Path, overrides: tuple[str, ...] = (), more: str = "") -> list[str]:
    """The options of a start with a recipe of this folder."""
    profile, recipe = write_profile(folder), write_recipe(folder, more=more)
    if any(text.startswith("data.sources.main.hub=") for text in overrides):
        recipe.write_text(recipe.read_text().replace('path = "data.jsonl"', 'hub = "owner/other"'))
    return ["-p", str(profile), "-r", str(recipe), *(word for text in overrides for word in ("--set", text))]


@pytest.mark.parametrize("command", ["train", "queue add"])
@pytest.mark.parametrize("kind", MISSING)
def test_offline_it_is_refused_with_what_to_type(tunedeck: Tunedeck, tmp_path: Path, command: str, kind: str) -> None:
    overrides, more, words = MISSING[kind]
    outcome = tunedeck(*command.split(), *asked_for(tmp_path, overrides, more))
    outcome.complains(6, *words, "and HF_HUB_OFFLINE is set", "fix: unset HF_HUB_OFFLINE; or hf download ")
    assert not (tmp_path / "runs").exists()


def cached(folder: Path, *names: str, commit: str = "0123") -> Path:
    """Files of owner/model in the hub cache below `folder`, as huggingface_hub would lay them; returns their folder."""
    repository = folder / "hub" / "models--owner--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for name in names:
        (snapshot / name).write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    return snapshot


@pytest.mark.parametrize(
    ("names", "overrides", "found"),
    [
        (["config.json"], (), True),  # random weights and the tokenizer of bytes
        (["config.json"], ("model.init=pretrained",), False),
        (["model.safetensors"], ("model.init=pretrained",), True),
        (["model.safetensors.index.json", "one.safetensors"], ("model.init=pretrained",), False),
        (["model.safetensors.index.json", "one.safetensors", "two.safetensors"], ("model.init=pretrained",), True),
        (["config.json"], ("model.tokenizer=",), False),
        (["config.json", "tokenizer.json"], ("model.tokenizer=",), True),
    ],
)
def test_what_is_whole_in_the_cache_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], overrides: tuple[str, ...], found: bool
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cached(tmp_path, *names)
    options = asked_for(tmp_path, ("model.id=owner/model", *overrides))
    assert (machine.missing_from_cache(spec_of(options)) == []) == found


def spec_of(options: list[str]) -> RunSpec:
    """The run spec that -p, -r and --set resolve to."""
    return resolve(options[1], options[3], options[5::2]).spec


def test_data_that_were_prepared_here_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_CACHE", str(tmp_path))
    spec = spec_of(asked_for(tmp_path, (), SCORED))
    (tmp_path / "datasets" / "owner___scored" / "default" / "0.0.0" / "89ab.incomplete").mkdir(parents=True)
    assert len(machine.missing_from_cache(spec)) == 1
    (tmp_path / "datasets" / "owner___scored" / "default" / "0.0.0" / "89ab").mkdir()
    assert machine.missing_from_cache(spec) == []


def test_a_folder_named_as_the_fix_says_makes_the_run(tunedeck: Tunedeck, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    options = asked_for(tmp_path, ("data.sources.main.hub=owner/data",))
    (tmp_path / "data.jsonl").rename(tmp_path / "data" / "rows.jsonl")
    tunedeck("queue", "add", *options).complains(6, "start with --set data.sources.main.path=data")
    assert tunedeck("queue", "add", *options[:-2], "--set", "data.sources.main.path=data").code == 0


@pytest.mark.parametrize("answers", [True, False])
def test_online_the_hub_is_asked_once(
    tunedeck: Tunedeck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    asked: list[str] = []

    def hub_answers() -> bool:
        asked.append("hub")
        return answers

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(machine, "hub_answers", hub_answers)
    outcome = tunedeck("queue", "add", *asked_for(tmp_path, (), SCORED + HELD))
    assert outcome.code == (0 if answers else 6) and len(asked) == 1
    if not answers:
        outcome.complains(6, "and the hub is not reachable", "fix: connect to the network and try again; or")


def test_a_hub_that_cannot_be_reached_does_not_answer() -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    code = "from engine.checks.machine import hub_answers; print(hub_answers())"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr
