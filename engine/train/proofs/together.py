"""Runs the proofs of a run on several devices without training it, with a rank for each device.

The ranks are started as those of a run, by torch's elastic agent. The last proof ends them: one kills itself.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from engine.device import open_device
from engine.device.determinism import deterministic_kernels
from engine.distributed.elastic import (
    exit_without_cleanup,
    is_rank,
    set_up_rank_process,
    spec_of_rank,
    start_ranks,
)
from engine.distributed.ranks import Ranks
from engine.distributed.warm_up import warm_up
from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.spec.load import load_run_spec
from engine.spec.schema.run import RunSpec
from engine.train.main import as_rank
from engine.train.monitor.journal import Journal
from engine.train.proofs.prove import prove
from engine.train.proofs.ranks import lost_rank
from engine.train.proofs.table import DOCTOR_PROOFS
from engine.train.recovery.oom_report import oom_reporter
from engine.train.setup import set_up


def prove_together(place: RunDirectory) -> int:
    """Start a rank for each device of the run in `place`, or work as one of them if this process is one; returns the
    exit code. Rank 0 writes the outcomes of the proofs to the run's journal.

    Raises:
        EnvironmentProblem: a rank was killed, crashed or did not answer; the message names it.
        TunedeckError: the run cannot be set up, or a proof left the device unusable.
    """
    spec = load_run_spec(place.run_toml, own=True)
    if is_rank(place):
        set_up_rank_process(place, int(os.environ["RANK"]))
        code = as_rank(spec, partial(_prove_as_rank, spec, place))
        return exit_without_cleanup(code) if code else code
    began = time.monotonic()
    trouble = start_ranks(spec, place, ["_prove", str(place.path)])
    if lost_rank.has_begun(place):
        _judge_rehearsal(spec, place, trouble, time.monotonic() - began)
    elif trouble:
        raise EnvironmentProblem(
            f"the ranks could not make their proofs: {trouble}", fix="see which device: tunedeck doctor --gpus"
        )
    return 0


def _judge_rehearsal(spec: RunSpec, place: RunDirectory, trouble: str, seconds: float) -> None:
    limit_seconds = spec.profile.parallel.timeout_seconds
    result = lost_rank.judge(place, spec.profile.device.count, limit_seconds, trouble, round(seconds, 4))
    with EventWriter(place) as writer:
        writer.write("proof", **asdict(result))


def _prove_as_rank(spec: RunSpec, place: RunDirectory, ranks: Ranks) -> int:
    device = open_device(spec_of_rank(spec, ranks.local_rank))
    with ExitStack() as stack:
        writer = stack.enter_context(EventWriter(place)) if ranks.is_rank0 else None
        stack.enter_context(device.activate())
        stack.enter_context(deterministic_kernels(spec.recipe.train.deterministic, device.kind))
        journal = Journal(writer)
        if device.kind == "cuda":
            warm_up(device, ranks.patience_seconds)
            journal.write_notices(device.fit_capacity())
        setup = set_up(spec, device, journal, oom_reporter(journal, device), ranks)
        prove(setup, journal, proofs=DOCTOR_PROOFS, afresh=True)
    lost_rank.rehearse(place, ranks)
