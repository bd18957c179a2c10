"""Starts a stage when its turn has come: waits until no earlier stage holds memory of its devices, then creates its run
directory with run spec and plan."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.budget.advise.plan import make_plan
from engine.config.files.find import STAGE_PREFIX
from engine.config.load import dump_run_spec, load_run_spec
from engine.config.schema.recipe import Stage
from engine.config.schema.run import RunSpec
from engine.config.stages import BASE, origins, stage_of_reference, stage_spec
from engine.device.base import GpuProcess, GpuReading
from engine.device.co_tenant import CO_TENANT_VARIABLE, SharedByteCount
from engine.device.nvml import read_gpus
from engine.errors import ConfigNotHereError, EnvironmentProblem, UnknownArchitectureError
from engine.journal.directory import RunDirectory, create_stage_directory, rewrite_spec
from engine.journal.stages import stage_directory
from engine.launch.other_processes import with_simulations
from engine.model.reference import find_run_weights

LONGEST_WAIT_SECONDS = 30.0
"""A driver may take this long to release the memory of a process that has ended."""

POLL_SECONDS = 0.25


@dataclass(frozen=True)
class DeviceUse:
    used_bytes: int
    processes: tuple[GpuProcess, ...] = ()


def read_device_use(spec: RunSpec) -> DeviceUse:
    """On a metered device the holder is the co-tenant; on a CPU there is none."""
    if spec.profile.device.kind == "metered":
        held = os.environ.get(CO_TENANT_VARIABLE)
        return DeviceUse(SharedByteCount.open(Path(held)).held_bytes if held else 0)
    if spec.profile.device.kind != "cuda":
        return DeviceUse(0)
    readings = _selected(spec)
    processes = tuple(process for reading in readings for process in reading.processes)
    return DeviceUse(sum(reading.used_bytes for reading in readings), processes)


def _selected(spec: RunSpec) -> list[GpuReading]:
    """GPUs as CUDA will number them, by --devices and $CUDA_VISIBLE_DEVICES."""
    readings = read_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = {str(reading.index): reading for reading in readings} | {reading.uuid: reading for reading in readings}
        readings = [named[word.strip()] for word in visible.split(",") if word.strip() in named]
    wanted = spec.limits.devices or range(spec.profile.device.count)
    return [readings[index] for index in wanted if index < len(readings)]


def wait_until_released(spec: RunSpec, run: RunDirectory) -> DeviceUse:
    """Wait until no process of this run holds memory on its devices; returns the use by all others. Raises
    EnvironmentProblem, with the process ids, if one still does after LONGEST_WAIT_SECONDS."""
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while True:
        use = read_device_use(spec)
        own = [process for process in use.processes if _belongs_to(process, run)]
        if not own:
            return use
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in own)
            raise EnvironmentProblem(
                f"processes of an earlier stage still hold memory on the device: {pids}",
                expected="no earlier stage on the device when the next one starts",
                fix=f"end them with: kill -9 {pids.replace(',', '')}, then: tunedeck resume {run.name}",
            )
        time.sleep(POLL_SECONDS)


def _belongs_to(process: GpuProcess, run: RunDirectory) -> bool:
    """Its command line names a folder inside the run."""
    try:
        return any(word.startswith(f"{run.path}{os.sep}") for word in psutil.Process(process.pid).cmdline())
    except psutil.Error:
        return False  # gone, or another user's


def create_or_update_stage(spec: RunSpec, run: RunDirectory, stage: Stage, directory: RunDirectory) -> list[str]:
    """Create the stage's run directory, or write a changed spec into it; returns notices for the user. Raises
    UsageError when the weights that the stage starts from are not there."""
    resolved = resolved_stage_spec(spec, run, stage)
    text = dump_run_spec(resolved)
    if directory.exists():
        if load_run_spec(directory.run_toml, own=True) != resolved:
            rewrite_spec(directory, text)
        return []
    if stage.kind == "assemble":
        create_stage_directory(directory, text, {}, _assembly(spec, run, stage))
        return []
    plan, notices = _plan_of(resolved)
    create_stage_directory(directory, text, plan)
    return notices


def _assembly(spec: RunSpec, run: RunDirectory, stage: Stage) -> dict[str, Any]:
    """For assembly.json: the mixture's settings; each expert's name, weights and run spec (what data it learned
    from)."""
    numbers = {other.name: number for number, other in enumerate(spec.recipe.stages, 1)}
    experts = []
    for name in origins(stage):
        own = stage_directory(run, numbers[stage.name if name == BASE else name], stage.name if name == BASE else name)
        weights = "" if name == BASE else str(_folder_of(own))
        experts.append({"name": name, "weights": weights, "run_toml": str(own.run_toml)})
    return {
        "experts": experts,
        "experts_per_token": stage.experts_per_token or 2,
        "shared": stage.shared,
        "router": stage.router or "random",
    }


def _folder_of(stage: RunDirectory) -> Path:
    """The full (not adapter) weights that a stage ended with."""
    return stage.merged if stage.merged.is_dir() else find_run_weights(f"run:{stage.path}")


def resolved_stage_spec(spec: RunSpec, run: RunDirectory, stage: Stage) -> RunSpec:
    """A stage's run spec: "stage:NAME" in [model] becomes the weights of that stage's run, and max_hours, which is the
    whole run's, is removed. Raises UsageError if those weights do not exist."""
    alone = stage_spec(spec, stage)
    model = alone.recipe.model
    merged = alone.recipe.method.kind == "full"
    changes = {
        key: _weights_of(spec, run, text, merged=merged)
        for key in ("id", "adapter")
        if (text := getattr(model, key)) is not None and text.startswith(STAGE_PREFIX)
    }
    limits = alone.limits.model_copy(update={"max_hours": None})  # the conductor's clock covers all stages
    recipe = alone.recipe.model_copy(update={"model": model.model_copy(update=changes)})
    return alone.model_copy(update={"recipe": recipe, "limits": limits})


def _weights_of(spec: RunSpec, run: RunDirectory, reference: str, *, merged: bool) -> str:
    """The value of model.id or model.adapter for "stage:NAME[@STEP|@best]": "run:PATH[@STEP|@best]", which loads an
    adapter with its base; with `merged` and no step the folder of the stage's merged model, if that exists. Raises
    UsageError if the stage has no such weights."""
    name, which = stage_of_reference(reference)
    number = [other.name for other in spec.recipe.stages].index(name) + 1
    before = stage_directory(run, number, name)
    if merged and not which and before.merged.is_dir():
        return str(before.merged)
    weights = f"run:{before.path}" + (f"@{which}" if which else "")
    find_run_weights(weights)
    return weights


def _plan_of(spec: RunSpec) -> tuple[dict[str, Any], list[str]]:
    try:
        return with_simulations(lambda: make_plan(spec)).as_json(), []
    except (UnknownArchitectureError, ConfigNotHereError) as unknown:
        return {}, [f"no memory plan before the start: {unknown.found}"]
