"""Runs in legs: some ranks train to a step, and a different number of ranks resumes from there. Not a test module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.distributed.ranks import Ranks
from engine.journal.directory import RunDirectory
from engine.train.run.main import run_other_rank, run_rank0
from engine.train.run.run_context import RunStart
from tests.distributed.rank_workbench import spec_of


def resumed_spec(
    folder: Path, ranks: int, tables: dict[str, Any], last_step: int, evaluation: dict[str, Any]
) -> RunSpec:
    """The spec of a run to `last_step`, at a constant learning rate, so that the losses do not depend on where a leg
    ends."""
    train = {**tables["train"], "max_steps": last_step, "scheduler": "constant", "warmup_steps": 0}
    asked = {"data": {"valid_fraction": 0.2}, "eval": evaluation, "generate": {"max_new_tokens": 3}}
    return spec_of(folder, ranks, {**tables, "train": train, **asked})


def run_on_ranks(ranks: Ranks, folder: Path, specs: Mapping[str, RunSpec], *, resume: bool) -> list[str]:
    """Run each of `specs` on these ranks, in the folder of its name; returns on rank 0 how each ended."""
    ended = []
    for name, spec in specs.items():
        place = RunDirectory(folder / name)
        if ranks.is_rank0:
            place.run_toml.write_text(dump_run_spec(spec))
            ended.append(run_rank0(RunStart(spec, place, ranks, resume))[0])
        else:
            run_other_rank(RunStart(spec, place, ranks, resume))
    return ended
