"""What a user gets from a resolved run, from cheap to dear: what surrounds it, its plan, training, scores, an answer.

An observation is a function of (spec, folder). It returns what two equal runs have in common, and the texts in which a
key may be named; it raises TunedeckError where the run is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from engine.budget.advise.plan import make_plan
from engine.budget.advise.preflight import warnings_of
from engine.budget.advise.staged_plan import make_staged_plan
from engine.checks import machine
from engine.checks.machine import missing_trackers
from engine.checks.run import DATA, LAUNCHED, PLAN, check_run
from engine.commands.launch import _launcher
from engine.commands.train import finish_run
from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.config.stages import stage_specs
from engine.config.sweep import sweep_points
from engine.data.prompts import PromptTokens
from engine.device.open import open_device
from engine.evaluate.run import score_model
from engine.extras.chat.answer import Conversation, Speaker
from engine.extras.chat.sources import ChatSource, load_sources
from engine.extras.harness.harness import task_options
from engine.extras.jobs.cluster_scripts import Job, skypilot_task, slurm_script
from engine.extras.trackers.follow import tracked_run
from engine.journal.directory import RunDirectory, create_run_directory
from engine.launch.create_run import prepare_run
from engine.launch.destinations import notes_on_destinations
from engine.launch.environment import device_environment
from engine.launch.process import start_engine
from engine.model.load import load_model
from engine.model.tokenizer import load_tokenizer
from engine.model.trained import parameter_groups
from engine.train.run.main import run
from engine.train.step.optimizer import Schedule
from engine.verify.verify import PROOFS
from tests.config import schema_probes
from tests.config.schema_probes import EVENT_FIELDS
from tests.events import read_events
from tests.train.run_helpers import Workshop


class Seen(NamedTuple):
    """What an observation showed."""

    value: Any
    texts: tuple[str, ...] = ()
    crashed: str = ""
    """The error of a run that ended with an exception which nobody expected."""


Observation = Callable[[RunSpec, Path], Seen]


def surroundings(spec: RunSpec, folder: Path) -> Seen:
    """The name, environment variables, job scripts, trackers, tasks, destinations, and points of a sweep."""
    job = Job(spec, Path("run.toml"), Path("runs"), "python", "tunedeck.py")
    place = create_run_directory(folder / "around", spec.name, dump_run_spec(spec), {})
    shown = tracked_run(place, "wandb")
    with patch.object(machine, "find_spec", return_value=None):
        missing = missing_trackers(spec.recipe)
    sends = notes_on_destinations(spec.recipe.finish)
    points = [point.recipe.model_dump(mode="json") for point in sweep_points(spec)] if spec.recipe.sweep else []
    stages = [each.recipe.model_dump(mode="json") for each in stage_specs(spec)] if spec.recipe.stages else []
    target = _launcher(spec, None, False, False) if spec.profile.nodes.launcher else None
    value = [
        target, spec.name, device_environment(spec, {}), slurm_script(job),
        skypilot_task(job, spec.profile.nodes.accelerators),
        missing, shown.project, shown.tags, shown.names_result, sends, points, stages,
        task_options(spec.recipe.evaluate, has_template=True),
    ]  # fmt: skip
    return Seen(json.dumps(value, default=str), tuple(sends))


def plan(spec: RunSpec, folder: Path) -> Seen:
    """The memory plan, and every sentence before a start."""
    shutil.rmtree(Path(os.environ["TUNEDECK_CACHE"], "lengths"), ignore_errors=True)
    check_run(spec, DATA).require()
    admitted = check_run(spec, PLAN, folder=folder).require()
    notes = [*admitted.notices, *admitted.reported]
    if spec.recipe.stages:
        made = make_staged_plan(admitted.spec, admitted.facts).as_json()
    else:
        facts = admitted.facts.of(spec.recipe.model)
        made = make_plan(admitted.spec, facts=facts).as_json()
        notes += warnings_of(facts, admitted.spec, free_disk_bytes=1)
    prepare_run(spec, folder, force=True, command=LAUNCHED)
    return Seen((made, notes), tuple(notes))


def steps(spec: RunSpec, folder: Path) -> Seen:
    """The learning rates of a run of a hundred steps, the tokens of the data, and the samples of the first steps."""
    spec = first_run(spec)
    rates = Schedule.of(spec.recipe.train, 100)
    return Seen([[rates.factor(step) for step in range(1, 101)], schema_probes.data(spec, folder),
                 schema_probes.order(spec, folder)])  # fmt: skip


def weights(spec: RunSpec, folder: Path) -> Seen:
    """The parameters that are trained, their dtypes, the optimizer's settings, and how attention is computed."""
    spec = first_run(spec)
    device = open_device(spec)
    with device.activate():
        loaded = load_model(spec, device, load_tokenizer(spec.recipe.model))
        named = loaded.trainable()
        groups = parameter_groups(named, spec.recipe.train, loaded.names_of(name for name, _ in named))
        first = [float(parameter.detach().float().abs().sum()) for _, parameter in named[:8]]
        value = [[(name, str(parameter.dtype), list(parameter.shape)) for name, parameter in named], first,
                 [(group["names"], group["lr"], group["weight_decay"]) for group in groups],
                 loaded.attention, loaded.config.to_json_string()]  # fmt: skip
        return Seen(value, tuple(loaded.notices))


def checks(spec: RunSpec, folder: Path) -> Seen:
    """The names of the checks at the start of the engine, and the batches that it makes of the memory."""
    with Workshop(first_run(spec), folder) as setup:
        context = setup.context
        return Seen(
            [[proof.name for proof in PROOFS if proof.applies(setup)], context.budget.budget_bytes, context.ladder]
        )


def first_run(spec: RunSpec) -> RunSpec:
    """The run itself, or its first stage, which is a run."""
    admitted = check_run(spec, PLAN).require().spec
    return stage_specs(admitted)[0] if spec.recipe.stages else admitted


def train(spec: RunSpec, folder: Path) -> Seen:
    """The events and the files of the engine's run, in this process."""
    place = create_run_directory(folder, spec.name, dump_run_spec(first_run(spec)), {})
    with contextlib.redirect_stderr(io.StringIO()):
        run(place.path)
        finish_run(place.path)
    return seen_of(place)


def train_in_ranks(spec: RunSpec, folder: Path) -> Seen:
    """The same of a process for each device."""
    place = create_run_directory(folder, spec.name, dump_run_spec(check_run(spec, PLAN).require().spec), {})
    engine = start_engine(place)
    try:
        engine.wait(timeout=300)
    finally:
        engine.kill()
    return seen_of(place)


def seen_of(place: RunDirectory) -> Seen:
    """The events of a run, its checkpoints and their budgets, and its result."""
    events = list(read_events(place.events))
    value = [
        [event["kind"], *(event.get(field) for field in EVENT_FIELDS[event["kind"]]), event.get("mfu") is None]
        for event in events
        if event["kind"] in EVENT_FIELDS
    ]
    proofs = [(event["name"], event["passed"]) for event in events if event["kind"] == "proof"]
    files = sorted(path for path in place.path.rglob("*") if path.suffix in KEPT or path.name == "best")
    left = [(str(path.relative_to(place.path)), _digest(path)) for path in files if path.name not in VARIED]
    budgets = [json.loads(path.read_text())["budget"] for path in sorted(place.checkpoints.glob("*/state.json"))]
    texts = tuple(event["text"] for event in events if event["kind"] == "warning")
    end = next((event for event in events if event["kind"] == "run_finished"), {})
    crashed = str(end.get("error") or "no end") if end.get("exit_code", 1) == 1 else ""
    return Seen(json.dumps([value, proofs, left, budgets, end.get("error"), end.get("reason")]), texts, crashed)


KEPT = (".safetensors", ".json", ".jsonl")

VARIED = ("events.jsonl", "state.json", "plan.json", "manifest.json", "engine.json", "calibration.json")
"""Files that are not the same in two equal runs."""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def score(spec: RunSpec, folder: Path) -> Seen:
    """The scores of `tunedeck eval` for the model."""
    notes: list[str] = []
    scores = score_model(spec, notes.append)
    return Seen(json.dumps([scores.metrics, scores.samples, scores.count], default=str), tuple(notes))


def tasks(spec: RunSpec, folder: Path) -> Seen:
    """The options of public tasks, with the folder of the user's own."""
    return Seen(schema_probes.tasks(spec, folder))


def chat(spec: RunSpec, folder: Path) -> Seen:
    """The first answer of a chat, and the prompt as the model saw it."""
    notes: list[str] = []
    device = open_device(spec)
    with device.activate():
        (model,) = load_sources([ChatSource("it", spec, None)], device, notes.append)
        tokens = PromptTokens("it", model.loaded.tokenizer, spec, plain=False, think=None)
        conversation = Conversation(spec.recipe.data.system_prompt)
        conversation.ask("When is Ann's birthday?")
        answer = Speaker(model, tokens, spec.recipe.generate, notes.append).answer(conversation, 0)
        return Seen(json.dumps([answer.token_ids, tokens.text(conversation.messages())]), tuple(notes))
