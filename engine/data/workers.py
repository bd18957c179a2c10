"""Tokenises the rows of a source, in this process or in worker processes, in order and with bounded memory.

Workers are spawned, not forked: a fork would inherit torch's threads and the metered device's dispatch mode.

Try: `tunedeck data -r demo --set data.workers=2`
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from engine.data.formats import Format
from engine.data.source_rows import SourceRows
from engine.data.tokenise import RowResult, Tokeniser
from engine.errors import EnvironmentProblem

IN_FLIGHT_PER_WORKER = 2
"""Batches submitted ahead of the one being written, per worker."""

Results = list[RowResult]


def tokenise_rows(rows: SourceRows, format_: Format, tokeniser: Tokeniser, *, workers: int) -> Iterator[Results]:
    """Yield the results (documents, or reasons for dropping) of all rows of a source, in batches and in row order.

    With `workers` = 0 this process tokenises; with any number of workers the results are the same.

    Raises EnvironmentProblem when a worker is killed.
    """
    if workers == 0:
        first = 0
        for batch in rows.batches():
            yield tokeniser.results(format_, batch, first)
            first += len(batch)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_set_up_worker, initargs=(tokeniser, format_)) as pool:
        try:
            yield from _in_order(pool, rows, workers * IN_FLIGHT_PER_WORKER)
        except BrokenProcessPool as error:
            raise EnvironmentProblem(
                "a process that tokenises was killed, most often because host memory ran out",
                fix="lower data.workers, or set it to 0",
            ) from error


def _in_order(pool: ProcessPoolExecutor, rows: SourceRows, ahead: int) -> Iterator[Results]:
    waiting: deque[Future[Results]] = deque()
    first = 0
    for batch in rows.batches():
        waiting.append(pool.submit(_tokenise_batch, batch, first))
        first += len(batch)
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_worker: dict[str, Any] = {}
"""The tokeniser and the format of this worker process."""


def _set_up_worker(tokeniser: Tokeniser, format_: Format) -> None:
    _worker["tokeniser"], _worker["format"] = tokeniser, format_


def _tokenise_batch(batch: list[dict[str, Any]], first: int) -> Results:
    tokeniser: Tokeniser = _worker["tokeniser"]
    return tokeniser.results(_worker["format"], batch, first)
