"""What only a real card can say, as suites of cells: does the engine run there, and is the budget right about it?

Run: python -m benchmarks.gpu {smoke,budget,backoff,edge} --out DIR [--limit SECONDS] [--device metered]

A cell is a fresh process that trains with real engines and writes one JSON file; a run that is broken off goes on where
it stopped, and a cell that fails is recorded with its reason. With `--device metered` the same cells run small on the
simulated device: that shows that the suites work, and says nothing about a card. What the cells do is
`benchmarks.gpu_cells`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu_cells import SUITES, Cell, Ground
from engine.device.nvml import driver_version
from engine.journal.files import write_atomically

PACKAGES = ("torch", "transformers", "accelerate", "peft")


def machine(ground: Ground) -> dict[str, Any]:
    """What a result must be read with."""
    return {
        "device": ground.name,
        "simulated": ground.kind == "metered",
        "memory_gib": round(ground.memory_gib, 2),
        "driver": driver_version(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def run_suite(suite: str, out: Path, kind: str, limit_seconds: float) -> int:
    """Run the cells that have no result yet, each in its own process; how many went wrong."""
    ground = Ground.of(kind)
    folder = out / suite
    folder.mkdir(parents=True, exist_ok=True)
    (out / "machine.json").write_text(json.dumps(machine(ground), indent=1) + "\n", "utf-8")
    deadline = time.monotonic() + limit_seconds
    for cell in SUITES[suite](ground):
        seconds_left = deadline - time.monotonic()
        if not (folder / f"{cell.name}.json").exists() and seconds_left > 0:
            _in_a_process(suite, cell, out, kind, seconds_left)
    return _print_table(suite, folder, ground)


def _in_a_process(suite: str, cell: Cell, out: Path, kind: str, seconds_left: float) -> None:
    """One cell; what it writes in its own state folder calibrates the plans of later cells of the suite."""
    environment = {**os.environ, "TUNEDECK_STATE": str(out / "state"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", suite, "--out", str(out), "--device", kind, "--cell", cell.name]
    try:
        done = subprocess.run(
            command, env=environment, timeout=seconds_left, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return  # no result: the next start tries it again
    if done.returncode:
        _write(out / suite, cell, {"ok": False, "error": done.stderr.strip()[-2000:]})


def run_cell(suite: str, name: str, out: Path, kind: str) -> None:
    """The body of a cell's process."""
    ground = Ground.of(kind)
    cell = next(cell for cell in SUITES[suite](ground) if cell.name == name)
    began = time.monotonic()
    (out / suite).mkdir(parents=True, exist_ok=True)
    found = cell.run(ground, out / "runs" / suite / name)
    _write(out / suite, cell, found | {"seconds": round(time.monotonic() - began, 1)})


def _write(folder: Path, cell: Cell, found: dict[str, Any]) -> None:
    write_atomically(folder / f"{cell.name}.json", json.dumps({"cell": cell.name, **found}, indent=1) + "\n")


def _print_table(suite: str, folder: Path, ground: Ground) -> int:
    """A line per cell, in the suite's order; how many went wrong or are missing."""
    wrong = 0
    print(f"{suite} on {ground.name}{' (simulated device: no figure of a card)' if ground.kind == 'metered' else ''}")
    for cell in SUITES[suite](ground):
        path = folder / f"{cell.name}.json"
        found = json.loads(path.read_text("utf-8")) if path.exists() else {"ok": False, "error": "not run yet"}
        wrong += not found["ok"]
        said = found.get("said") or str(found.get("error", "")).rpartition("\n")[2]
        print(f"{'ok   ' if found['ok'] else 'WRONG'}  {cell.name:<44} {said}")
    return wrong


def main() -> int:
    """Run a suite, or one cell of it; 1 when anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--device", choices=["cuda", "metered"], default="cuda")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    out = asked.out.absolute()
    if asked.cell:
        run_cell(asked.suite, asked.cell, out, asked.device)
        return 0
    return 1 if run_suite(asked.suite, out, asked.device, asked.limit) else 0


if __name__ == "__main__":
    sys.exit(main())
