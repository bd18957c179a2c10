"""The process of a stage with kind = "assemble": reads `assembly.json`, which the conductor wrote, and `run.toml` (the
recipe with its own [model]: the expert "base", hidden states of the router); writes `model/` and the journal."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from engine.config.files.find import BUILTIN_PREFIX
from engine.config.load import load_run_spec
from engine.config.schema.run import RunSpec
from engine.config.stages import BASE
from engine.errors import EnvironmentProblem, StoppedError, TunedeckError
from engine.extras.stages.assemble import Expert, Mixture, assemble_experts
from engine.journal.control import ControlInbox, RunRequests
from engine.journal.directory import HeldRunDirectory, RunDirectory
from engine.journal.events import EventWriter, heartbeats
from engine.journal.liveness import claim
from engine.model.config import HUB_ERRORS, loading_error, silence_libraries
from engine.model.reference import find_starting_weights


def assemble_stage(directory: Path) -> int:
    """Returns the exit code of the process; how it ended is in the stage's journal."""
    run = HeldRunDirectory(directory)
    spec = load_run_spec(run.run_toml, own=True)
    silence_libraries()
    with claim(run), EventWriter(run) as writer, heartbeats(writer):
        requests = RunRequests(ControlInbox(run), writer, None)
        with requests.handling_signals():
            return _assemble_and_record(spec, run, writer, requests)


def _assemble_and_record(spec: RunSpec, run: RunDirectory, writer: EventWriter, requests: RunRequests) -> int:
    started = time.monotonic()
    writer.write("run_started", run=run.name, pid=os.getpid(), world_size=1, versions=spec.provenance.versions)
    status, code, error, reason = "done", 0, None, ""
    try:
        _assemble(spec, run, writer, requests)
    except StoppedError as stop:
        status, code, reason = ("paused" if requests.ending == "pause" else "stopped"), stop.exit_code, requests.reason
    except TunedeckError as failure:
        traceback.print_exc()
        status, code, error = "failed", failure.exit_code, failure.render()
    writer.write(
        "run_finished",
        status=status,
        exit_code=code,
        result="model" if status == "done" else None,
        error=error,
        reason=reason,
        seconds=time.monotonic() - started,
    )
    return code


def _assemble(spec: RunSpec, run: RunDirectory, writer: EventWriter, requests: RunRequests) -> None:
    if run.model.is_dir():
        return  # complete: the process ended between the rename and its last event

    def notify(text: str) -> None:
        writer.write("phase", name=text)
        if requests.poll():
            raise StoppedError("stop requested")

    asked = json.loads(run.assembly.read_text("utf-8"))
    experts = [Expert(entry["name"], _folder_of(spec, entry)) for entry in asked["experts"]]
    rows = None
    if asked["router"] == "hidden":
        from engine.extras.stages.assemble import hidden_router_rows

        rows = hidden_router_rows(spec, [load_run_spec(entry["run_toml"]) for entry in asked["experts"]], notify)
    mixture = Mixture(experts, asked["experts_per_token"], asked["shared"], spec.recipe.train.seed, rows)
    difference = assemble_experts(mixture, run.model, notify)
    if difference.account is not None:
        writer.write("weights", **difference.account.event())
    if difference.averaged:
        writer.write(
            "warning",
            code="experts_differ",
            text=f"{len(difference.averaged)} parameters outside the experts differ and were averaged; the largest "
            f"relative difference is {difference.relative:.3g}, in {difference.parameter}",
            fix='train the feed-forward layers only: method.train_only = ["model.layers.*.mlp"] in the stages of '
            "the experts, or list parameters in `shared` to take those of the first expert",
        )


def _folder_of(spec: RunSpec, entry: dict[str, Any]) -> Path:
    """The folder with the weights of an expert; the recipe's own model is fetched from the hub if it is missing. Raises
    EnvironmentProblem if it cannot be fetched, or its weights are created in the run."""
    if entry["name"] != BASE:
        return Path(entry["weights"])
    start = find_starting_weights(spec.recipe.model)
    if start.folder is not None:
        return start.folder
    if start.base.startswith(BUILTIN_PREFIX) or spec.recipe.model.init == "random":
        raise EnvironmentProblem(
            f"{start.base} with new weights has no folder, so it cannot be an expert",
            expected='a folder, a model on the hub, or "run:RUN" as [model] where "base" is an expert',
            fix="set model.id to one of them",
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(start.base, revision=start.revision, allow_patterns=["*.json", "*.safetensors"]))
    except HUB_ERRORS as error:
        raise loading_error(error, start.base) from error
