"""`tunedeck doctor --gpus`: compares every fast computation that a run would use on each GPU with a plain reference (a
proof), and says what a run does instead where they differ.

GPUs are examined in separate processes, because a broken kernel can leave a process unable to use its GPU.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.shared import importing
from engine.errors import EnvironmentProblem

if TYPE_CHECKING:
    from engine.config.schema.run import Device, RunSpec
    from engine.device.base import GpuReading

FAST_PATHS: dict[str, list[str]] = {
    "full": ["model.dtype=auto", "method.kind=full"],
    "LoRA": ["model.dtype=auto", "method.kind=lora", "method.rank=16", "method.alpha=32"],
}
"""Where no recipe is named: overrides of the recipe demo, whose model and data need no network."""
FREE_SHARE = 0.9
"""The proofs' share of a card's free memory: another process may take some meanwhile."""

Outcome = tuple[str, dict[str, Any]]
"""(device and run, `proof` event), or (device and run, {"error": reason}) if the proofs ended early."""


def prove_gpus(profile: str | None, recipe: str | None) -> Iterator[Outcome]:
    """The outcome of each proof, on the device of `profile` or each GPU, for `recipe` or a small LoRA run and a small
    full fine-tuning. Raises EnvironmentProblem: no profile is named, and this machine has no GPU."""
    for name, spec in _specs(profile, recipe):
        with tempfile.TemporaryDirectory(prefix="tunedeck-proofs-") as folder:
            for event in _proved(spec, Path(folder)):
                yield name, event


def _specs(profile: str | None, recipe: str | None) -> Iterator[tuple[str, RunSpec]]:
    """(name, run spec) for each way to train, on each device alone and on all together: without `profile`, weights are
    sharded over all GPUs, if there are several."""
    from engine.config.load import resolve
    from engine.config.schema.run import Nodes, Parallel

    ways: dict[str, list[str]] = {recipe: []} if recipe else FAST_PATHS
    for way, overrides in ways.items():
        spec = resolve(profile or "demo", recipe or "demo", overrides).spec
        for name, index, device in _devices(spec.profile.device if profile else None):
            hardware = {"device": device, "parallel": Parallel(), "nodes": Nodes()}
            limits = spec.limits.model_copy(update={"devices": [index], "as_written": True})
            changes = {"profile": spec.profile.model_copy(update=hardware), "limits": limits}
            yield f"{name}, {way}", spec.model_copy(update=changes)
        if profile and spec.profile.device.count > 1:
            yield _together(spec, way)
        elif not profile and len(_readings()) > 1:
            yield _together(_on_all_gpus(spec), way)


def _together(spec: RunSpec, way: str) -> tuple[str, RunSpec]:
    from engine.budget.advise.parallel import settle_parallel
    from engine.config.schema.run import Nodes

    profile = spec.profile.model_copy(update={"nodes": Nodes()})
    limits = spec.limits.model_copy(update={"as_written": True})
    together = settle_parallel(spec.model_copy(update={"profile": profile, "limits": limits})).spec
    device, strategy = profile.device, together.profile.parallel.strategy
    return f"{device.count} {device.kind} devices, {strategy}, {way}", together


def _on_all_gpus(spec: RunSpec) -> RunSpec:
    """Weights sharded over all GPUs, as much of each as the fullest one has free."""
    from engine.config.schema.run import Device, Parallel

    readings = _readings()
    device = Device(kind="cuda", count=len(readings), memory_gib=min(map(_free_gib, readings)))
    hardware = {"device": device, "parallel": Parallel(strategy="sharded")}
    return spec.model_copy(update={"profile": spec.profile.model_copy(update=hardware)})


def _devices(of_profile: Device | None) -> Iterator[tuple[str, int, Device]]:
    """(name, index, [device] table) of the profile's devices, or without one of all GPUs."""
    from engine.config.schema.run import Device

    if of_profile is not None:
        for index in range(of_profile.count if of_profile.kind == "cuda" else 1):
            yield f"{of_profile.kind} {index}", index, of_profile.model_copy(update={"count": 1})
        return
    readings = _readings()
    if not readings:
        raise EnvironmentProblem(
            "this machine has no NVIDIA GPU, or no driver for it",
            expected="a GPU that nvidia-smi lists",
            fix="see tunedeck doctor; to check another device, add its profile: tunedeck doctor --gpus -p demo",
        )
    for reading in readings:
        yield f"gpu {reading.index}", reading.index, Device(kind="cuda", memory_gib=_free_gib(reading))


def _readings() -> list[GpuReading]:
    from engine.device.nvml import read_gpus

    return read_gpus()


def _free_gib(reading: GpuReading) -> float:
    return FREE_SHARE * (reading.total_bytes - reading.used_bytes) / 2**30


def _proved(spec: RunSpec, folder: Path) -> Iterator[dict[str, Any]]:
    """The `proof` events of a new process with its run directory in `folder`; {"error": reason} follows if it fails."""
    from engine.config.load import dump_run_spec
    from engine.journal.directory import create_run_directory
    from engine.journal.events import EventTail
    from engine.launch.process import ENTRY_FILE, engine_environment

    place = create_run_directory(folder, spec.name, dump_run_spec(spec), {})
    command = [sys.executable, "-P", str(ENTRY_FILE), "_prove", str(place.path)]
    done = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, check=False)
    yield from (event for event in EventTail(place.events).poll() if event["kind"] == "proof")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("tunedeck: ")]
        yield {
            "error": (lines or done.stderr.splitlines() or ["ended without an error message"])[-1].removeprefix(
                "tunedeck: "
            )
        }


def prove_process(directory: Annotated[Path, typer.Argument()]) -> None:
    """Prove what the run in a directory would use; started by `doctor --gpus`, never by hand."""
    from engine.config.load import load_run_spec
    from engine.journal.directory import RunDirectory
    from engine.launch.environment import set_device_environment

    place = RunDirectory(directory.absolute())
    spec = load_run_spec(place.run_toml, own=True)
    set_device_environment(spec)
    with importing():
        from engine.train.run.doctor import prove_alone, prove_together
    if spec.profile.device.count > 1:
        raise typer.Exit(prove_together(place))
    prove_alone(place)
