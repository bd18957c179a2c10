"""Compares scores of runs on equal samples: gains over a reference with bootstrap intervals, and the best run."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from engine.config.schema.data import Evaluate
from engine.errors import UsageError
from engine.journal.directory import RunDirectory, names_held_out_data
from engine.journal.evaluations import Evaluation, read_evaluations, values_of

LOWER_IS_BETTER = frozenset({"loss", "perplexity", "train_loss", "seconds", "peak_bytes"})
"""Of all other scores that can be better, the highest is the best."""

NEITHER_IS_BETTER = frozenset({"rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected", "kl"})
"""Scores of preferences that say where the margin comes from."""


def lower_is_better(metric: str) -> bool:
    """Also of a public task's metric, "TASK/METRIC"."""
    name = metric.split("/")[1] if "/" in metric else metric
    return name in LOWER_IS_BETTER or name.endswith(("perplexity", "bits_per_byte"))


BASE = "base"
"""Stands for a run: the model that the runs started from."""

RESAMPLES, LEVEL, SEED = 2000, 0.95, 0


@dataclass(frozen=True)
class ScoreGroup:
    """The scores of runs on the same samples. Lists have one entry per run, None for a run without scores on them."""

    data: str
    count: int
    sources: list[str]
    steps: list[int | None]
    """Step of the last scored checkpoint, whose scores count."""
    metrics: dict[str, list[float | None]]
    best: dict[str, list[str]]
    """The best runs by metric."""
    checkpoints: list[dict[int, dict[str, float]]]
    """Metrics of each scored checkpoint by step; step 0 is the model that the run started from."""

    @property
    def title(self) -> str:
        return f"{', '.join(self.sources) or 'samples'} ({self.count} samples)"


def headline_metric(group: ScoreGroup) -> str:
    """The first metric other than loss and perplexity, which say less about the task; "loss" if there is no other."""
    return next((name for name in group.metrics if name not in ("loss", "perplexity")), "loss")


class Gain(NamedTuple):
    """How much better a run's metric is than the reference's; negative if the run is worse."""

    run: str
    value: float
    gain: float
    low: float | None
    """Lower end of the 95 % interval, as `high` is the upper; None for a metric that is not a mean over samples."""
    high: float | None

    @property
    def interval(self) -> str:
        return f"{self.low:+.4g} to {self.high:+.4g}" if self.low is not None and self.high is not None else "-"


@dataclass(frozen=True)
class Gains:
    metric: str
    against: str
    reference: float
    rows: list[Gain]
    sentence: str


def score_groups(runs: Sequence[str], evaluations: Sequence[Sequence[Evaluation]]) -> list[ScoreGroup]:
    """Evaluations by samples; the group with the most runs comes first."""
    keys = dict.fromkeys((each.data, each.count) for one in evaluations for each in one)
    groups = [
        _group(runs, [[each for each in one if (each.data, each.count) == key] for one in evaluations]) for key in keys
    ]
    return sorted(groups, key=lambda group: sum(step is None for step in group.steps))


def _group(runs: Sequence[str], evaluations: list[list[Evaluation]]) -> ScoreGroup:
    any_of = next(each for one in evaluations for each in one)
    checkpoints = [_by_step(one) for one in evaluations]
    steps = [max((step for step in found if step), default=None) for found in checkpoints]
    last = [found[step] if step else {} for found, step in zip(checkpoints, steps, strict=True)]
    names = dict.fromkeys(name for each in last for name in each)
    metrics = {name: [each.get(name) for each in last] for name in names}
    best = {name: winners for name, values in metrics.items() if (winners := best_of(name, runs, values))}
    return ScoreGroup(any_of.data, any_of.count, any_of.sources, steps, metrics, best, checkpoints)


def _by_step(evaluations: Sequence[Evaluation]) -> dict[int, dict[str, float]]:
    """Where settings of generation differ, the newest value counts."""
    found: dict[int, dict[str, float]] = {}
    for each in sorted(evaluations, key=lambda each: each.time):
        found[each.step] = {**found.get(each.step, {}), **each.metrics}
    return found


def last_scored(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Of the last checkpoint, the newest one if settings of generation differ; None if no checkpoint was scored."""
    return max((each for each in evaluations if each.step), key=lambda each: (each.step, each.time), default=None)


def best_of(key: str, names: Sequence[str], values: Sequence[float | None]) -> list[str]:
    """Runs with the best value; empty if fewer than two runs have a value, all values are equal, or no value is better
    than another."""
    if key in NEITHER_IS_BETTER:
        return []
    known = [value for value in values if value is not None]
    if len(known) < 2 or len(set(known)) == 1:
        return []
    best = min(known) if lower_is_better(key) else max(known)
    return [name for name, value in zip(names, values, strict=True) if value == best]


class BestEvaluation(NamedTuple):
    """The evaluation inside training with the best value of `checkpoint.best_metric`."""

    metric: str
    value: float
    step: int


def best_evaluation(metric: str, values: Mapping[int, float]) -> BestEvaluation | None:
    """The best of `values` (by step), the first one on a draw. Step 0, the model before training, is no checkpoint."""
    trained = {step: value for step, value in sorted(values.items()) if step}
    if not trained:
        return None
    choose = min if lower_is_better(metric) else max
    step = choose(trained, key=trained.__getitem__)
    return BestEvaluation(metric, trained[step], step)


def best_checkpoints(metric: str, values: Mapping[int, float]) -> set[int]:
    """The best of `values` (by step), without step 0; empty if fewer than two other steps have a value."""
    trained = {step: value for step, value in values.items() if step}
    if len(trained) < 2:
        return set()
    best = min(trained.values()) if lower_is_better(metric) else max(trained.values())
    return {step for step, value in trained.items() if value == best}


def gains(directories: Sequence[RunDirectory], metric: str, against: str, *, resamples: int = RESAMPLES) -> Gains:
    """The gains of runs over the run `against` ("base": the model that they started from), by one metric, on the
    samples that most runs are scored on, each with a 95 % bootstrap interval unless `resamples` is 0.

    Raises UsageError if the reference is not scored, or no run is scored by the metric on the same samples.
    """
    found = [read_evaluations(directory) for directory in directories]
    for group in score_groups([directory.name for directory in directories], found):
        same = [[each for each in one if (each.data, each.count) == (group.data, group.count)] for one in found]
        reference = _reference(directories, same, metric, against)
        if reference is None:
            continue
        rows = [
            _gain(directory, chosen, metric, reference, resamples)
            for directory, one in zip(directories, same, strict=True)
            if directory.name != against and (chosen := _scored_by(one, metric)) is not None
        ]
        if rows:
            reference_value = reference[1].metrics[metric]
            return Gains(metric, against, reference_value, rows, _sentence(metric, against, reference_value, rows,
                                                                           group.count))  # fmt: skip
    raise _nothing_to_compare(directories, found, metric, against)


def refuse_unscored(directories: Sequence[RunDirectory], metric: str) -> None:
    """Raises UsageError, with the command that scores them, if no run is scored by this metric."""
    found = [read_evaluations(directory) for directory in directories]
    if not any(_scored_by(one, metric) for one in found):
        raise _nothing_to_compare(directories, found, metric, directories[0].name)


def _scored_by(evaluations: Sequence[Evaluation], metric: str) -> Evaluation | None:
    return last_scored([each for each in evaluations if metric in each.metrics])


def _reference(
    directories: Sequence[RunDirectory], evaluations: Sequence[Sequence[Evaluation]], metric: str, against: str
) -> tuple[RunDirectory, Evaluation] | None:
    """The run `against` or, for "base", the first run whose step 0 (before training) is scored; None if there is
    none."""
    for directory, one in zip(directories, evaluations, strict=True):
        if against == BASE:
            for each in one:
                if each.step == 0 and metric in each.metrics:
                    return directory, each
        elif directory.name == against and (found := _scored_by(one, metric)) is not None:
            return directory, found
    return None


def _gain(
    directory: RunDirectory,
    evaluation: Evaluation,
    metric: str,
    reference: tuple[RunDirectory, Evaluation],
    resamples: int,
) -> Gain:
    sign = -1.0 if lower_is_better(metric) else 1.0
    value = evaluation.metrics[metric]
    gain = sign * (value - reference[1].metrics[metric])
    own, other = values_of(directory, evaluation, metric), values_of(*reference, metric)
    if own is None or other is None or not resamples:
        return Gain(directory.name, value, gain, None, None)
    low, high = bootstrap([sign * (one - two) for one, two in zip(own, other, strict=True)], resamples)
    return Gain(directory.name, value, gain, low, high)


def bootstrap(differences: Sequence[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % percentile interval of the mean of paired differences, by resampling samples with a fixed seed (Efron
    1979, "Bootstrap methods: another look at the jackknife")."""
    drawn, size = random.Random(SEED), len(differences)
    means = sorted(sum(drawn.choices(differences, k=size)) / size for _ in range(resamples))
    outside = round((1 - LEVEL) / 2 * resamples)
    return means[outside], means[resamples - 1 - outside]


def _sentence(metric: str, against: str, reference: float, rows: Sequence[Gain], count: int) -> str:
    """Names the run with the largest gain and the interval, and whether it includes 0; or says that no run is
    better."""
    best = max(rows, key=lambda row: row.gain)
    if best.gain <= 0:
        return f"no run is better than {against} by {metric} ({reference:.4g} on {count} samples)"
    text = f"{best.run} is the best by {metric}: {best.value:.4g}, {best.gain:.4g} better than {against}"
    if best.low is None or best.high is None:
        return f"{text} on {count} samples (no interval)"
    unclear = ", which includes 0: the difference may be due to chance" if best.low <= 0 else ""
    return f"{text} (95 % interval {best.low:.4g} to {best.high:.4g} over {count} samples{unclear})"


HELD_OUT = """ --set 'data.validation=[{name="held", path="FILE"}]'"""
"""The option of `tunedeck eval` that names data to score on."""


def _nothing_to_compare(
    directories: Sequence[RunDirectory], found: Sequence[Sequence[Evaluation]], metric: str, against: str
) -> UsageError:
    runs = " ".join(directory.name for directory in directories)
    names = sorted({name for one in found for each in one for name in each.metrics})
    base = " --base" if against == BASE else ""
    unscored = [place.name for place, one in zip(directories, found, strict=True) if not _scored_by(one, metric)]
    lacks_base = base and not any(each.step == 0 and metric in each.metrics for one in found for each in one)
    if unscored or lacks_base:
        lacking = ["the base model", *unscored] if lacks_base else unscored
        data = "" if "/" in metric or all(map(names_held_out_data, directories)) else HELD_OUT
        return UsageError(
            f"no {metric} for {' and '.join(lacking)}",
            expected=f"one of: {', '.join(names)}" if names and metric not in names else "scores of both",
            fix=f"tunedeck eval {runs if base else ' '.join(unscored)}{base}{_asked_for(metric)}{data}",
        )
    return UsageError(
        f"no {metric} on the same samples for {against} and another run: their validation data differs, "
        "perhaps only because of train.seed",
        expected="scores on the same samples",
        fix=f"tunedeck eval {runs}{base}{HELD_OUT}",
    )


def _asked_for(metric: str) -> str:
    """The options of `tunedeck eval` by which it computes the metric."""
    if "/" in metric:
        return f" --harness {metric.partition('/')[0]}"
    settable = get_args(get_args(Evaluate.model_fields["metrics"].annotation)[0])
    return f""" --set 'evaluate.metrics=["{metric}"]'""" if metric in settable and metric != "loss" else ""
