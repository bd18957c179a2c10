"""The scores of a run: `evaluations.jsonl` in its directory, one JSON object per line, appended under a lock.

Each line is one evaluation of one checkpoint. A later line for the same checkpoint, data and settings replaces the
earlier one when the file is read, or adds its metrics if the weights were the same. The values of single samples lie in
`evaluations/`, beside the kept answers.

Try: `tunedeck eval last`, then `cat runs/*/evaluations.jsonl`
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
from engine.journal.files import locked, write_atomically


@dataclass(frozen=True)
class Evaluation:
    """The scores of one checkpoint of a run."""

    time: str
    """When the checkpoint was scored, in ISO 8601."""
    step: int
    """Step of the checkpoint; 0 for the model that the run started from."""
    metrics: dict[str, float]
    """Scores by name, such as "loss" or "exact_match"; shares are from 0 to 1."""
    count: int
    """Number of samples."""
    data: str
    """Fingerprint of the samples: equal for equal samples, whatever the tokenizer."""
    generate: dict[str, Any] | None = None
    """The settings of generation; None if nothing was generated."""
    samples: list[dict[str, str]] = field(default_factory=list)
    """Some samples to read: prompt, answer, reference."""
    weights: str = ""
    """Identity of the weights that were scored."""
    sources: list[str] = field(default_factory=list)
    """Names of the data's sources."""
    classes: dict[str, dict[str, float]] = field(default_factory=dict)
    """For accuracy: precision, recall, f1 and count, by label."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know about the scores, as sentences."""
    scorer: str | None = None
    """The user's own scorer, as FILE.py:FUNCTION; None if there is none."""
    values: str = ""
    """Path of the file, relative to the run directory, with the value of each sample by metric; empty if there is
    none."""

    @property
    def key(self) -> tuple[int, str, int, str]:
        """The identity of an evaluation: step of the checkpoint, fingerprint of the samples, number of samples,
        settings of generation as JSON. A later evaluation with the same key replaces this one."""
        return self.step, self.data, self.count, json.dumps(self.generate, sort_keys=True)


def now() -> str:
    """The present time in UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@contextmanager
def scoring(directory: RunDirectory, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's scores until the block ends. If another process holds it, call `notify` with a message
    and wait, without a limit. Raises EnvironmentProblem if the run directory cannot be written."""
    with ExitStack() as held:
        try:
            directory.kept_scores.mkdir(exist_ok=True)
            path = directory.kept_scores / "lock"
            try:
                held.enter_context(locked(path, timeout_seconds=0))
            except TimeoutError:
                notify("another process scores this run; waiting for it")
                held.enter_context(locked(path))
        except OSError as error:
            raise EnvironmentProblem(
                f"the scores of {directory.name} cannot be written: {error.strerror}",
                fix="make the run directory writable, or copy it to a place that is",
            ) from error
        yield


def append_evaluation(directory: RunDirectory, evaluation: Evaluation, values: dict[str, list[float]]) -> None:
    """Append an evaluation to `evaluations.jsonl`. `values` has the value of each sample by metric and goes into a file
    in `evaluations/`. The caller must hold the lock (`scoring`). Raises OSError."""
    if values:
        path = directory.kept_scores / f"values-{zlib.crc32(json.dumps(evaluation.key).encode('ascii')):08x}.json"
        known = _read_values(path) if _merges(read_evaluations(directory), evaluation) else {}
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
    """Read the evaluations of a run, sorted by data and step. Of those with the same key only the newest is returned,
    with the metrics of earlier ones added if their weights were the same. Lines that cannot be read are left out; no
    file is an empty list."""
    try:
        lines = directory.evaluations.read_bytes().splitlines()
    except OSError:
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


def _decoded(line: bytes) -> Evaluation | None:
    try:
        row = json.loads(line)
        names = Evaluation.__dataclass_fields__
        new = Evaluation(**{name: value for name, value in row.items() if name in names})
        return replace(new, step=int(new.step), metrics=dict(new.metrics), count=int(new.count), data=str(new.data))
    except (ValueError, TypeError, AttributeError):
        return None


def values_of(directory: RunDirectory, evaluation: Evaluation, metric: str) -> list[float] | None:
    """The value of each sample for a metric, in data order; None if none are stored, as for a metric that is not a mean
    over samples."""
    found = _read_values(directory.path / evaluation.values).get(metric) if evaluation.values else None
    return found if found is not None and len(found) == evaluation.count else None


def _read_values(path: Path) -> dict[str, list[float]]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError):
        return {}
