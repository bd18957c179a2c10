"""Probes of the schema walk: each takes a resolved spec and a folder, and returns what a user gets from the spec. Not a
test module.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine.architecture.lookup import find_config, find_facts
from engine.architecture.positions import scaled_config
from engine.batching.budget import CLEAN_STEPS_TO_GROW
from engine.budget.advise.plan import make_plan
from engine.budget.advise.preflight import warnings_of
from engine.checks import machine
from engine.checks.machine import missing_trackers
from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.config.stages import stage_specs
from engine.config.sweep import sweep_points
from engine.data.prepare import PreparedData, prepare_data
from engine.evaluate.run import score_model
from engine.extras.harness.harness import load_tasks, task_options
from engine.extras.jobs.cluster_scripts import Job, skypilot_task, slurm_script
from engine.extras.trackers.follow import tracked_run
from engine.journal.directory import create_run_directory
from engine.journal.events import EventWriter, Journal
from engine.launch.destinations import notes_on_destinations
from engine.launch.environment import device_environment
from engine.model.tokenizer import load_image_processor, load_tokenizer
from engine.train.run.main import run as train
from engine.train.run.setup import make_order
from engine.train.step.budget_growth import BudgetGrowth
from engine.verify.verify import PROOFS
from tests.events import read_events
from tests.train.run_helpers import Workshop

Probe = Callable[[RunSpec, Path], Any]


def plan(spec: RunSpec, folder: Path) -> Any:
    """The memory plan as JSON, and the warnings before a start."""
    return make_plan(spec).as_json(), list(warnings_of(find_facts(spec.recipe.model), spec, free_disk_bytes=1))


def positions(spec: RunSpec, folder: Path) -> Any:
    """The config with which the model is loaded, which includes the scaling of its rotary positions."""
    assert spec.recipe.model.rope_scaling is not None
    return scaled_config(find_config(spec.recipe.model.id), spec.recipe.model.rope_scaling)


def accepted(spec: RunSpec, folder: Path) -> Any:
    """A constant: this probe shows only that the spec is not refused."""
    return "accepted"


def tracked(spec: RunSpec, folder: Path) -> Any:
    """The trackers whose packages a start asks for, what they show, and whether they name the result."""
    run = create_run_directory(folder / "tracked", spec.name, dump_run_spec(spec), {})
    shown = tracked_run(run, "wandb")
    with patch.object(machine, "find_spec", return_value=None):
        return missing_trackers(spec.recipe), shown.project, shown.tags, shown.names_result


def destinations(spec: RunSpec, folder: Path) -> Any:
    """What is said at a start of where the run sends something (the whole of it: tests/train/test_destinations.py)."""
    return notes_on_destinations(spec.recipe.finish)


def data(spec: RunSpec, folder: Path) -> Any:
    """The tokens and labels of the training and the validation set."""
    prepared = _prepared(spec)
    return [
        [(example.input_ids.tolist(), example.labels.tolist()) for example in part] if part is not None else None
        for part in (prepared.train, prepared.validation)
    ]


def order(spec: RunSpec, folder: Path) -> Any:
    """The samples of the first steps, and the number of steps."""
    made, steps = make_order(_prepared(spec).train, spec)
    return [list(made.step(number)) for number in range(1, 4)], steps


IMPORT_SECONDS = 0.5
"""Processor time that a process takes at least to import the engine; measured: 2 to 4 s."""


def children(spec: RunSpec, folder: Path) -> Any:
    """Whether other processes tokenise the data (the cache is empty). Each imports the engine anew, which costs more
    processor time than the forks in which templates and regular expressions are tried."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with patch.dict(os.environ, {"TUNEDECK_CACHE": str(folder / "cache")}):
        _prepared(spec)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > before.ru_utime + IMPORT_SECONDS


def _prepared(spec: RunSpec) -> PreparedData:
    tokenizer = load_tokenizer(spec.recipe.model, trust_remote_code=False)
    return prepare_data(spec, tokenizer, load_image_processor(spec, tokenizer))


EVENT_FIELDS = {
    "step": ("step", "loss", "learning_rate", "grad_norm", "micro_batches"),
    "eval": ("step", "metrics", "samples", "count"),
    "checkpoint_saved": ("step",),
    "backoff": ("step", "remedy"),
    "warning": ("code",),
    "run_finished": ("status", "exit_code", "result"),
}
"""What two equal runs have in common in their events."""


def run(spec: RunSpec, folder: Path) -> Any:
    """Run the engine in this process; returns the run's events, its checkpoints with their micro-batch budgets, and its
    result."""
    place = create_run_directory(folder, spec.name, dump_run_spec(spec), {})
    train(place.path)
    events = [
        [event["kind"], *(event.get(field) for field in EVENT_FIELDS[event["kind"]]), event.get("mfu") is None]
        for event in read_events(place.events)
        if event["kind"] in EVENT_FIELDS
    ]
    files = [path for path in sorted(place.path.rglob("*")) if path.is_dir() or path.suffix == ".safetensors"]
    left = [(str(path.relative_to(place.path)), _digest(path)) for path in files]
    states = [json.loads(path.read_text()) for path in sorted(place.checkpoints.glob("*/state.json"))]
    return place.name.partition("-")[2], events, left, [state["budget"] for state in states]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def grown(spec: RunSpec, folder: Path) -> Any:
    """The micro-batch budget after clean steps that follow a cut to half."""
    workshop = Workshop(spec, folder)
    with workshop as setup:
        context = setup.context
        context.budget.budget_bytes //= 2
        context.budget.slope = 1.0
        growth = BudgetGrowth(context, Journal(EventWriter(workshop.place)))
        for step in range(2 * CLEAN_STEPS_TO_GROW):
            growth.after_step(step, clean=True)
        return context.budget.budget_bytes


def score(spec: RunSpec, folder: Path) -> Any:
    """The scores that `tunedeck eval` reports for the model."""
    scores = score_model(spec, lambda text: None)
    return scores.metrics, scores.samples, scores.count


def tasks(spec: RunSpec, folder: Path) -> Any:
    """The options with which lm-evaluation-harness is called; refuses a folder of tasks that is not there."""
    asked = spec.recipe.evaluate
    if asked.harness_include is not None:
        load_tasks(asked.harness, asked.harness_include)
    return task_options(asked, has_template=True)


def script(spec: RunSpec, folder: Path) -> Any:
    """The scripts for Slurm and SkyPilot."""
    job = Job(spec, Path("run.toml"), Path("runs"), "python", "tunedeck.py")
    nodes = spec.profile.nodes
    return skypilot_task(job, nodes.accelerators) if nodes.launcher == "skypilot" else slurm_script(job)


def environment(spec: RunSpec, folder: Path) -> Any:
    """The environment variables that the engine sets."""
    return device_environment(spec, {})


def stages(spec: RunSpec, folder: Path) -> Any:
    """The specs that the stages of a run train with."""
    return [each.model_dump(include={"name", "recipe"}) for each in stage_specs(spec)]


def proofs(spec: RunSpec, folder: Path) -> Any:
    """The names of the proofs that the run makes before its first step."""
    with Workshop(spec, folder) as setup:
        return [proof.name for proof in PROOFS if proof.applies(setup)]


def points(spec: RunSpec, folder: Path) -> Any:
    """The recipes of the runs that a sweep becomes."""
    return [each.recipe.model_dump() for each in sweep_points(spec)]
