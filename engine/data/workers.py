"""Tokenises the rows of a source in this process or in several, in row order and with bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal

from engine.config.files.cgroups import free_memory_bytes
from engine.data.formats import Format
from engine.data.pieces import Piece
from engine.data.records import SourceRows
from engine.data.tokenise import Tokeniser
from engine.errors import EnvironmentProblem

Workers = int | Literal["auto"]
"""Processes that tokenise; 0: this one alone; auto: as many as the measured rate makes worth their start."""

IN_FLIGHT_PER_WORKER = 2
"""Pieces submitted ahead of the one being written, per worker."""

TRIAL_SECONDS = 2.0
"""How long this process tokenises alone before auto decides by its rate."""

START_SECONDS = 15.0
"""Work that a process must take over to be worth its start: it imports transformers."""

WORKER_BYTES = 1 << 30
"""Host memory that a process needs: the libraries, the tokenizer and two pieces."""

MOST_WORKERS = 16


def tokenise_rows(
    rows: SourceRows, format_: Format, tokeniser: Tokeniser, *, workers: Workers, first: int = 0
) -> Iterator[Piece]:
    """The rows of a source from row `first` on, tokenised; equal for any number of `workers`. Raises EnvironmentProblem
    when a process is killed."""
    if workers != "auto" and workers > 0:
        yield from _in_processes(rows, format_, tokeniser, workers, first)
        return
    deciding, started = workers == "auto", time.monotonic()
    for start, stop in rows.spans(first):
        yield _piece(rows, format_, tokeniser, start, stop)
        taken = time.monotonic() - started
        if deciding and taken >= TRIAL_SECONDS:
            deciding = False
            number = workers_for(taken / (stop - first) * (rows.count - stop))
            if number and _can_be_sent(rows, format_, tokeniser):
                yield from _in_processes(rows, format_, tokeniser, number, stop)
                return


def workers_for(seconds: float) -> int:
    """Processes for work that would take this process `seconds`: by its cores, and the memory that is free."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = free_memory_bytes()
    room = MOST_WORKERS if free is None else free // WORKER_BYTES
    found = min(cores, MOST_WORKERS, room, int(seconds / START_SECONDS))
    return found if found > 1 else 0


def _can_be_sent(*parts: Any) -> bool:
    """Whether other processes can have these; a tokenizer of a model's own code may not be."""
    try:
        pickle.dumps(parts)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _piece(rows: SourceRows, format_: Format, tokeniser: Tokeniser, start: int, stop: int) -> Piece:
    return Piece.of(tokeniser.results(format_, rows.rows(start, stop), start), start)


def _in_processes(rows: SourceRows, format_: Format, tokeniser: Tokeniser, workers: int, first: int) -> Iterator[Piece]:
    # A fork would inherit torch's threads and the metered device's dispatch mode.
    context = multiprocessing.get_context("spawn")
    given = (rows, format_, tokeniser)
    with ProcessPoolExecutor(workers, context, initializer=_set_up_worker, initargs=given) as pool:
        try:
            yield from _in_order(pool, rows, workers * IN_FLIGHT_PER_WORKER, first)
        except BrokenProcessPool as error:
            raise EnvironmentProblem(
                "a process that tokenises was killed, most often because host memory ran out",
                fix="lower data.workers, or set it to 0; what was tokenised is kept",
            ) from error


def _in_order(pool: ProcessPoolExecutor, rows: SourceRows, ahead: int, first: int) -> Iterator[Piece]:
    waiting: deque[Future[Piece]] = deque()
    try:
        for start, stop in rows.spans(first):
            waiting.append(pool.submit(_tokenise, start, stop))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


_worker: dict[str, Any] = {}
"""The rows, the format and the tokeniser of this worker process."""


def _set_up_worker(rows: SourceRows, format_: Format, tokeniser: Tokeniser) -> None:
    # Threads of the tokenizer's own in every process would be more than there are cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker["given"] = rows, format_, tokeniser


def _tokenise(start: int, stop: int) -> Piece:
    rows, format_, tokeniser = _worker["given"]
    return _piece(rows, format_, tokeniser, start, stop)
