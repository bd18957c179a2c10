"""The scores of a run: `evaluations.jsonl` in its directory, one JSON object per line, appended under a lock.

Each line is one evaluation of one checkpoint. When the file is read, a later line for the same checkpoint, data and
settings replaces the earlier one, or adds its metrics if the weights were the same. The values of single samples are in
`evaluations/`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.files import MOST_DIGITS, locked, read_bounded, remove_drafts, write_atomically


@dataclass(frozen=True)
class Evaluation:
    time: str
    step: int
    """0 for the model that the run started from."""
    metrics: dict[str, float]
    """By name, such as "loss" or "exact_match"; shares are from 0 to 1."""
    count: int
    data: str
    """Fingerprint of the samples: equal for equal samples, whatever the tokenizer."""
    generate: dict[str, Any] | None = None
    """Settings of generation; None if nothing was generated."""
    samples: list[dict[str, str]] = field(default_factory=list)
    weights: str = ""
    sources: list[str] = field(default_factory=list)
    classes: dict[str, dict[str, float]] = field(default_factory=dict)
    """For accuracy: precision, recall, f1 and count, by label."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know about the scores, as sentences."""
    scorer: str | None = None
    """The user's own scorer, as FILE.py:FUNCTION."""
    values: str = ""
    """File with the value of each sample by metric, relative to the run directory; empty if there is none."""

    @property
    def key(self) -> tuple[int, str, int, str]:
        """A later evaluation with the same key replaces this one."""
        return self.step, self.data, self.count, json.dumps(self.generate, sort_keys=True)


def now() -> str:
    """UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@contextmanager
def scoring(directory: RunDirectory, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's scores inside the block; if another process holds it, `notify` and wait without a limit.
    Raises EnvironmentProblem if the run directory cannot be written."""
    with ExitStack() as held:
        try:
            directory.kept_scores.mkdir(exist_ok=True)
            path = directory.kept_scores / "lock"
            try:
                held.enter_context(locked(path, timeout_seconds=0))
            except TimeoutError:
                notify("another process is scoring this run; waiting for it")
                held.enter_context(locked(path))
        except OSError as error:
            raise EnvironmentProblem(
                f"the scores of {directory.name} cannot be written: {error.strerror}",
                fix="make the run directory writable, or copy it to a writable folder",
            ) from error
        yield


def append_evaluation(directory: RunDirectory, evaluation: Evaluation, values: dict[str, list[float]]) -> None:
    """Append to `evaluations.jsonl`; `values` (per sample, by metric) goes into a file in `evaluations/`. The caller
    holds the lock (`scoring`). Raises OSError."""
    if values:
        path = directory.kept_scores / f"values-{zlib.crc32(json.dumps(evaluation.key).encode('ascii')):08x}.json"
        known = _read_values(path) if _merges(read_evaluations(directory), evaluation) else {}
        remove_drafts(path)
        write_atomically(path, json.dumps({**known, **values}))
        evaluation = replace(evaluation, values=str(path.relative_to(directory.path)))
    line = {name: value for name, value in asdict(evaluation).items() if value not in ({}, [], "")}
    with directory.evaluations.open("ab+") as file:
        torn = file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
        file.write(b"\n" * bool(torn) + json.dumps(line).encode("ascii") + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _merges(known: list[Evaluation], new: Evaluation) -> bool:
    return any(old.key == new.key and old.weights == new.weights for old in known)


def read_evaluations(directory: RunDirectory) -> list[Evaluation]:
    """The evaluations of a run by data and step: of those with the same key only the newest, with the metrics of
    earlier ones added if their weights were the same. Unreadable lines are left out; no file is an empty list."""
    try:
        lines = read_bounded(directory.evaluations).splitlines()
    except (OSError, ValueError):
        return []
    found: dict[tuple[int, str, int, str], Evaluation] = {}
    for line in lines:
        new = _decoded(line)
        if new is None:
            continue
        old = found.get(new.key)
        if old is not None and old.weights == new.weights:
            new = replace(
                new,
                metrics={**old.metrics, **new.metrics},
                classes=new.classes or old.classes,
                samples=new.samples or old.samples,
                values=new.values or old.values,
            )
        found[new.key] = new
    return sorted(found.values(), key=lambda each: (each.data, each.count, each.step))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: isinstance(value, int) and _is_score(value),
    "count": lambda value: isinstance(value, int) and _is_score(value),
    "metrics": lambda value: isinstance(value, dict) and all(map(_is_score, value.values())),
    "generate": lambda value: value is None or isinstance(value, dict),
    "scorer": lambda value: value is None or isinstance(value, str),
    "samples": lambda value: _list_of(dict, value) and all(_list_of(str, list(each.values())) for each in value),
    "sources": lambda value: _list_of(str, value),
    "notes": lambda value: _list_of(str, value),
    "classes": lambda value: isinstance(value, dict) and all(map(_TYPES["metrics"], value.values())),
}
"""Fields that are no text."""


def _is_score(value: Any) -> bool:
    """Scores that are not finite stand in these files as Python writes them."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**MOST_DIGITS)


def _list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _decoded(line: bytes) -> Evaluation | None:
    """None for a line that is no evaluation, or has a value of a wrong type."""
    try:
        row = json.loads(line)
        known = {name: row[name] for name in Evaluation.__dataclass_fields__ if name in row}
        new = Evaluation(**known)
    except (ValueError, TypeError, RecursionError):
        return None
    typed = all(_TYPES.get(name, lambda text: isinstance(text, str))(value) for name, value in known.items())
    return new if typed else None


def values_of(directory: RunDirectory, evaluation: Evaluation, metric: str) -> list[float] | None:
    """In data order; None if none are stored, as for a metric that is not a mean over samples."""
    inside = Path(evaluation.values).parent == Path(directory.kept_scores.name)  # no path out of the run directory
    found = _read_values(directory.path / evaluation.values).get(metric) if inside else None
    return found if isinstance(found, list) and len(found) == evaluation.count and all(map(_is_score, found)) else None


def _read_values(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
