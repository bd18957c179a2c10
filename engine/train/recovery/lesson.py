"""What one attempt of a run learned of memory and could not say: left in the run directory for the next attempt.

Under DeepSpeed a rank that runs out of memory ends the attempt everywhere (`engine.distributed.deepspeed`). It leaves
the remedy it chose; the next attempt starts from the last checkpoint with it, and rank 0 writes the failure into the
journal, which nobody could at the time. Counts only until a checkpoint holds a later step, which knows as much itself.

Try: `pytest tests/distributed/test_deepspeed_runs.py` where deepspeed is installed
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from engine.distributed.deepspeed import EndedByMemoryError
from engine.journal.directory import RunDirectory
from engine.journal.files import write_atomically
from engine.train.checkpoint.run_state import settings
from engine.train.recovery.consensus import Knowledge, Struck, as_told, from_told
from engine.train.recovery.ladder import Remedy
from engine.train.step.context import Backoff

if TYPE_CHECKING:
    from engine.train.setup import Bench


def lesson_of(step: int, struck: Struck, remedy: Remedy, knowledge: Knowledge) -> dict[str, Any]:
    """What to leave behind, as JSON: the failure in `step` on this rank, and all that is known of memory since."""
    told = as_told(replace(struck, failure=replace(struck.failure, held=None)))
    return {
        "step": step,
        "rank": struck.rank,
        "struck": told,
        "remedy": asdict(remedy),
        "knowledge": knowledge.as_json(),
        "told": False,
    }


@contextmanager
def noting(place: RunDirectory, bench: Bench) -> Iterator[None]:
    """Leave the lesson of an attempt that memory ended inside. Of two ranks that leave one, either will do."""
    try:
        yield
    except EndedByMemoryError as error:
        if error.lesson is not None:
            about = settings(bench.spec, bench.total_steps)["memory"]
            write_atomically(place.lesson, json.dumps({**error.lesson, "settings": about}) + "\n")
        raise


def learn(place: RunDirectory, bench: Bench, step: int) -> None:
    """Take over what the attempt before left, on all ranks, where the run stands at `step`, before it was learned."""
    parts = bench.parts
    lesson = parts.ranks.from_first(_read(place))
    if lesson is None:
        return
    about = settings(bench.spec, bench.total_steps)["memory"]
    if lesson["step"] <= step or lesson["settings"] != about:
        if parts.ranks.is_first:
            place.lesson.unlink()
        return
    parts.knowledge.adopt(lesson["knowledge"])
    if lesson["told"] or not parts.ranks.is_first:
        return
    struck, remedy = from_told(lesson["rank"], lesson["struck"]), Remedy(**lesson["remedy"])
    parts.report(Backoff(lesson["step"], struck.failure, remedy, struck.rows, None, 1, struck.micro_batch, struck.rank))
    write_atomically(place.lesson, json.dumps({**lesson, "told": True}) + "\n")


def _read(place: RunDirectory) -> Any:
    with suppress(FileNotFoundError):
        return json.loads(place.lesson.read_text("utf-8"))
    return None
