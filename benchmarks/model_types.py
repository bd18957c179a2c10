"""Tries all model types that the installed transformers opens as a causal language model, or as one of images and text.

Run: python -m benchmarks.model_types [--only TYPE]... [--quick] [--again] [--jobs N]       (CPU, seconds a type)

Each type is a tiny model with random weights and a vocabulary of 50,000 (`benchmarks.type_configs`), in a process of
its own with a limit of processor time (`benchmarks.type_cell`). What the gate refuses is not trained. All else is
planned and trained on the metered device with LoRA and in full, resumed, packed, cut into rows, and opened without
Tunedeck in the base's class.

With --quick no runs are made: no plan is compared with a measured peak, and nothing is resumed.

Results are saved in benchmarks/results/model_types.json after each type, so an interrupted run continues where it
stopped, and docs/evidence/model-types.md is written from them (`benchmarks.type_page`).
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from typing import Any

from benchmarks.type_configs import every_type
from benchmarks.type_page import write_page

RESULTS = Path(__file__).resolve().parent / "results" / "model_types.json"
PROCESSOR_SECONDS, SECONDS = 300, 1800
"""Of processor time and of time for a type; what takes longer has failed."""
FOLDERS = ("TUNEDECK_STATE", "TUNEDECK_CACHE", "TUNEDECK_CONFIG", "HF_HOME")

QUICK = ("gate", "lora", "full", "merged", "split", "packing")
COLUMNS = (*QUICK, "plan, LoRA", "plan, full", "resume")

Cells = dict[str, dict[str, Any]]
"""The results of a type by column; see `benchmarks.type_cell.Cell`."""


def _process(model_type: str, folder: str, answer: str, known: Cells, measure: bool) -> None:
    from benchmarks.type_cell import cells_of

    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))

    def keep(cells: Mapping[str, Any]) -> None:
        Path(answer).write_text(json.dumps(cells), "utf-8")

    cells_of(model_type, Path(folder), known, keep, measure=measure)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{model_type}: {used.ru_utime + used.ru_stime:.1f} s of processor time", flush=True)
    os._exit(0)  # what the interpreter does at its end is the parent's to do


def in_own_process(model_type: str, known: Cells, measure: bool) -> Cells:
    """Try what is not `known` of a type in a new process; returns its results by column. If the process ends early,
    "ended" says so."""
    with tempfile.TemporaryDirectory(prefix="family-") as folder:
        answer = Path(folder, "answer.json")
        arguments = model_type, f"{folder}/work", str(answer), known, measure
        process = multiprocessing.get_context("fork").Process(target=_process, args=arguments)
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        found: Cells = json.loads(answer.read_text("utf-8")) if answer.exists() else {}
        if process.exitcode != 0:
            found["ended"] = {"failed": f"ended with code {process.exitcode}, after at most {PROCESSOR_SECONDS} s"}
        return found


def results_of(known: Mapping[str, Cells], jobs: int, *, measure: bool) -> Iterator[tuple[str, Cells]]:
    """Yield (type, results by column) as each type in `known` is done, of which these results are there already; `jobs`
    types are tried at the same time."""
    with tempfile.TemporaryDirectory(prefix="families-") as folder, ThreadPoolExecutor(jobs) as pool:
        os.environ.update({name: str(Path(folder, name.lower())) for name in FOLDERS}, HF_HUB_OFFLINE="1")
        _warm_up(Path(folder))
        yield from zip(known, pool.map(in_own_process, known, known.values(), repeat(measure)), strict=True)


def _warm_up(folder: Path) -> None:
    """Try a type in this process: those of the others are copies of it, in which everything is imported already."""
    import torch

    from benchmarks.type_cell import cells_of

    torch.set_num_threads(1)
    cells_of("llama", folder / "warm", measure=False)
    gc.collect()
    gc.freeze()  # the engine collects often


def saved_results() -> dict[str, Any]:
    """What was saved: "versions" of packages, "every" type with what transformers opens it as, and the results of those
    tried so far, "types"."""
    if not RESULTS.exists():
        return {"versions": {}, "every": {}, "types": {}}
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    return found


def _versions() -> dict[str, str]:
    return {package: version(package).partition("+")[0] for package in ("transformers", "peft", "torch")}


def main() -> int:
    """Try types, save the results and write docs/evidence/model-types.md; returns 1 if any cell failed, else 0."""
    every = every_type()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=every, metavar="TYPE")
    parser.add_argument("--again", action="store_true", help="also types that have results already")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="without runs, which measure plans and resume")
    asked = parser.parse_args()
    results = saved_results()["types"]
    complete = QUICK if asked.quick else COLUMNS
    names = [name for name in asked.only or every if asked.again or not _is_done(results.get(name, {}), complete)]
    known = {name: {} if asked.again else results.get(name, {}) for name in names}
    for name, cells in results_of(known, asked.jobs, measure=not asked.quick):
        results = saved_results()["types"] | {name: cells}  # another process may have saved others
        results = {each: results[each] for each in every if each in results}
        document = {"versions": _versions(), "every": every, "types": results}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        print(name, json.dumps(cells), flush=True)
    failed = [name for name in results if _failed(results[name])]
    missing = [name for name in every if name not in results]
    write_page(saved_results())
    print(f"{len(results)} types, {len(failed)} with a cell that failed: {failed}; {len(missing)} missing")
    return 1 if failed or missing else 0


def _is_done(cells: Cells, columns: tuple[str, ...]) -> bool:
    """Whether a type has all these columns and none has failed, or is refused by the gate."""
    needed = set(columns)
    if "refused" in cells.get("lora", {}):
        needed = {"gate", "full"}
    elif "refused" in cells.get("full", {}):
        needed -= {"plan, full"}
    return not _failed(cells) and ("refused" in cells.get("gate", {}) or needed <= cells.keys())


def _failed(cells: Cells) -> bool:
    return any("failed" in cell for cell in cells.values())


if __name__ == "__main__":
    sys.exit(main())
