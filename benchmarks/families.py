"""Tries model families of transformers, each with LoRA and with full fine-tuning: plan, training, result.

Run: python -m benchmarks.families [--only NAME]... [--again] [--jobs N]        (CPU, about half an hour for all)

Each family is a tiny model with random weights (`benchmarks.family_configs`) in a process of its own. It is planned and
trained for three steps of eight sequences on the metered device: once with plenty of memory, once with so little that a
micro-batch does not fit and the run has to back off. The losses of both must be equal. The result is opened without
Tunedeck: an adapter with peft, beside its base and merged, a model with transformers; the logits must be those of the
engine's model. A family that cannot be trained must be refused by `recipes check`.

Results are saved in benchmarks/results/families.json after each family, so an interrupted run continues where it
stopped, and docs/evidence/families.md is written from them (`benchmarks.family_page`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.family_configs import REFUSED, TRAINED, model_type
from benchmarks.family_page import write_page

RESULTS = Path(__file__).resolve().parent / "results" / "families.json"
METHODS = ("lora", "full")
SECONDS = 900
"""A family that takes longer has failed."""
FOLDERS = ("TUNEDECK_STATE", "TUNEDECK_CACHE", "TUNEDECK_CONFIG", "HF_HOME")

Cell = dict[str, Any]
"""The results of a family with one method; `{"refused": sentence}`, or `{"failed": sentence}`."""


def try_family(name: str, folder: Path) -> dict[str, Cell]:
    """Train the family `name` with each method, or ask why it is refused; returns the results by method. Files are
    written into `folder`."""
    import torch

    from benchmarks.family_cell import refused, trained

    torch.set_num_threads(1)
    if name in REFUSED:
        return {method: refused(model_type(name), REFUSED[name], method, folder / method) for method in METHODS}
    return {method: trained(model_type(name), TRAINED[name], method, folder / method) for method in METHODS}


def _process(name: str, folder: str, answer: str) -> None:
    Path(answer).write_text(json.dumps(try_family(name, Path(folder))), "utf-8")


def in_own_process(name: str) -> dict[str, Cell]:
    """Try a family in a new process; returns the results by method. If the process ends without a result, or takes
    longer than SECONDS, every method has failed."""
    with tempfile.TemporaryDirectory(prefix="family-") as folder:
        answer = Path(folder, "answer.json")
        process = multiprocessing.get_context("forkserver").Process(target=_process, args=(name, folder, str(answer)))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        if answer.exists():
            found: dict[str, Cell] = json.loads(answer.read_text("utf-8"))
            return found
        return {method: {"failed": f"the process ended with code {process.exitcode}"} for method in METHODS}


def results_of(names: Iterable[str], jobs: int) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Yield (family, results by method) as each family is done; `jobs` families are tried at the same time."""
    # A new process is a copy of one that has imported torch already, which saves seconds for each family.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.family_cell"])
    with tempfile.TemporaryDirectory(prefix="families-") as folder, ThreadPoolExecutor(jobs) as pool:
        os.environ.update({name: str(Path(folder, name.lower())) for name in FOLDERS}, HF_HUB_OFFLINE="1")
        names = list(names)
        yield from zip(names, pool.map(in_own_process, names), strict=True)


def main() -> int:
    """Try families, save the results and write docs/evidence/families.md; returns 1 if any family failed, else 0."""
    every = [*TRAINED, *REFUSED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=every, metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also families that have results already")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    saved: dict[str, dict[str, Cell]] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    names = [name for name in asked.only or every if asked.again or name not in saved or _failed(saved[name])]
    for name, cells in results_of(names, asked.jobs):
        saved = {each: (saved | {name: cells})[each] for each in every if each in saved or each == name}
        RESULTS.write_text(json.dumps(saved, indent=1) + "\n", "utf-8")
        print(name, json.dumps(cells), flush=True)
    failed = [name for name in saved if _failed(saved[name])]
    missing = [name for name in every if name not in saved]
    write_page(saved)
    print(f"{len(saved)} families, {len(failed)} failed: {failed}; {len(missing)} missing")
    return 1 if failed or missing else 0


def _failed(cells: dict[str, Cell]) -> bool:
    return any("failed" in cell for cell in cells.values())


if __name__ == "__main__":
    sys.exit(main())
