"""`tunedeck doctor --gpus`: compares every fast computation that a run would use on each GPU with a plain reference (a
proof), and says what a run does instead where they differ.

GPUs are examined in separate processes, because a broken kernel can leave a process unable to use its GPU.

Try: `tunedeck doctor --gpus -p demo`
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.importing import importing
from engine.errors import EnvironmentProblem

if TYPE_CHECKING:
    from engine.device.base import GpuReading
    from engine.spec.schema.profile import Device
    from engine.spec.schema.run import RunSpec

FAST_PATHS: dict[str, list[str]] = {
    "full": ["model.dtype=auto", "method.kind=full"],
    "LoRA": ["model.dtype=auto", "method.kind=lora", "method.rank=16", "method.alpha=32"],
}
"""What is proved where no recipe is named: overrides of the recipe demo, whose model and data need no network."""
FREE_SHARE = 0.9
"""Share of a card's free memory that the proofs may use: another process may take some meanwhile."""

Outcome = tuple[str, dict[str, Any]]
"""(name of the device and the run that was examined, event `proof`), or (name, {"error": reason}) if the proofs ended
early."""


def prove_gpus(profile: str | None, recipe: str | None) -> Iterator[Outcome]:
    """Yield (name of device and run, `proof` event) for each proof, or {"error": reason} in place of the event if the
    proofs failed to run. Device: that of `profile`, else each GPU of this machine. Run: `recipe`, else a small LoRA run
    and a small full fine-tuning.

    Raises:
        EnvironmentProblem: no profile is named, and this machine has no GPU.
    """
    for name, spec in _specs(profile, recipe):
        with tempfile.TemporaryDirectory(prefix="tunedeck-proofs-") as folder:
            for event in _proved(spec, Path(folder)):
                yield name, event


def _specs(profile: str | None, recipe: str | None) -> Iterator[tuple[str, RunSpec]]:
    """Yield (name, run spec) for each way to train, on each device alone and on all devices together. The
    ways are `recipe`, or without one a small LoRA run and a small full fine-tuning. Without `profile`, weights are
    sharded over all GPUs of this machine, if it has several."""
    from engine.spec.load import resolve
    from engine.spec.schema.profile import Nodes, Parallel

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
    """(name, run spec) of a way to train on all devices of a machine, with the profile's own strategy."""
    from engine.budget.advise.strategy import settle_parallel
    from engine.spec.schema.profile import Nodes

    profile = spec.profile.model_copy(update={"nodes": Nodes()})
    limits = spec.limits.model_copy(update={"as_written": True})
    together = settle_parallel(spec.model_copy(update={"profile": profile, "limits": limits})).spec
    device, strategy = profile.device, together.profile.parallel.strategy
    return f"{device.count} {device.kind} devices, {strategy}, {way}", together


def _on_all_gpus(spec: RunSpec) -> RunSpec:
    """The run spec with weights sharded over all GPUs of this machine, as much of each as the fullest one has free."""
    from engine.spec.schema.profile import Device, Parallel

    readings = _readings()
    device = Device(kind="cuda", count=len(readings), memory_gib=min(map(_free_gib, readings)))
    hardware = {"device": device, "parallel": Parallel(strategy="sharded")}
    return spec.model_copy(update={"profile": spec.profile.model_copy(update=hardware)})


def _devices(of_profile: Device | None) -> Iterator[tuple[str, int, Device]]:
    """Yield (name, index, [device] table) for each device to examine: those of the profile's table `of_profile`, or
    without one all GPUs of this machine."""
    from engine.spec.schema.profile import Device

    if of_profile is not None:
        for index in range(of_profile.count if of_profile.kind == "cuda" else 1):
            yield f"{of_profile.kind} {index}", index, of_profile.model_copy(update={"count": 1})
        return
    readings = _readings()
    if not readings:
        raise EnvironmentProblem(
            "this machine has no NVIDIA GPU, or no driver for it",
            expected="a GPU that nvidia-smi lists",
            fix="see tunedeck doctor; to prove another device, name its profile: tunedeck doctor --gpus -p demo",
        )
    for reading in readings:
        yield f"gpu {reading.index}", reading.index, Device(kind="cuda", memory_gib=_free_gib(reading))


def _readings() -> list[GpuReading]:
    """The GPUs of this machine."""
    from engine.device.nvml import read_gpus

    return read_gpus()


def _free_gib(reading: GpuReading) -> float:
    return FREE_SHARE * (reading.total_bytes - reading.used_bytes) / 2**30


def _proved(spec: RunSpec, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the `proof` events for a run spec. The proofs run in a new process, whose run directory is in `folder`; if
    the process fails, {"error": reason} follows."""
    from engine.journal.directory import create_run_directory
    from engine.journal.events import EventTail
    from engine.launch.process import ENTRY_FILE, engine_environment
    from engine.spec.load import dump_run_spec

    place = create_run_directory(folder, spec.name, dump_run_spec(spec), {})
    command = [sys.executable, "-P", str(ENTRY_FILE), "_prove", str(place.path)]
    done = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, check=False)
    yield from (event for event in EventTail(place.events).poll() if event["kind"] == "proof")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("tunedeck: ")]
        yield {"error": (lines or done.stderr.splitlines() or ["ended without a word"])[-1].removeprefix("tunedeck: ")}


def prove_process(directory: Annotated[Path, typer.Argument()]) -> None:
    """Prove what the run in a directory would use; started by `doctor --gpus`, never by hand."""
    from engine.journal.directory import RunDirectory
    from engine.launch.environment import set_device_environment
    from engine.spec.load import load_run_spec

    place = RunDirectory(directory.absolute())
    spec = load_run_spec(place.run_toml, own=True)
    set_device_environment(spec)
    with importing():
        from engine.train.proofs.alone import prove_alone
        from engine.train.proofs.together import prove_together
    if spec.profile.device.count > 1:
        raise typer.Exit(prove_together(place))
    prove_alone(place)
