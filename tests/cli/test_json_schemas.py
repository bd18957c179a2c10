"""What the commands print with --json, and every event of a small run, are as `tunedeck schema` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from engine.commands.json_schemas import Document, json_schema
from engine.journal.event_schema import EVENT_KINDS
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe
from tests.train.run_helpers import make_spec, new_run, train, write_samples


def validate(document: Any, name: Document) -> None:
    made = json_schema(name)
    jsonschema.Draft202012Validator.check_schema(made)
    jsonschema.Draft202012Validator(made).validate(document)


@pytest.mark.parametrize("name", get_args(Document))
def test_each_schema_is_published_with_its_version(tunedeck: Tunedeck, name: str) -> None:
    printed = json.loads(tunedeck("schema", name).out)
    assert printed["version"] == 1 and printed["$id"] == f"urn:tunedeck:{name}:1"


def test_events_of_every_kind_are_in_the_schema() -> None:
    kinds = {each["if"]["properties"]["kind"]["const"]: each["then"] for each in json_schema("events")["allOf"]}
    assert kinds.keys() == EVENT_KINDS.keys()
    assert kinds["warning"]["required"] == ["code", "text", "fix"]


STAGES = '\n[[stages]]\nname = "one"\n[[stages]]\nname = "two"\nfrom = "one"\n'


@pytest.mark.parametrize("more", ["", STAGES, '\n[sweep]\n"train.seed" = [1, 2]\n'], ids=["run", "stages", "sweep"])
def test_plans_have_all_required_keys(tunedeck: Tunedeck, tmp_path: Path, more: str) -> None:
    recipe, profile = write_recipe(tmp_path, more=more), write_profile(tmp_path)
    done = tunedeck("plan", "-p", profile, "-r", recipe, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    plan = document.get("stages", document.get("points", [{"plan": document}]))[0]["plan"]
    assert set(plan) == set(json_schema("plan")["anyOf"][0]["required"])
    validate(document, "plan")


@pytest.mark.parametrize("recipe", ["demo", "full"])
def test_advice_has_all_required_keys(tunedeck: Tunedeck, recipe: str) -> None:
    changes = ["--set", "model.id=Qwen/Qwen2.5-7B"] if recipe == "full" else []
    document = json.loads(
        tunedeck("advise", "-p", "demo" if recipe == "demo" else "24gb", "-r", recipe, *changes, "--json").out
    )
    made = json_schema("advise")["properties"]
    for each in (*document["suggestions"], *document["room"]):
        assert set(each) == set(made["room"]["items"]["required"])
    assert document["suggestions"] or document["room"]
    validate(document, "advise")


def test_the_model_list(tunedeck: Tunedeck) -> None:
    listed = json.loads(tunedeck("models", "qwen2.5-0.5b", "--json").out)
    assert [set(each) for each in listed] == [set(json_schema("models")["items"]["required"])]
    assert [answer["method"] for answer in listed[0]["answers"]] == ["LoRA", "4-bit LoRA", "full"]
    validate(listed, "models")


def test_a_run_and_its_events(tunedeck: Tunedeck, tmp_path: Path) -> None:
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), train={"max_steps": 2}, checkpoint={"every_steps": 1})
    code, events = train(new_run(tmp_path / "runs", spec))
    assert code == 0 and {"run_started", "step", "checkpoint_saved", "run_finished"} <= {e["kind"] for e in events}
    listed = json.loads(tunedeck("runs", "--runs", tmp_path / "runs", "--json").out)
    assert [set(each) for each in listed] == [set(json_schema("runs")["items"]["required"])]
    validate(listed, "runs")
    for event in events:
        validate(event, "events")
