"""Tokenising the rows of a source, here or in worker processes, in order and with bounded memory.

Workers are spawned, not forked: a fork would inherit torch's threads and the metered device's bookkeeping.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from engine.data.formats import Dropped, Format
from engine.data.sources import Rows
from engine.data.tokenise import Document, Tokeniser
from engine.errors import EnvironmentProblem

IN_FLIGHT_PER_WORKER = 2
"""Batches handed out ahead of the one being written, per worker."""

Results = list[Document | Dropped]


def tokenised(rows: Rows, format_: Format, tokeniser: Tokeniser, *, workers: int) -> Iterator[Results]:
    """Documents of all rows of a source, batch by batch, in row order whatever `workers` is.

    Raises EnvironmentProblem when a worker is killed.
    """
    if workers == 0:
        first = 0
        for batch in rows.batches():
            yield tokeniser.documents(format_, batch, first)
            first += len(batch)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(tokeniser, format_)) as pool:
        try:
            yield from _in_order(pool, rows, workers * IN_FLIGHT_PER_WORKER)
        except BrokenProcessPool as error:
            raise EnvironmentProblem(
                "a process that tokenises was killed, most often because host memory ran out",
                fix="lower data.workers, or set it to 0",
            ) from error


def _in_order(pool: ProcessPoolExecutor, rows: Rows, ahead: int) -> Iterator[Results]:
    waiting: deque[Future[Results]] = deque()
    first = 0
    for batch in rows.batches():
        waiting.append(pool.submit(_work, batch, first))
        first += len(batch)
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_own: dict[str, Any] = {}
"""What a worker process was started with."""


def _start(tokeniser: Tokeniser, format_: Format) -> None:
    _own["tokeniser"], _own["format"] = tokeniser, format_


def _work(batch: list[dict[str, Any]], first: int) -> Results:
    tokeniser: Tokeniser = _own["tokeniser"]
    return tokeniser.documents(_own["format"], batch, first)
