"""Fixes of mixtures assembled from experts, and of a checkpoint from before remainders of bf16 weights were kept."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engine.config.load import dump_run_spec
from engine.journal.directory import RunDirectory
from engine.journal.stages import stage_directories
from tests.cli.conftest import Tunedeck
from tests.cli.small_recipes import write_profile, write_recipe
from tests.fixes.conftest import Given
from tests.fixes.rows import text_of, was_given
from tests.stages.staged_runs import conduct, events_of, new_staged_run, staged_spec, write_tiny_model
from tests.train.run_helpers import make_spec, new_run, of_kind, train, write_samples

WALKED = (
    "extras/stages/assembly_process:_assemble", "launch/create_run:_hidden_router_does_not_fit",
    "train/strategy/checkpoint_storage:_without_remainders",
)  # fmt: skip
"""The fix texts that the tests below execute."""

STAGES = """
[[stages]]
name = "a"
data = { max_length = 16 }
[[stages]]
name = "mixture"
kind = "assemble"
from = ["a", "base"]
router = "hidden"
"""


def assembled(folder: Path, method: dict[str, Any], **mixture: Any) -> tuple[list[str], list[str]]:
    """Codes and fixes of the warnings of a run that assembles an expert and the model that it started from."""
    stages: list[dict[str, Any]] = [
        {"name": "a", "method": method},
        {"name": "mixture", "kind": "assemble", "from": ["a", "base"], "router": "random", **mixture},
    ]
    folder.mkdir()
    model = {"id": str(write_tiny_model(folder / "base")), "init": "pretrained"}
    train = {"max_steps": 2, "warmup_steps": 0}
    run = new_staged_run(folder, staged_spec(folder, stages, train=train, model=model))
    assert conduct(run) == 0, run.log.read_text()
    warnings = events_of(stage_directories(run)[1], "warning")
    return [event["code"] for event in warnings], [event["fix"] for event in warnings]


def test_experts_do_not_differ_outside_once_they_are_trained_as_the_warning_says(tmp_path: Path) -> None:
    codes, fixes = assembled(tmp_path / "all", {"kind": "full"})
    assert codes == ["experts_differ"]
    (fix,) = fixes
    assert fix == text_of("extras/stages/assembly_process:_assemble").text
    told = fix.partition("method.train_only = ")[2].partition(" in the stages")[0]
    assert assembled(tmp_path / "only", {"kind": "full", "train_only": json.loads(told)})[0] == []
    assert assembled(tmp_path / "shared", {"kind": "full"}, shared=["**"])[0] == []


def test_a_router_of_hidden_states_that_does_not_fit_is_replaced_as_the_fix_says(
    tunedeck: Tunedeck, tmp_path: Path, given: Given
) -> None:
    write_profile(tmp_path, ('kind = "cpu"', 'kind = "metered"'), ("8.0", "0.008"), name="small")
    model = str(write_tiny_model(tmp_path / "base"))
    changes = (
        ('id = "builtin:tiny"', f'id = "{model}"'), ('init = "random"\n', ""), ("max_length = 64", "max_length = 9000"),
        ('tokenizer = "builtin:bytes"\n', ""),
    )  # fmt: skip
    write_recipe(tmp_path, *changes, name="staged", more=STAGES)
    words = ("queue", "add", "-p", "small.toml", "-r", "staged.toml")
    refused = tunedeck(*words)
    assert refused.code == 3 and "stage mixture does not fit" in refused.err, refused.err
    assert was_given(text_of("launch/create_run:_hidden_router_does_not_fit"), given), given
    given.clear()
    change = refused.err.partition("--set ")[2].partition(",")[0]
    for more in (("--set", change), ("--set", "data.max_length=64"), ("--force",)):
        added = tunedeck(*words, *more)
        assert added.code == 0, added.err
    assert not was_given(text_of(WALKED[1]), given)


def as_older_version(place: RunDirectory) -> None:
    """The checkpoint as a version without `train.rounding` wrote it."""
    (checkpoint,) = place.checkpoints.iterdir()
    state, manifest = checkpoint / "state.json", checkpoint / "manifest.json"
    saved = json.loads(state.read_text())
    for key in ("rounding", "state_dtype"):
        del saved["identity"]["recipe"]["train"][key]
    state.write_text(json.dumps(saved))
    listed = json.loads(manifest.read_text())
    content = state.read_bytes()
    listed["files"]["state.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(listed))


def test_an_older_checkpoint_is_resumed_with_the_keys_that_the_fix_names(tmp_path: Path, given: Given) -> None:
    samples = write_samples(tmp_path / "rows.jsonl", count=16)
    rounded = {"rounding": "nearest", "state_dtype": "bfloat16"}

    def spec(steps: int, **keys: str) -> str:
        few = {"max_steps": steps, "batch_size": 2, "scheduler": "constant", **keys}
        return dump_run_spec(make_spec(samples, model={"dtype": "bfloat16"}, train=few))

    place = new_run(tmp_path / "runs", make_spec(samples))
    place.run_toml.write_text(spec(1, **rounded))
    assert train(place)[0] == 0
    as_older_version(place)
    place.run_toml.write_text(spec(2))
    code, events = train(place, resume=True)
    assert code == 2 and was_given(text_of("train/strategy/checkpoint_storage:_without_remainders"), given), events[-1]
    told = of_kind(events, "run_finished")[-1]["error"].partition("fix: set ")[2].partition(" in run.toml")[0]
    pairs = dict(part.replace("train.", "").split(" = ") for part in told.split(", "))
    place.run_toml.write_text(spec(2, **{key: json.loads(value) for key, value in pairs.items()}))
    assert train(place, resume=True)[0] == 0
