"""Suites of measurements on a real GPU: does the engine run on it, and are the budget's predictions right?

Run: python -m benchmarks.gpu {smoke,budget,backoff,edge,speed} --out DIR [--limit SECONDS] [--device metered]

Each measurement runs in a process of its own, trains with real engines and writes one JSON file. A suite that was
interrupted continues where it stopped, and a measurement that fails is recorded with its error. With `--device metered`
the suites run small models on the simulated device, which tests the suites and says nothing about a GPU. The
measurements are in `benchmarks.gpu_suites`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu_runs import ROOT, Measurement, Result, SuiteDevice, kill_engines_in
from benchmarks.gpu_suites import SUITES, measurements_of
from engine.device.nvml import driver_version
from engine.journal.files import write_atomically

MOST_SECONDS = 7 * 24 * 3600.0
"""The limit if none is given: subprocess takes no infinite one."""
PACKAGES = ("torch", "transformers", "accelerate", "peft")


def machine(device: SuiteDevice) -> dict[str, Any]:
    """Describe the device and the versions of the software with which a result was measured."""
    return {
        "device": device.name,
        "simulated": device.kind == "metered",
        "memory_gib": round(device.memory_gib, 2),
        "driver": driver_version(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def run_suite(suite: str, out: Path, kind: str, limit_seconds: float) -> int:
    """Run the measurements of a suite that have no result in `out` yet, each in its own process; begin none after
    `limit_seconds`. `kind` is the device: "cuda" or "metered".

    Returns how many measurements failed or have no result.
    """
    device = SuiteDevice.of(kind)
    folder = out / suite
    folder.mkdir(parents=True, exist_ok=True)
    (out / "machine.json").write_text(json.dumps(machine(device), indent=1) + "\n", "utf-8")
    deadline = time.monotonic() + limit_seconds
    for measurement in measurements_of(suite, device):
        seconds_left = deadline - time.monotonic()
        if not (folder / f"{measurement.name}.json").exists() and seconds_left > 0:
            _in_a_process(suite, measurement, out, device, seconds_left)
    return _print_table(suite, folder, device)


def _in_a_process(suite: str, measurement: Measurement, out: Path, device: SuiteDevice, seconds_left: float) -> None:
    """Run one measurement of the suite in a new process, which writes its result into `out`; if the process fails,
    write a result with its error. After `seconds_left` the process is killed and there is no result. All processes
    share a state folder, so that each run calibrates later plans."""
    environment = {**os.environ, "TUNEDECK_STATE": str(out / "state"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", suite, "--out", str(out), "--device", device.kind]
    command += ["--cell", measurement.name, "--facts", device.as_json()]
    with _own_folder(_runs_of(suite, measurement.name, out)):
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=seconds_left, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return  # no result: the next start runs it again
    if done.returncode:
        _write(out / suite, measurement, {"ok": False, "error": done.stderr.strip()[-2000:]})


@contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Empty the folder of a measurement's runs before the block. After the block, whatever ended it, kill every process
    that still works in the folder, then delete weights, of which a suite would write hundreds of GB."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    finally:
        kill_engines_in(folder)
        for weights in folder.rglob("*.safetensors"):
            weights.unlink()


def _runs_of(suite: str, name: str, out: Path) -> Path:
    return out / "runs" / suite / name


def run_measurement(suite: str, name: str, out: Path, device: SuiteDevice) -> None:
    """Run the measurement `name` in this process, and write its result with the time taken to OUT/SUITE/NAME.json."""
    measurement = next(measurement for measurement in SUITES[suite](device) if measurement.name == name)
    began = time.monotonic()
    (out / suite).mkdir(parents=True, exist_ok=True)
    found = measurement.run(device, _runs_of(suite, name, out))
    _write(out / suite, measurement, found | {"seconds": round(time.monotonic() - began, 1)})


def _write(folder: Path, measurement: Measurement, found: Result) -> None:
    text = json.dumps({"cell": measurement.name, **found}, indent=1) + "\n"
    write_atomically(folder / f"{measurement.name}.json", text)


def _print_table(suite: str, folder: Path, device: SuiteDevice) -> int:
    """Print a line per measurement of the suite, from the results in `folder`. Returns how many measurements failed or
    have no result."""
    wrong = 0
    print(f"{suite} on {device.name}{' (simulated device: no figure of a card)' if device.kind == 'metered' else ''}")
    for measurement in measurements_of(suite, device):
        path = folder / f"{measurement.name}.json"
        found = json.loads(path.read_text("utf-8")) if path.exists() else {"ok": False, "error": "not run yet"}
        wrong += not found["ok"]
        said = found.get("said") or str(found.get("error", "")).rpartition("\n")[2]
        print(f"{'ok   ' if found['ok'] else 'WRONG'}  {measurement.name:<44} {said}")
    return wrong


def main() -> int:
    """Run a suite, or a single measurement of a suite. Returns 1 if a measurement failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--limit", type=float, default=MOST_SECONDS, help="seconds in all")
    parser.add_argument("--device", choices=["cuda", "metered"], default="cuda")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--facts", type=SuiteDevice.from_json, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    out = asked.out.absolute()
    if asked.cell:
        run_measurement(asked.suite, asked.cell, out, asked.facts or SuiteDevice.of(asked.device))
        return 0
    return 1 if run_suite(asked.suite, out, asked.device, asked.limit) else 0


if __name__ == "__main__":
    sys.exit(main())
