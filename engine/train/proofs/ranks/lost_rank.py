"""Proof: a rank that is killed is noticed by every other rank within the time limit of votes, and by the supervisor.

The last rank kills itself after all other proofs. The other ranks vote until they notice, and leave a note of the time
in the run directory; the supervisor, which outlives them, judges.

Try: `tunedeck doctor --gpus -p demo-2`
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

from engine.distributed.host_gather import LostRankError
from engine.distributed.ranks import Ranks
from engine.journal.directory import RunDirectory
from engine.train.proofs.ranks.exchange import exchange
from engine.train.proofs.record import ProofResult

NAME = "lost_rank"
FOLDER = "lost-rank"
"""Folder in the run directory: a file of each rank that went into the rehearsal, and then of when it noticed."""
MARGIN_SECONDS = 5.0
"""How much longer than a vote's time limit may pass: the process must be scheduled, too."""


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
    began, error = time.monotonic(), noticed(ranks)
    seconds = time.monotonic() - began
    (folder / f"rank-{ranks.rank}").write_text(f"{seconds:.3f}", "utf-8")
    if error is None:
        raise RuntimeError(f"the loss of rank {ranks.size - 1} was not noticed in {seconds:.0f} s")
    raise error


def noticed(ranks: Ranks) -> LostRankError | None:
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
    notes = {rank: place.path / FOLDER / f"rank-{rank}" for rank in range(size - 1)}
    took = {rank: _seconds(note) for rank, note in notes.items()}
    late = [rank for rank, each in took.items() if each is None or each > limit_seconds + MARGIN_SECONDS]
    killed = f"rank {size - 1} was killed"
    if late:
        detail = f"ranks {', '.join(map(str, late))} did not notice within {limit_seconds:.0f} s that {killed}"
    elif not trouble.startswith(killed):
        detail = f"the supervisor says: {trouble or 'nothing'}; but {killed}"
    else:
        slowest = max(each for each in took.values() if each is not None)
        return ProofResult(NAME, True, f"a killed rank is noticed by all others in {slowest:.2f} s", seconds=seconds)
    fallback = "it may hang when a rank is lost: watch it, and stop it with tunedeck stop"
    return ProofResult(NAME, False, detail, fallback, seconds)


def _seconds(note: Path) -> float | None:
    return float(note.read_text("utf-8")) if note.is_file() else None
