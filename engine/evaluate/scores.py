"""Evaluates a model: loss and perplexity, scores of generated answers (also by a user's own function), and sample
answers."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batching.micro_batches import plan_micro_batches
from engine.data.tokens import TokenData
from engine.device.base import Device
from engine.errors import UsageError
from engine.evaluate.answers import Answer, KeptAnswers, KeptLosses, answer_first
from engine.evaluate.context import EvaluationContext, EvaluationStopped, FailedPass, retries_unchanged
from engine.evaluate.metrics import ACCURACY, MOST_LOST, TEXT_SCORES, lost_letters, score_labels
from engine.model.decoder import eval_mode
from engine.objectives.kto import answer_scores
from engine.objectives.preference import pair_scores

EXPECTED = (
    "FILE.py:FUNCTION, where the function takes (answers, references), two lists of texts, and returns scores by name"
)


def load_scorer(text: str) -> Scorer:
    """Raises UsageError: no such file or function, or the file cannot be imported. The function runs in this process
    with the user's rights; a recipe cannot name one, because recipes come from other people."""
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    if not name or not path.is_file():
        raise UsageError(f"--scorer {text}: no file {file or text}", expected=EXPECTED, fix="correct the path")
    spec = importlib.util.spec_from_file_location(f"tunedeck_scorer_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"--scorer {text}: {path.name} is not a Python file", expected=EXPECTED)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of any kind: the file is the user's
        raise UsageError(f"--scorer {text}: {type(error).__name__}: {error}", fix=f"correct {path.name}") from error
    function: Callable[[list[str], list[str]], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"--scorer {text}: {path.name} has no function {name}", expected=EXPECTED)
    return lambda answers, references: _checked(text, function, answers, references)


def _checked(
    text: str, function: Callable[[list[str], list[str]], Any], answers: list[str], references: list[str]
) -> dict[str, float]:
    """Raises UsageError if the user's function fails, or does not return a dict of finite numbers."""
    try:
        found = function(answers, references)
    except Exception as error:  # of any kind: the function is the user's
        raise UsageError(f"--scorer {text}: {type(error).__name__}: {error}", fix="correct the function") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)
        for name, value in found.items()
    ):
        raise UsageError(f"--scorer {text}: returned {found!r:.200}", expected=EXPECTED)
    return {name: float(value) for name, value in found.items()}


Scorer = Callable[[list[str], list[str]], dict[str, float]]
"""Maps answers and references, in the same order, to scores by name."""


@dataclass
class Kept:
    """Answers and losses computed so far; by default in memory alone."""

    answers: KeptAnswers = field(default_factory=KeptAnswers)
    losses: KeptLosses = field(default_factory=KeptLosses)


@dataclass
class Scores:
    """Metrics by name, sample answers (prompt, answer, reference), and the number of samples scored."""

    metrics: dict[str, float]
    samples: list[Answer] = field(default_factory=list)
    count: int = 0
    notes: list[str] = field(default_factory=list)
    """Sentences for the user on how to read the metrics."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """The value of each sample, in data order, for metrics that are a mean over samples."""
    classes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Precision, recall, f1 and count by label of the references, for the metric accuracy."""


def evaluate(
    context: EvaluationContext,
    data: TokenData,
    metrics: Sequence[str],
    *,
    limit: int | None,
    samples: int,
    kept: Kept | None = None,
    scorer: Scorer | None = None,
    by_source: bool = False,
) -> Scores:
    """Score the first `limit` samples (None: all) by `metrics`, and keep the first `samples` answers for the user to
    read. With `by_source` each source of several also has its own "NAME/loss", "NAME/exact_match" and so on.

    `loss` is the mean over target tokens, `perplexity` its exponential. For scores of text, answers are generated from
    the tokens before the last answer and compared with it, white space trimmed. What is in `kept` is not computed
    again.

    Of data in pairs, `limit` counts pairs, and the metrics are the preference loss and the rewards.

    Raises MemoryExhaustedError when one sample at a time does not fit, EvaluationStopped when `context.should_stop`
    does.
    """
    rows = 2 if data.in_pairs else 1
    count, kept = min(len(data), rows * limit if limit else len(data)), kept or Kept()
    result = Scores({}, count=count)
    with eval_mode(context.loaded.model):
        sources = _rows_by_source(data, count) if by_source else {}
        if data.in_pairs:
            return Scores(_pair_metrics(context, data, count, sources), count=count // 2)
        if data.mismatched is not None:
            return Scores(_answer_metrics(context, data, data.mismatched, count), count=count)
        if "loss" in metrics:
            parts = sources or {"": np.arange(count)}
            means = {name: _mean_loss(context, data, rows, kept.losses) for name, rows in parts.items()}
            targets = {name: int(data.target_counts[rows].sum()) for name, rows in parts.items()}
            loss = math.fsum(means[name] * targets[name] for name in parts) / max(1, sum(targets.values()))
            loss = loss if sources else means[""]
            result.metrics |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
            result.metrics |= {f"{name}/loss": means[name] for name in sources}
        of_text = scorer is not None or any(name in metrics for name in (*TEXT_SCORES, ACCURACY))
        if of_text or samples:
            answers = answer_first(context, data, count if of_text else min(samples, count), kept.answers)
            _score_texts(result, answers, metrics, scorer)
            result.samples = answers[:samples]
        result.metrics |= _means_by_source(result.values, sources)
    return result


def _rows_by_source(data: TokenData, count: int) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each source among the first `count`, by the source's name; empty unless there are several."""
    of_row = data.source_of[:count]
    rows = {data.source_names[number]: np.flatnonzero(of_row == number) for number in np.unique(of_row)}
    return rows if len(rows) > 1 else {}


def _means_by_source(
    values: Mapping[str, Sequence[float]], sources: Mapping[str, NDArray[np.int64]]
) -> dict[str, float]:
    """Return "NAME/METRIC" for the metrics that are means over samples, of sources whose samples all have a value."""
    return {
        f"{name}/{metric}": float(np.mean(np.asarray(scores)[rows]))
        for metric, scores in values.items()
        for name, rows in sources.items()
        if int(rows.max()) < len(scores)
    }


def _score_texts(result: Scores, answers: list[Answer], metrics: Sequence[str], scorer: Scorer | None) -> None:
    chosen = [name for name in TEXT_SCORES if name in metrics]
    for name in chosen:
        scores = [TEXT_SCORES[name](answer["answer"], answer["reference"]) for answer in answers]
        result.values |= {each: [score[each] for score in scores] for each in scores[0]}
    texts, references = ([answer[key] for answer in answers] for key in ("answer", "reference"))
    if ACCURACY in metrics:
        result.values[ACCURACY] = [float(one == other) for one, other in zip(texts, references, strict=True)]
    result.metrics |= {name: sum(values) / len(values) for name, values in result.values.items()}
    if ACCURACY in metrics:
        result.classes, means = score_labels(texts, references)
        result.metrics |= means
    if scorer is not None:
        result.metrics |= scorer(texts, references)
    if "rouge" in chosen and lost_letters(references) > MOST_LOST:
        result.notes.append("rouge counts only the letters a to z, but the references contain many others")


def _mean_loss(context: EvaluationContext, data: TokenData, rows: NDArray[np.int64], kept: KeptLosses) -> float:
    """Return the mean loss per target token of `rows`. Sums in `kept` are not computed again; new ones are added."""
    known = {sample for samples in kept.among(rows) for sample in samples}
    left = np.array([index for index in rows.tolist() if index not in known], np.int64)
    run_passes(context, data, left, "evaluate", kept.add)
    return math.fsum(kept.among(rows).values()) / max(1, int(data.target_counts[rows].sum()))


def _answer_metrics(context: EvaluationContext, data: TokenData, mismatched: TokenData, count: int) -> dict[str, float]:
    """The metrics of KTO over the first `count` answers."""
    assert context.preference is not None
    rows = np.arange(count)
    policy, reference = sequence_log_probabilities(context, data, rows)
    differences = 0.0
    if reference is not None:
        other, held = sequence_log_probabilities(context, mismatched, rows)
        differences = 0.0 if held is None else float((other - held).sum())
    desirable, tokens = data.desirable[:count], data.target_counts[:count]
    return answer_scores(context.preference, policy, reference, differences, desirable, tokens)


def _pair_metrics(
    context: EvaluationContext, data: TokenData, count: int, sources: Mapping[str, NDArray[np.int64]]
) -> dict[str, float]:
    """Return the metrics of an objective of pairs over the first `count` sequences, and the loss of each source."""
    if context.preference is None:
        raise UsageError(
            "the data contains preferences, but the run was not trained on preferences",
            expected="prompts with completions, or conversations",
            fix="choose other sources, or set the columns to those of the chosen answers",
        )
    policy, reference = sequence_log_probabilities(context, data, np.arange(count))
    metrics = pair_scores(context.preference, policy, reference, data.target_counts[:count])
    for name, rows in sources.items():
        held = None if reference is None else reference[rows]
        scores = pair_scores(context.preference, policy[rows], held, data.target_counts[rows])
        metrics |= {f"{name}/loss": scores["loss"]} if "loss" in scores else {}
    return metrics


def sequence_log_probabilities(
    context: EvaluationContext, data: TokenData, indices: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Log-probability of the target tokens of each of these sequences: by the policy, and by the reference where there
    is one. float64[sequences] each."""
    place = {int(index): number for number, index in enumerate(indices)}
    found = np.full((len(indices), 2), np.nan)

    def take(members: list[int], values: list[tuple[float, float | None]]) -> None:
        for member, (policy, reference) in zip(members, values, strict=True):
            found[place[member]] = policy, np.nan if reference is None else reference

    run_passes(context, data, indices, "log_probabilities", take)
    return found[:, 0], None if np.isnan(found[:, 1]).any() else found[:, 1]


def run_passes(
    context: EvaluationContext, data: TokenData, indices: NDArray[np.int64], kind: str, take: Callable[..., None]
) -> None:
    """Run `PASSES[kind]` over all of `indices` in micro-batches under the context's budget, which learns; `take` gets
    each micro-batch's samples and result. Raises as `evaluate` does."""
    device, budget = context.device, context.budget
    held_bytes = device.memory().allocated_bytes
    failures, clean = 0, True
    waiting = _planned(context, data, indices)
    while waiting:
        if context.should_stop():
            raise EvaluationStopped
        chosen, cost_bytes = waiting[: context.shares], waiting[0][1]
        device.reset_peak()
        found = context.attempt(kind, data, [members.tolist() for members, _ in chosen])
        if not isinstance(found, FailedPass):
            for (members, _), result in zip(chosen, found, strict=True):
                take(members.tolist(), result)
            budget.record_success(cost_bytes, _measured(device, held_bytes))
            failures, waiting = 0, waiting[len(chosen) :]
            continue
        failures, clean = failures + 1, False
        device.release_cached()
        proven, rows = cost_bytes <= budget.proven_bytes, max(len(members) for members, _ in chosen)
        if retries_unchanged(context, found, failures, proven=proven, rows=rows):
            continue
        before, failed_bytes = budget.budget_bytes, max(cost for _, cost in chosen)
        budget.cut(failed_bytes, device.available_bytes - held_bytes)
        context.report(found, "cut", before, budget.budget_bytes)
        waiting = _planned(context, data, np.concatenate([members for members, _ in waiting]))
    if clean:
        budget.record_clean_step(device.available_bytes - held_bytes, may_grow=True)


def _planned(
    context: EvaluationContext, data: TokenData, indices: NDArray[np.int64]
) -> list[tuple[NDArray[np.int64], int]]:
    """(sample indices, predicted bytes) of each micro-batch."""
    if not len(indices):
        return []
    patches = None if data.patches is None else data.patches[indices]
    budget_bytes = context.budget.budget_bytes
    groups = plan_micro_batches(data.lengths[indices], context.cost, budget_bytes, patches=patches)
    return [(indices[list(group.members)], group.cost_bytes) for group in groups]


def _measured(device: Device, held_bytes: int) -> int:
    """0 on the plain CPU, which cannot measure a peak."""
    return 0 if device.kind == "cpu" else max(0, device.memory().peak_bytes - held_bytes)


def scores_as_json(scores: Scores) -> dict[str, Any]:
    """Without the values of single samples."""
    found = {"metrics": scores.metrics, "count": scores.count, "samples": scores.samples, "notes": scores.notes}
    return found | ({"classes": scores.classes} if scores.classes else {})
