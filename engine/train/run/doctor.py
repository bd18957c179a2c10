"""The processes of `tunedeck doctor --gpus`: the proofs of a run on one device, or with a rank on each, without
training it.

Ranks are started as those of a run, by torch's elastic agent. At last one kills itself: the others must notice within
the time limit of votes, and note how long it took in the run directory; the supervisor, which outlives them, judges.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import NoReturn

from engine.config.load import load_run_spec
from engine.config.schema.run import RunSpec
from engine.device.determinism import deterministic_kernels
from engine.device.open import open_device
from engine.distributed.elastic import (
    exit_without_cleanup,
    is_rank,
    set_up_rank_process,
    spec_of_rank,
    start_ranks,
)
from engine.distributed.ranks import Ranks
from engine.distributed.votes import LostRankError
from engine.distributed.warm_up import warm_up
from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter, Journal
from engine.train.run.main import as_rank
from engine.train.run.oom_report import oom_reporter
from engine.train.run.setup import set_up
from engine.verify.among_ranks import exchange, refuse_shared_cards
from engine.verify.record import ProofResult
from engine.verify.verify import DOCTOR_PROOFS, prove

LOST_RANK = "lost_rank"
FOLDER = "lost-rank"
"""Folder in the run directory: a file of each rank that went into the rehearsal, with the time when it noticed."""
MARGIN_SECONDS = 5.0
"""How much longer than a vote's time limit may pass: the process must be scheduled, too."""


def prove_alone(place: RunDirectory) -> None:
    """Set up the run in `place`, run all its proofs without using results of earlier runs, and write the outcomes to
    its journal.

    Raises:
        TunedeckError: the run cannot be set up, or a proof left the device unusable.
    """
    spec = load_run_spec(place.run_toml, own=True)
    device = open_device(spec)
    deterministic = deterministic_kernels(spec.recipe.train.deterministic, device.kind)
    with EventWriter(place) as writer, device.activate(), deterministic:
        journal = Journal(writer)
        prove(set_up(spec, device, journal, oom_reporter(journal, device)), journal, afresh=True)


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
    if has_begun(place):
        limit_seconds, size = spec.profile.parallel.timeout_seconds, spec.profile.device.count
        result = judge(place, size, limit_seconds, trouble, round(time.monotonic() - began, 4))
        with EventWriter(place) as writer:
            writer.write("proof", **asdict(result))
    elif trouble:
        raise EnvironmentProblem(
            f"the ranks could not run their checks: {trouble}", fix="to find the device, run: tunedeck doctor --gpus"
        )
    return 0


def _prove_as_rank(spec: RunSpec, place: RunDirectory, ranks: Ranks) -> int:
    device = open_device(spec_of_rank(spec, ranks.local_rank))
    with ExitStack() as stack:
        writer = stack.enter_context(EventWriter(place)) if ranks.is_rank0 else None
        stack.enter_context(device.activate())
        stack.enter_context(deterministic_kernels(spec.recipe.train.deterministic, device.kind))
        journal = Journal(writer)
        if device.kind == "cuda":
            refuse_shared_cards(device, ranks)
            warm_up(device, ranks.patience_seconds)
            journal.write_notices(device.fit_capacity())
        setup = set_up(spec, device, journal, oom_reporter(journal, device), ranks)
        prove(setup, journal, proofs=DOCTOR_PROOFS, afresh=True)
    rehearse(place, ranks)


def rehearse(place: RunDirectory, ranks: Ranks) -> NoReturn:
    """Kill this process if it is the last rank; else vote until the loss is noticed, and note how long it took. All
    ranks call this, as their last act.

    Raises:
        LostRankError: always, on a rank that has noticed.
        RuntimeError: the loss was not noticed within the time limit.
    """
    folder = place.path / FOLDER
    if ranks.is_rank0:
        folder.mkdir()
    exchange(ranks, None)
    # The elastic agent ends the other ranks as soon as one is gone.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exchange(ranks, None)
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began, error = time.monotonic(), _noticed(ranks)
    seconds = time.monotonic() - began
    (folder / f"rank-{ranks.rank}").write_text(f"{seconds:.3f}", "utf-8")
    if error is None:
        raise RuntimeError(f"the end of rank {ranks.size - 1} was not noticed within {seconds:.0f} s")
    raise error


def _noticed(ranks: Ranks) -> LostRankError | None:
    """Vote until another rank is lost; returns the error, None if votes still succeed when the time limit is over."""
    votes, deadline = ranks.voted_group(), time.monotonic() + ranks.patience_seconds
    while time.monotonic() < deadline:
        try:
            votes.ready()
        except LostRankError as error:
            return error
    return None


def has_begun(place: RunDirectory) -> bool:
    """Whether the ranks of the run in `place` got as far as `rehearse`."""
    return (place.path / FOLDER).is_dir()


def judge(place: RunDirectory, size: int, limit_seconds: float, trouble: str, seconds: float) -> ProofResult:
    """The outcome, once all `size` ranks have ended. `trouble` is what the supervisor says of their end, `seconds` how
    long they took, `limit_seconds` the time limit of votes."""
    notes = [place.path / FOLDER / f"rank-{rank}" for rank in range(size - 1)]
    took = [float(note.read_text("utf-8")) if note.is_file() else float("inf") for note in notes]
    late = [rank for rank, each in enumerate(took) if each > limit_seconds + MARGIN_SECONDS]
    killed = f"rank {size - 1} was killed"
    if late:
        detail = f"ranks {', '.join(map(str, late))} did not notice within {limit_seconds:.0f} s that {killed}"
    elif not trouble.startswith(killed):
        detail = f"the supervisor reports: {trouble or 'nothing'}; but {killed}"
    else:
        return ProofResult(
            LOST_RANK, True, f"all other ranks notice a killed rank within {max(took):.2f} s", seconds=seconds
        )
    fallback = "the run may hang when a rank is lost; to stop it: tunedeck stop RUN"
    return ProofResult(LOST_RANK, False, detail, fallback, seconds)
