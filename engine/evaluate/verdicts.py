"""Answers for a judge, a person or another model, and the win rate that its verdicts give.

`tunedeck eval RUN --answers FILE` writes each pair of answers to one prompt twice, in both orders, because judges
prefer a place (Wang et al. 2023, "Large language models are not fair evaluators"). The judge adds a `winner`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from engine.data.store import hash_text
from engine.data.tokens import TokenData
from engine.errors import DataError, UsageError
from engine.evaluate.scores import Scores
from engine.journal.directory import RunDirectory
from engine.journal.evaluations import Evaluation, append_evaluation, now
from engine.journal.files import write_atomically
from engine.journal.score_groups import bootstrap
from engine.journal.stages import typed_name

WINS, TIES, CONSISTENCY = "judge_win_rate", "judge_ties", "judge_consistency"
"""A tie counts as half a win. Consistency: share of the pairs judged in both orders whose verdicts agree."""

ORDERS = ("ab", "ba")
"""Ends of ids: `a` is the run's answer, or `b` is."""

POINTS = {"a": 1.0, "tie": 0.5, "b": 0.0}
ROW = '{"id": ID, "winner": "a", "b" or "tie"}'
NAMED = 3
"""Ids that an error names."""

RUN, REFERENCE, BASE = "run", "reference", "base"
"""Whose answers: the run's, and those that they are compared with: of the data (of pairs the chosen ones, with labels
the desirable ones), or of the base model."""


@dataclass(frozen=True)
class JudgedSet:
    """Pairs of answers that were written for a judge."""

    step: int
    against: str
    data: str
    """Fingerprint of all data that the samples are from."""
    generate: dict[str, Any]
    weights: str
    sources: list[str]
    ids: list[str] = field(default_factory=list)
    """One for each pair, without its order."""

    @property
    def key(self) -> str:
        return hash_text(json.dumps({**asdict(self), "ids": []}, sort_keys=True))[:12]


class PromptsToJudge:
    """The prompts of data for which an answer is known that should be given."""

    def __init__(self, data: TokenData) -> None:
        """Raises DataError if there are none."""
        self._data = data
        labelled = data.in_pairs or data.mismatched is not None
        self._rows = np.flatnonzero(data.desirable) if labelled else np.arange(len(data))
        if not len(self._rows):
            raise DataError("no sample has a desirable answer", expected="held-out data with desirable answers")

    def __len__(self) -> int:
        return len(self._rows)

    def split_question(self, row: int) -> tuple[list[int], list[int]]:
        """(prompt, reference answer) as tokens."""
        return self._data.split_question(int(self._rows[row]))

    def images_of(self, rows: Sequence[int], ids_BS: Tensor) -> Mapping[str, Tensor]:
        return self._data.images_of([int(self._rows[row]) for row in rows], ids_BS)


def write_answers(
    file: Path, place: RunDirectory, judged: JudgedSet, prompts: Sequence[str], answers: Sequence[str],
    others: Sequence[str],
) -> JudgedSet:  # fmt: skip
    """Write each pair in both orders to `file`, and its id into the run directory. Raises UsageError if `file` cannot
    be written."""
    ids = [hash_text(judged.key, str(number))[:12] for number in range(len(prompts))]
    with_ids = JudgedSet(**{**asdict(judged), "ids": ids})
    lines = []
    for name, prompt, own, other in zip(ids, prompts, answers, others, strict=True):
        for order, (a, b) in zip(ORDERS, ((own, other), (other, own)), strict=True):
            row = {"id": f"{name}-{order}", "prompt": prompt, "a": a, "b": b}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    try:
        write_atomically(file, "".join(lines))
    except OSError as error:
        raise UsageError(f"--answers {file}: {error.strerror}", fix="name a file in a folder that exists") from error
    write_atomically(place.kept_scores / f"judged-{judged.key}-{len(ids)}.json", json.dumps(asdict(with_ids)))
    return with_ids


def read_verdicts(file: Path) -> dict[str, float]:
    """Points of `a` by id. Raises DataError: unreadable, or a row that is no verdict."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"--verdicts {file}: {reason}", expected=f"one row per line: {ROW}") from error
    found: dict[str, float] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, winner = _verdict(line)
        if name is None or winner not in POINTS:
            told = "missing" if winner is None else repr(winner)
            said = "not a JSON object with an id" if name is None else f"winner is {told}"
            raise DataError(f"{file}:{number}: {said}", expected=ROW)
        if name in found:
            raise DataError(f"{file}:{number}: a second verdict on {name}", expected="one verdict for each id")
        found[name] = POINTS[winner]
    if not found:
        raise DataError(f"--verdicts {file}: there are no verdicts", expected=f"one row per line: {ROW}")
    return found


def _verdict(line: str) -> tuple[str | None, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        return None, None
    winner = row.get("winner")
    return row["id"], winner.strip().lower() if isinstance(winner, str) else winner


def judged_set(place: RunDirectory, verdicts: Mapping[str, float]) -> JudgedSet:
    """The pairs of the run that the verdicts are on. Raises DataError: they are on others too, or not on all."""
    known = [_read_set(path) for path in sorted(place.kept_scores.glob("judged-*.json"))]
    named = typed_name(place)
    again = f"tunedeck eval {named} --answers FILE"
    if not known:
        raise DataError(f"{named} has no answers written for a judge", fix=f"write them first: {again}")
    judged = {name.rpartition("-")[0] for name in verdicts}
    most = max(known, key=lambda each: len(judged.intersection(each.ids)))
    extra = [name for name in verdicts if name.rpartition("-")[2] not in ORDERS]
    extra = [*extra, *(name for name in verdicts if name not in extra and name.rpartition("-")[0] not in most.ids)]
    if extra:
        raise DataError(
            f"{len(extra):,} of {len(verdicts):,} verdicts do not match a pair of answers of {named}: {_named(extra)}",
            expected=f"ids from a single file written by {again}",
            fix="leave these rows out",
        )
    missing = [name for name in most.ids if name not in judged]
    if missing:
        raise DataError(
            f"{len(missing):,} of {len(most.ids):,} pairs have no verdict: {_named(missing)}",
            expected="a verdict for each pair, in one order or both",
            fix=f"judge them, or write fewer answers: {again} --limit {len(most.ids) - len(missing)}",
        )
    return most


def _named(ids: Sequence[str]) -> str:
    return ", ".join(ids[:NAMED]) + (", …" if len(ids) > NAMED else "")


def _read_set(path: Path) -> JudgedSet:
    """Raises DataError for a file that was changed."""
    try:
        return JudgedSet(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}", fix="delete it, and write the answers again") from error


def score_verdicts(place: RunDirectory, file: Path) -> tuple[int, Scores]:
    """(step, scores) of the checkpoint whose answers were judged; they are added to the run's evaluations, whose lock
    the caller holds (`scoring`). Raises DataError."""
    verdicts = read_verdicts(file)
    judged = judged_set(place, verdicts)
    values, both, agreeing = [], 0, 0
    for name in judged.ids:
        found = [_points(verdicts, name, order) for order in ORDERS]
        points = [each for each in found if each is not None]
        values.append(sum(points) / len(points))
        if len(points) == len(ORDERS):
            both, agreeing = both + 1, agreeing + (points[0] == points[1])
    ties = sum(value == POINTS["tie"] for value in values)
    metrics = {WINS: sum(values) / len(values), TIES: ties / len(values)}
    metrics |= {CONSISTENCY: agreeing / both} if both else {}
    low, high = bootstrap(values)
    rival = "the reference answers" if judged.against == REFERENCE else "the base model"
    notes = [
        f"judged against {rival}: {100 * metrics[WINS]:.1f} % of {len(values):,} won (95 % interval "
        f"{100 * low:.1f} % to {100 * high:.1f} %), with {ties:,} ties counted as half; {both:,} judged in "
        f"both orders, {both - agreeing:,} of them inconsistently"
    ]
    if both < len(values):
        notes.append(
            f"{len(values) - both:,} were judged in one order only, so a position bias of the judge is not averaged out"
        )
    scores = Scores(metrics, count=len(values), notes=notes, values={WINS: values})
    # Win rates against different rivals are no scores of one kind: the settings tell them apart.
    generate = {**judged.generate, "judged_against": judged.against}
    evaluation = Evaluation(
        time=now(), step=judged.step, metrics=metrics, count=len(values), data=judged.data, generate=generate,
        weights=judged.weights, sources=judged.sources, notes=notes,
    )  # fmt: skip
    append_evaluation(place, evaluation, scores.values)
    return judged.step, scores


def _points(verdicts: Mapping[str, float], name: str, order: str) -> float | None:
    """Of the run's answer."""
    found = verdicts.get(f"{name}-{order}")
    return found if found is None or order == ORDERS[0] else 1.0 - found
