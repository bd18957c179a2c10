"""Tokenises the rows of a source in pieces, in this process or in several, in row order and with bounded memory. A
piece holds values for the columns of the token cache, and what became of its rows."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.config.files.cgroups import free_memory_bytes
from engine.data.conversations import LEFT_OUT
from engine.data.formats import Format
from engine.data.killable import KillableProcess, ProcessEnded
from engine.data.records import SourceRows
from engine.data.template_limits import renders_here
from engine.data.tokenise import RowResult, Tokeniser
from engine.errors import EnvironmentProblem

COLUMN_DTYPES: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "targets": np.bool_,
    "offsets": np.int64,
    "target_counts": np.int32,
    "sources": np.int16,
    "origins": np.int64,
    "answer_starts": np.int32,
    "answer_ends": np.int32,
    "desirable": np.bool_,
    "image_counts": np.int32,
    "image_heights": np.int32,
    "image_widths": np.int32,
    "image_digests": np.uint64,
}

ROWS_PER_REASON = 5
"""Dropped rows that are named for each reason."""

MAX_REASONS, OTHER_REASONS = 50, "other reasons"
"""Most drop reasons counted separately per source, and the name for all others. A template's error may quote the row,
which would make every reason different."""


@dataclass
class SourceCount:
    """How many rows of a source were read, kept, truncated and dropped."""

    name: str
    format: str
    read: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows by reason."""
    dropped_rows: dict[str, list[int]] = field(default_factory=dict)
    """The first rows dropped for each reason, counted from 0."""
    dropped_at: dict[str, list[str]] = field(default_factory=dict)
    """Files and lines of `dropped_rows`; filled in after the cache is read, because the files may be moved."""
    dropped_turns: dict[str, int] = field(default_factory=dict)
    """Assistant turns of rows that are kept, by reason."""
    chat: dict[str, int] = field(default_factory=dict)
    """Counts by the names in `engine.data.report.CHAT_FACTS`."""
    lost_tokens: int = 0
    """Tokens that data.max_length had no room for."""
    tokens: int = 0
    """Tokens of all rows: learned, context, lost, and those of rows that were dropped for another reason."""
    learned_tokens: int = 0
    context_tokens: int = 0
    """Tokens of samples that are targets, and those that are not."""
    unused: int = 0
    """Rows of the files that the source's slice and limit leave out."""
    compared: int = 0
    """Rows that were equal in a second reading of the files."""
    columns_read: list[str] = field(default_factory=list)
    columns_not_read: list[str] = field(default_factory=list)

    def add(self, result: RowResult, row: int) -> None:
        """Every row counts as either kept or dropped. `row` is its number, from 0."""
        self.read += 1
        self.lost_tokens += result.lost
        self.tokens += result.tokens
        for document in result.documents:
            learned = int(document.targets.sum())
            self.learned_tokens += learned
            self.context_tokens += len(document.ids) - learned
        self.truncated += sum(document.cut > 0 for document in result.documents)
        if result.documents:
            self.kept += 1
            for fact, number in result.facts.items():
                self.chat[fact] = self.chat.get(fact, 0) + number
            for reason in result.dropped:
                self.dropped_turns[reason] = self.dropped_turns.get(reason, 0) + 1
            return
        self._drop(result.dropped[0], 1, [row])

    def _drop(self, reason: str, number: int, rows: Sequence[int]) -> None:
        if reason not in self.dropped and len(self.dropped) >= MAX_REASONS:
            reason = OTHER_REASONS
        self.dropped[reason] = self.dropped.get(reason, 0) + number
        self.dropped_rows[reason] = [*self.dropped_rows.get(reason, []), *rows][:ROWS_PER_REASON]

    def include(self, later: SourceCount) -> None:
        """Add the counts of later rows of the same source."""
        self.read, self.kept = self.read + later.read, self.kept + later.kept
        self.truncated += later.truncated
        self.lost_tokens += later.lost_tokens
        self.tokens += later.tokens
        self.learned_tokens += later.learned_tokens
        self.context_tokens += later.context_tokens
        for reason, number in later.dropped.items():
            self._drop(reason, number, later.dropped_rows[reason])
        for mine, others in ((self.chat, later.chat), (self.dropped_turns, later.dropped_turns)):
            for name, number in others.items():
                mine[name] = mine.get(name, 0) + number


@dataclass(frozen=True)
class Piece:
    """Some rows of a source, tokenised: values for each column but `sources`, and what became of the rows."""

    columns: dict[str, NDArray[Any]]
    """`offsets` are the ends of the documents within the piece."""
    count: SourceCount

    @classmethod
    def of(cls, results: Sequence[RowResult], first: int) -> Piece:
        """`first` is the row of the first of `results`."""
        count = SourceCount("", "")
        for row, result in enumerate(results, start=first):
            count.add(result, row)
        documents = [document for result in results for document in result.documents]
        images = [image for document in documents for image in document.images]
        empty = [np.empty(0, np.int32)]
        values: dict[str, Any] = {
            "ids": np.concatenate([document.ids for document in documents] or empty),
            "targets": np.concatenate([document.targets for document in documents] or empty),
            "offsets": np.cumsum([len(document.ids) for document in documents], dtype=np.int64),
            "target_counts": [int(document.targets.sum()) for document in documents],
            "origins": [document.origin for document in documents],
            "answer_starts": [document.answer[0] for document in documents],
            "answer_ends": [document.answer[1] for document in documents],
            "desirable": [document.desirable for document in documents],
            "image_counts": [len(document.images) for document in documents],
            "image_heights": [image.height for image in images],
            "image_widths": [image.width for image in images],
            "image_digests": [image.digest for image in images],
        }
        return cls({name: np.asarray(column, COLUMN_DTYPES[name]) for name, column in values.items()}, count)


SIXTH_DROPS = (
    "a turn's train", "a turn's weight", "the system prompt in", "system is not text", "a tool has no name",
    "chosen and rejected share no prompt (", "chosen and rejected have different", "chosen and rejected differ in",
)  # fmt: skip
"""First words of the reasons for which the sixth version of the rendering drops rows that earlier ones kept."""


def rendering_version(counts: Sequence[SourceCount]) -> list[str]:
    """The first version of the rendering that gives these rows; nothing for version 1, so that runs started with an
    older version go on where the rows are the same."""
    newest = ("part_context", "stops_at_marker", "rendered", "tools_wrapped", "dialogues")
    if any(count.chat.get(fact) for count in counts for fact in newest) or any(
        reason.startswith(SIXTH_DROPS) for count in counts for reason in count.dropped
    ):
        return ["chat 6"]
    if any(count.chat.get("system_folded") for count in counts):
        return ["chat 5"]
    if any(count.chat.get("unclosed") for count in counts):
        return ["chat 3"]
    if any(count.chat.get(fact) for count in counts for fact in ("untrained", "from_pair")):
        return ["chat 4"]
    facts = ("per_turn", "reshaped", "unprompted", "context_only")
    changed = any(
        any(map(count.chat.get, facts)) or any(reason.startswith(LEFT_OUT) for reason in count.dropped)
        for count in counts
    )
    return ["chat 2"] if changed else []


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
    pieces = _Pieces(rows, format_, tokeniser)
    try:
        for start, stop in rows.spans(first):
            yield pieces.piece(start, stop)
            taken = time.monotonic() - started
            if deciding and taken >= TRIAL_SECONDS:
                deciding = False
                number = workers_for(taken / (stop - first) * (rows.count - stop))
                if number and _can_be_sent(rows, format_, tokeniser):
                    yield from _in_processes(rows, format_, tokeniser, number, stop)
                    return
    finally:
        pieces.close()


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


class _Pieces:
    """Makes pieces of a source. Rows that go through a chat template are tokenised in a process that can be ended, as a
    whole: sending single renderings to such a process takes 50 us each, as long as rendering."""

    def __init__(self, rows: SourceRows, format_: Format, tokeniser: Tokeniser) -> None:
        self._rows, self._format, self._tokeniser = rows, format_, tokeniser
        # Images are resized by threads of torch, which do not come along into a fork; each rendering is sent then.
        is_chat = tokeniser.has_template and format_.name != "text" and not format_.has_images
        self._process = KillableProcess(self._make_apart) if is_chat else None

    def piece(self, start: int, stop: int) -> Piece:
        """Tokenise the rows from `start` to `stop`. Raises DataError as `Tokeniser.results` does."""
        if self._process is not None:
            try:
                made: Piece = self._process.ask((start, stop))
            except ProcessEnded:
                # Again, with only the renderings in another process: the row that ended this one gets its reason, and
                # an error is raised where it can be handled.
                self.close()
            else:
                return made
        return self._make(start, stop)

    def close(self) -> None:
        """End the process, if there is one; later pieces are made in this one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _make(self, start: int, stop: int) -> Piece:
        return Piece.of(self._tokeniser.results(self._format, self._rows.rows(start, stop), start), start)

    def _make_apart(self, span: tuple[int, int]) -> Piece:
        renders_here()
        return self._make(*span)


def _in_processes(rows: SourceRows, format_: Format, tokeniser: Tokeniser, workers: int, first: int) -> Iterator[Piece]:
    # A fork would inherit torch's threads and the metered device's dispatch mode.
    context = multiprocessing.get_context("spawn")
    given = (rows, format_, tokeniser)
    with ProcessPoolExecutor(workers, context, initializer=_set_up_worker, initargs=given) as pool:
        try:
            yield from _in_order(pool, rows, workers * IN_FLIGHT_PER_WORKER, first)
        except BrokenProcessPool as error:
            raise EnvironmentProblem(
                "a tokenising process was killed, probably because host memory ran out",
                fix="lower data.workers, or set it to 0; the tokens finished until now are kept",
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


_worker: dict[str, _Pieces] = {}
"""What makes the pieces of this worker process."""


def _set_up_worker(rows: SourceRows, format_: Format, tokeniser: Tokeniser) -> None:
    # Threads of the tokenizer's own in every process would be more than there are cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker["pieces"] = _Pieces(rows, format_, tokeniser)


def _tokenise(start: int, stop: int) -> Piece:
    return _worker["pieces"].piece(start, stop)
