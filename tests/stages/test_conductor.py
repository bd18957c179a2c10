"""Staged runs with real processes: order of stages, failures, requests, kills and resumes. The run's journal has each
event once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config.load import load_run_spec
from engine.errors import UsageError
from engine.evaluate.run import weights_to_score
from engine.extras.stages.create_stage import create_or_update_stage
from engine.journal.checkpoints_on_disk import find_checkpoints
from engine.journal.directory import RunDirectory
from engine.journal.index import resolve_run
from engine.journal.liveness import engine_process, is_alive
from engine.journal.stages import stage_directories, stage_directory
from engine.journal.summary import summarise
from engine.launch.process import start_engine
from engine.launch.resume_run import prepare_resume
from engine.model.reference import find_run_weights
from tests.events import read_events
from tests.stages.kill_anywhere import assert_story_told_once
from tests.stages.staged_runs import (
    assert_equal,
    conduct,
    ends_of,
    events_of,
    kill,
    kill_engine,
    new_staged_run,
    staged_spec,
    wait_for,
    weights_of,
    write_tiny_model,
)

CHAIN: list[dict[str, Any]] = [
    {"name": "one"},
    {"name": "two", "from": "one", "train": {"learning_rate": 5e-4}},
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = new_staged_run(folder, staged_spec(folder, CHAIN))
    assert conduct(run) == 0, run.log.read_text()
    return run


def test_a_chain_runs_to_its_end(undisturbed: RunDirectory) -> None:
    assert ends_of(undisturbed) == [("one", "done", 0), ("two", "done", 0)]
    assert_story_told_once(undisturbed)
    finished = events_of(undisturbed, "run_finished")[-1]
    assert (finished["status"], finished["result"]) == ("done", "stages/02-two/model")
    summary = summarise(undisturbed)
    assert (summary.status, summary.step, [stage["status"] for stage in summary.stages]) == ("done", 4, ["done"] * 2)


def test_a_stage_goes_on_from_the_weights_of_the_one_it_starts_from(undisturbed: RunDirectory) -> None:
    first, second = stage_directories(undisturbed)
    ends = [event["loss"] for event in read_events(first.events) if event["kind"] == "step"]
    starts = [event["loss"] for event in read_events(second.events) if event["kind"] == "step"]
    assert starts[0] < ends[0]
    assert f'id = "run:{first.path}"' in second.run_toml.read_text()
    with pytest.raises(AssertionError):
        assert_equal(weights_of(second), weights_of(first))


def test_a_stage_is_addressed_by_run_and_name(undisturbed: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = undisturbed.path.parent
    assert resolve_run("last/two", folder).path == stage_directories(undisturbed)[1].path
    with pytest.raises(UsageError, match="has not started a stage 'three'") as caught:
        resolve_run(f"{undisturbed.name}/three", folder)
    assert caught.value.expected == "one of: one, two"


def test_the_conductor_imports_no_torch() -> None:
    heavy = "[name for name in ('torch', 'transformers', 'peft') if name in sys.modules]"
    code = f"import sys, engine.extras.stages.conductor; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_failed_stage_skips_what_starts_from_it_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    nothing = {"sources": [{"name": "main", "path": str(tmp_path / "empty.jsonl")}]}
    stages: list[dict[str, Any]] = [
        {"name": "bad", "data": nothing},
        {"name": "after", "from": "bad"},
        {"name": "last", "from": "after"},
        {"name": "other"},
    ]
    run = new_staged_run(tmp_path, staged_spec(tmp_path, stages, train={"max_steps": 1}))
    assert conduct(run) == 5
    assert ends_of(run) == [("bad", "failed", 5), ("after", "skipped", 0), ("last", "skipped", 0), ("other", "done", 0)]
    summary = summarise(run)
    assert (summary.status, summary.exit_code) == ("failed", 5)
    assert "stage bad failed" in summary.reason
    assert "fix: " in (summary.last_error or "") and "empty.jsonl" in (summary.last_error or "")
    (tmp_path / "empty.jsonl").write_text((tmp_path / "samples.jsonl").read_text())
    prepare_resume(run, [], {})
    assert conduct(run, resume=True) == 0, run.log.read_text()
    assert_story_told_once(run)
    assert [row["status"] for row in summarise(run).stages] == ["done"] * 4


def test_a_killed_conductor_is_replaced_and_its_engine_is_adopted(tmp_path: Path, undisturbed: RunDirectory) -> None:
    run = new_staged_run(tmp_path, staged_spec(tmp_path, CHAIN))
    process = start_engine(run)
    wait_for(lambda: len(events_of(run, "step")) >= 1, process)
    kill(process)
    engine = engine_process(stage_directory(run, 1, "one"))
    assert engine is not None and is_alive(engine)
    assert conduct(run, resume=True) == 0, run.log.read_text()
    assert len([event for event in read_events(stage_directory(run, 1, "one").events)
                if event["kind"] == "run_started"]) == 1  # fmt: skip
    assert_equal(weights_of(stage_directory(run, 2, "two")), weights_of(stage_directory(undisturbed, 2, "two")))
    assert_story_told_once(run)


def test_a_killed_engine_fails_its_stage_and_resume_goes_on(tmp_path: Path, undisturbed: RunDirectory) -> None:
    run = new_staged_run(tmp_path, staged_spec(tmp_path, CHAIN))
    process = start_engine(run)
    wait_for(lambda: any(event["step"] >= 2 for event in events_of(run, "step")), process)
    kill_engine(stage_directory(run, 1, "one"))
    assert process.wait(120) == 137
    assert [end[:2] for end in ends_of(run)] == [("one", "failed"), ("two", "skipped")]
    prepare_resume(run, [], {})
    assert conduct(run, resume=True) == 0, run.log.read_text()
    assert_equal(weights_of(stage_directory(run, 2, "two")), weights_of(stage_directory(undisturbed, 2, "two")))
    assert_story_told_once(run)


def test_a_change_may_not_reach_into_a_stage_that_is_done(undisturbed: RunDirectory) -> None:
    with pytest.raises(UsageError, match="stage one is done"):
        prepare_resume(undisturbed, ["train.max_steps=8"], {})
    with pytest.raises(UsageError, match=r"stages\.two\.train\.batch_size"):
        prepare_resume(undisturbed, ["stages.two.train.batch_size=2"], {}, from_stage=None)
    with pytest.raises(UsageError, match="has no stage 'three'"):
        prepare_resume(undisturbed, [], {}, from_stage="three")


def test_a_refused_resume_from_a_stage_moves_nothing(undisturbed: RunDirectory) -> None:
    before = sorted(path.name for path in undisturbed.stages.iterdir()), undisturbed.run_toml.read_text()
    for overrides, reason in (
        (["stages.two.train.batch_size=2"], "model, data, seed and batch cannot change"),
        (["stages.one.train.max_steps=8"], "stage one is done"),
        (["stages.two.enabled=false"], "stage two is disabled"),
    ):
        with pytest.raises(UsageError, match=reason):
            prepare_resume(undisturbed, overrides, {}, from_stage="two")
    assert (sorted(path.name for path in undisturbed.stages.iterdir()), undisturbed.run_toml.read_text()) == before


def test_checkpoints_of_a_run_that_is_done_are_removed_and_the_result_stands_for_them(
    undisturbed: RunDirectory,
) -> None:
    one = stage_directories(undisturbed)[0]
    assert find_checkpoints(one.checkpoints) == []
    assert weights_to_score(one, None) == weights_to_score(one, "4") == [(4, one.model)]
    removed = r"the checkpoints of stage one \(steps 2, 4\) were removed when the run was done"
    with pytest.raises(UsageError, match=removed):
        weights_to_score(one, "2")
    with pytest.raises(UsageError, match=removed) as caught:
        find_run_weights(f"run:{one.path}@2")
    assert caught.value.fix == ("leave out the step; to keep checkpoints next time: --set stages.one.checkpoint.keep=2")
    with pytest.raises(UsageError, match=removed):
        prepare_resume(one, ["train.max_steps=8"], {})


def test_a_stage_is_done_again_with_those_that_start_from_it(tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [
        {"name": "one"},
        {"name": "two", "from": "one"},
        {"name": "other", "checkpoint": {"keep": 1}},
    ]
    run = new_staged_run(tmp_path, staged_spec(tmp_path, stages, train={"max_steps": 1}))
    assert conduct(run) == 0, run.log.read_text()
    prepare_resume(run, ["stages.two.train.max_steps=2"], {}, from_stage="two")
    assert (run.stages / ".old-1" / "02-two").is_dir()
    assert conduct(run, resume=True) == 0, run.log.read_text()
    assert [end[0] for end in ends_of(run)] == ["one", "two", "other", "two"]
    assert [row["steps"] for row in summarise(run).stages] == [1, 2, 1]
    copied = [event["stage_seq"] for event in read_events(run.events) if event["stage"] == "two"]
    assert copied.count(copied[0]) == 2, "the second time is told from its start, too"
    kept = [[saved.step for saved in find_checkpoints(stage.checkpoints)] for stage in stage_directories(run)]
    assert kept == [[], [], [1]], "a stage that names checkpoint.keep keeps its checkpoints"


def test_a_stage_that_is_begun_takes_changed_settings_and_is_else_left_as_it_is(tmp_path: Path) -> None:
    spec = staged_spec(tmp_path, CHAIN[:1])
    run = new_staged_run(tmp_path, spec)
    (stage,), directory = spec.recipe.stages, stage_directory(run, 1, "one")
    create_or_update_stage(spec, run, stage, directory)
    written = directory.run_toml.stat()
    create_or_update_stage(spec, run, stage, directory)
    assert directory.run_toml.stat() == written
    other = staged_spec(tmp_path, [{**CHAIN[0], "train": {"learning_rate": 5e-4}}])
    create_or_update_stage(other, run, other.recipe.stages[0], directory)
    assert load_run_spec(directory.run_toml, own=True).recipe.train.learning_rate == 5e-4


def test_plan_json_has_a_plan_for_each_stage(undisturbed: RunDirectory) -> None:
    plan = json.loads(undisturbed.plan_json.read_text())
    assert plan["verdict"] == "fits"
    assert [(stage["name"], stage["kind"], stage["verdict"]) for stage in plan["stages"]] == [
        ("one", "train", "fits"), ("two", "train", "fits"),
    ]  # fmt: skip
    first = plan["stages"][0]
    assert first["peak_bytes"] == first["plan"]["peak_bytes"]
    (weights,) = {row["weights"] for row in first["plan"]["phases"].values()}
    assert first["host_bytes"] >= 3 * weights, "weights and two moments of each, while a checkpoint is written"
    assert first["disk_bytes"] >= 4 * 3 * weights, "two checkpoints that are kept, the best, and one being written"


def test_an_adapter_is_merged_for_the_stage_that_trains_all_weights(tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [
        {"name": "adapter", "method": {"kind": "lora", "rank": 2}, "finish": {"merge": True}},
        {"name": "all", "from": "adapter", "method": {"kind": "full"}},
    ]
    run = new_staged_run(tmp_path, staged_spec(tmp_path, stages, train={"max_steps": 2}))
    assert conduct(run) == 0, run.log.read_text()
    first, second = stage_directories(run)
    assert f'id = "{first.merged}"' in second.run_toml.read_text()
    losses = [event["loss"] for stage in (first, second) for event in read_events(stage.events)
              if event["kind"] == "step"]  # fmt: skip
    assert losses[2] < losses[0], "the second stage starts where the first one ended"


def test_experts_are_assembled_and_the_mixture_is_trained(tmp_path: Path) -> None:
    only_mlp = {"kind": "full", "train_only": ["model.layers.*.mlp"]}
    stages: list[dict[str, Any]] = [
        {"name": "a", "method": only_mlp, "train": {"seed": 1}},
        {"name": "mixture", "kind": "assemble", "from": ["a", "base"], "router": "hidden"},
        {"name": "whole", "from": "mixture"},
    ]
    model = {"id": str(write_tiny_model(tmp_path / "base")), "init": "pretrained"}
    run = new_staged_run(tmp_path, staged_spec(tmp_path, stages, train={"max_steps": 1}, model=model))
    assert conduct(run) == 0, run.log.read_text()
    expert, mixture, whole = stage_directories(run)
    name = "model.layers.0.mlp.{}gate_proj.weight"
    assembled = load_file(mixture.model / "model-00001-of-00001.safetensors")
    assert torch.equal(assembled[name.format("experts.0.")], weights_of(expert)[name.format("")])
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert torch.equal(assembled[name.format("experts.1.")], base[name.format("")])
    assert "experts_differ" not in [event["code"] for event in events_of(run, "warning")]
    assert whole.model.is_dir() and summarise(run).status == "done"


def test_a_stage_finds_the_one_it_starts_from_wherever_the_run_is(undisturbed: RunDirectory, tmp_path: Path) -> None:
    """Copied, with the original still in its place, and moved."""
    copied = RunDirectory(tmp_path / "elsewhere" / undisturbed.name)
    shutil.copytree(undisturbed.path, copied.path)
    second = stage_directories(copied)[1]

    def start() -> str:
        return load_run_spec(second.run_toml).recipe.model.id

    assert start() == f"run:{stage_directories(copied)[0].path}"
    assert find_run_weights(start()).is_relative_to(copied.path)
    # The stage of another run, which the run itself starts from, stays where it is.
    other = stage_directories(undisturbed)[0].path
    copied.run_toml.write_text(copied.run_toml.read_text().replace('id = "builtin:tiny"', f'id = "run:{other}"', 1))
    assert start() == f"run:{other}"
