"""A recipe with [sweep] becomes ordinary runs in the queue: they are planned before they are queued, and compared under
the sweep's name."""

from __future__ import annotations

import json
from pathlib import Path

from engine.config.load import load_run_spec
from engine.journal.directory import RunDirectory
from tests.cli.conftest import Tunedeck

GRID = 'sweep={"train.learning_rate" = [1e-3, 2e-3], "train.seed" = [1, 2, 3]}'


def test_a_sweep_is_a_run_for_each_combination_in_the_order_of_the_file(tunedeck: Tunedeck) -> None:
    found = json.loads(tunedeck("queue", "add", "-p", "demo", "-r", "demo", "--set", GRID, "--json").out)
    specs = [load_run_spec(RunDirectory(Path(run["path"])).run_toml) for run in found["runs"]]
    assert [(spec.recipe.train.learning_rate, spec.recipe.train.seed) for spec in specs] == [
        (rate, seed) for rate in (1e-3, 2e-3) for seed in (1, 2, 3)
    ]
    assert specs[0].name == "demo-learning_rate=0.001-seed=1"
    assert all(spec.provenance.sweep is not None and spec.provenance.sweep.id == found["sweep"] for spec in specs)
    assert all(spec.recipe.sweep == {} for spec in specs)
    waiting = json.loads(tunedeck("queue", "list", "--json").out)["runs"]
    assert [row["run"] for row in waiting] == [run["run"] for run in found["runs"]]
    compared = json.loads(tunedeck("compare", f"sweep:{found['sweep']}", "--json").out)
    assert compared["runs"] == [run["run"] for run in found["runs"]]
    assert list(compared["settings"]) == ["train.learning_rate", "train.seed"]


def test_a_point_that_does_not_fit_is_named_before_anything_starts(tunedeck: Tunedeck) -> None:
    grid = 'sweep={"data.max_length" = [256, 100000]}'
    scaled = ("--set", 'model.rope_scaling={type = "linear", factor = 64.0}')
    outcome = tunedeck("queue", "add", "-p", "demo", "-r", "demo", "--set", grid, *scaled)
    outcome.complains(3, "1 of 2 points", "max_length=100000", "--force")
    assert json.loads(tunedeck("runs", "--json").out) == []
    assert tunedeck("plan", "-p", "demo", "-r", "demo", "--set", grid, *scaled).code == 3
    refused = tunedeck("plan", "-p", "demo", "-r", "demo", "--set", grid)
    refused.complains(2, "100000 exceeds the 2048 positions", "rope_scaling")


def test_train_starts_the_runs_of_its_sweep_and_nothing_else_that_waits(tunedeck: Tunedeck) -> None:
    choice = ("-p", "demo", "-r", "demo", "--set", "train.max_steps=1")
    waiting = json.loads(tunedeck("queue", "add", *choice, "--json").out)["run"]
    swept = tunedeck("train", *choice, "--set", 'sweep."train.seed"=[5]')
    assert swept.code == 0 and "1 more waiting in the queue" in swept.err
    statuses = {run["run"]: run["status"] for run in json.loads(tunedeck("runs", "--json").out)}
    assert statuses.pop(waiting) == "queued" and list(statuses.values()) == ["done"]


def test_too_many_points_and_unknown_sweeps_are_refused(tunedeck: Tunedeck) -> None:
    seeds = 'sweep."train.seed"=' + str(list(range(65)))
    tunedeck("queue", "add", "-p", "demo", "-r", "demo", "--set", seeds).complains(2, "65 points", "at most 64")
    tunedeck("compare", "sweep:nothing").complains(2, "no runs belong to sweep 'nothing'")


def test_a_swept_value_that_is_not_allowed_is_a_problem_of_the_recipe(tunedeck: Tunedeck) -> None:
    outcome = tunedeck("queue", "add", "-p", "demo", "-r", "demo", "--set", 'sweep."train.seed"=[1, -2]')
    outcome.complains(2, "sweep", "-2")


def test_plan_and_fit_look_at_the_point_with_the_least_memory_left(tunedeck: Tunedeck) -> None:
    choice = ("-p", "demo", "-r", "demo", "--set", 'sweep."train.micro_batch"=[8, 2]')
    lines = tunedeck("plan", *choice).out.splitlines()
    assert [line.split()[-1] for line in lines] == ["demo-micro_batch=8", "demo-micro_batch=2", "demo-micro_batch=8"]
    assert all("GiB left" in line for line in lines[:2]) and "least memory" in lines[2]
    fitted = tunedeck("advise", *choice)
    assert fitted.code == 0 and "demo-micro_batch=8" in fitted.err


def test_a_key_of_a_stage_can_be_swept(tunedeck: Tunedeck) -> None:
    choice = ("-p", "demo", "-r", "demo", "--set", 'stages=[{name = "one"}]')
    sweep = 'sweep."stages.{}.train.learning_rate"=[1e-3, 2e-3]'
    found = json.loads(tunedeck("queue", "add", *choice, "--set", sweep.format("one"), "--json").out)
    specs = [load_run_spec(RunDirectory(Path(run["path"])).run_toml) for run in found["runs"]]
    assert [spec.recipe.stages[0].train["learning_rate"] for spec in specs] == [1e-3, 2e-3]
    tunedeck("plan", *choice, "--set", sweep.format("two")).complains(2, "sweep", "no entry named", "existing: one")
