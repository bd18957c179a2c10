"""Comparing runs: only differing settings are shown, the best run by each score is marked, and a warning is given if
scores cannot be compared."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UsageError
from engine.journal.compare import Comparison, compare, compare_summaries, flatten_settings
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.evaluations import Evaluation, append_evaluation, now, scoring
from engine.journal.events import EventWriter
from engine.journal.score_groups import gains, refuse_unscored
from engine.journal.summary import summarise
from tests.journal.event_fields import step_fields
from tests.present import present


def finished(
    folder: Path, name: str, loss: float, speed: float = 10.0, *, rate: float = 1e-3, more: str = "",
    earlier: tuple[float, ...] = (),
) -> Any:  # fmt: skip
    """A run whose last evaluation has this loss, and whose earlier ones, from step 0 on, have these."""
    text = (
        f'name = "{name}"\n[profile]\nname = "p"\n[profile.device]\nkind = "cpu"\n[recipe]\nname = "{name}"\n'
        f"[recipe.train]\nlearning_rate = {rate}\nseed = 1\n{more}"
    )
    run = create_run_directory(folder, name, text, {})
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        writer.write("step", **{**step_fields(max(1, len(earlier))), "tokens_per_second": speed})
        for step, value in enumerate([*earlier, loss], 0 if earlier else 1):
            writer.write("eval", step=step, metrics={"loss": value, "exact_match": 1 - value})
        writer.write("run_finished", status="done", exit_code=0, result="model")
    return run


def compared(*runs: RunDirectory) -> Comparison:
    return compare(runs)


def test_only_settings_that_differ_are_shown(tmp_path: Path) -> None:
    found = compared(finished(tmp_path, "a", 0.5), finished(tmp_path, "b", 0.4, rate=2e-3))
    assert found.settings == {"train.learning_rate": [1e-3, 2e-3]}


def test_the_best_is_the_lowest_loss_and_the_highest_match(tmp_path: Path) -> None:
    a, b = finished(tmp_path, "a", 0.5, 30.0), finished(tmp_path, "b", 0.4, 20.0)
    best = compared(a, b).best
    assert best["loss"] == best["exact_match"] == [b.name]
    assert best["tokens_per_second"] == [a.name]


def test_no_run_took_the_least_time_while_one_has_not_ended(tmp_path: Path) -> None:
    """Regression: a run that had just begun had the star for its time."""
    done, begun = finished(tmp_path, "a", 0.5), finished(tmp_path, "b", 0.4)
    seconds = {done.name: 9.0, begun.name: 2.0}
    summaries = [replace(summarise(run), total_seconds=seconds[run.name]) for run in (done, begun)]
    assert compare_summaries(summaries, [{}, {}], [[], []]).best["seconds"] == [begun.name]
    summaries[1] = replace(summaries[1], status="running")
    found = compare_summaries(summaries, [{}, {}], [[], []])
    assert "seconds" not in found.best and found.best["loss"] == [begun.name]


def test_the_best_run_has_the_best_evaluation_of_all_by_the_recipe_s_metric(tmp_path: Path) -> None:
    """Also where another run ended better, or the model was better before training (step 0)."""
    a = finished(tmp_path, "a", 0.5, earlier=(0.9, 0.2))
    b = finished(tmp_path, "b", 0.4, earlier=(0.1, 0.3))
    found = compared(a, b)
    assert found.scores["loss"] == [0.5, 0.4] and found.scores["best_loss"] == [0.2, 0.3]
    assert found.best["loss"] == [b.name] and found.best["best_loss"] == [a.name]
    assert found.sentence == f"best by loss (checkpoint.best_metric): {a.name} (0.2 at step 1)"
    highest = '[recipe.checkpoint]\nbest_metric = "exact_match"\n'
    c = finished(tmp_path, "c", 0.5, earlier=(0.9, 0.6), more=highest)
    d = finished(tmp_path, "d", 0.7, earlier=(0.9, 0.4), more=highest)
    assert compared(c, d).best["best_exact_match"] == [d.name]
    assert compared(a, c).sentence == ""


def test_nobody_is_best_on_a_draw_or_alone(tmp_path: Path) -> None:
    a, b = finished(tmp_path, "a", 0.5), finished(tmp_path, "b", 0.5)
    assert "loss" not in compared(a, b).best
    never_started = create_run_directory(tmp_path, "c", 'name = "c"\n', {})
    assert compared(a, never_started).best == {}


def test_other_validation_samples_are_warned_of(tmp_path: Path) -> None:
    other = '[[recipe.data.validation]]\nname = "held"\npath = "x.jsonl"\n'
    (warning,) = compared(finished(tmp_path, "a", 0.5), finished(tmp_path, "b", 0.4, more=other)).warnings
    assert "evaluated on different samples" in warning


def test_entries_of_lists_are_addressed_by_name() -> None:
    spec = {"recipe": {"data": {"sources": [{"name": "x", "limit": 5}]}, "name": "r"}}
    assert dict(flatten_settings(spec)) == {"data.sources.x.name": "x", "data.sources.x.limit": 5}


def scored(run: RunDirectory, step: int, values: list[float], *, data: str = "same", metric: str = "mean_iou") -> None:
    mean = sum(values) / len(values)
    found = Evaluation(now(), step, {metric: mean}, len(values), data, {}, weights=str(step))
    with scoring(run, lambda text: None):
        append_evaluation(run, found, {metric: values})


def test_scores_are_compared_on_the_same_samples_and_the_last_checkpoint_counts(tmp_path: Path) -> None:
    a, b, c = (finished(tmp_path, name, 0.5) for name in "abc")
    scored(a, 0, [0.1, 0.2])
    scored(a, 10, [0.9, 0.9])
    scored(a, 20, [0.5, 0.6])
    scored(b, 10, [0.7, 0.8])
    scored(b, 10, [1.0], data="others")
    same, others = compared(a, b, c).groups
    assert same.steps == [20, 10, None] and others.steps == [None, 10, None]
    assert same.metrics == {"mean_iou": [0.55, 0.75, None]} and same.best == {"mean_iou": [b.name]}
    assert same.checkpoints[0] == {0: {"mean_iou": pytest.approx(0.15)}, 10: {"mean_iou": 0.9}, 20: {"mean_iou": 0.55}}


def test_keys_that_say_how_a_run_is_scored_do_not_differ(tmp_path: Path) -> None:
    more = "[recipe.eval]\nlimit = 8\n[recipe.evaluate]\nlimit = 4\n"
    found = compared(finished(tmp_path, "a", 0.5), finished(tmp_path, "b", 0.4, more=more))
    assert found.settings == {} and "evaluated on different samples" in found.warnings[0]


def test_gains_are_paired_by_sample_and_seeded(tmp_path: Path) -> None:
    drawn = random.Random(1)
    a, b, c = (finished(tmp_path, name, 0.5) for name in "abc")
    base = [drawn.random() for _ in range(200)]
    scored(a, 10, base)
    scored(b, 10, [value + 0.1 + drawn.gauss(0, 0.01) for value in base])
    scored(c, 10, [value + drawn.gauss(0, 0.01) for value in base])
    found = gains([a, b, c], "mean_iou", a.name)
    one, other = found.rows
    assert found == gains([a, b, c], "mean_iou", a.name)
    # Unpaired, the interval would be ten times as wide: the samples differ far more than the runs.
    assert 0.097 < present(one.low) < one.gain < present(one.high) < 0.103
    assert present(other.low) < 0 < present(other.high) or abs(other.gain) < 0.003
    assert found.sentence.startswith(f"{b.name} is the best by mean_iou") and "95 % interval" in found.sentence


def test_a_lower_loss_is_a_gain_and_a_missing_score_names_the_command(tmp_path: Path) -> None:
    a, b = (finished(tmp_path, name, 0.5) for name in "ab")
    scored(a, 0, [2.0, 3.0], metric="loss")
    scored(a, 10, [1.0, 2.0], metric="loss")
    scored(b, 10, [1.5, 2.5], metric="loss")
    assert [row.gain for row in gains([a, b], "loss", "base").rows] == [1.0, 0.5]
    with pytest.raises(UsageError, match="rougeL"):
        gains([a, b], "rougeL", a.name)
    refuse_unscored([a, b], "loss")
    with pytest.raises(UsageError, match="no rouge for "):
        refuse_unscored([a, b], "rouge")


def test_losses_of_other_objectives_are_not_ranked(tmp_path: Path) -> None:
    pairs = '[recipe.method]\nobjective = "dpo"\n'
    staged = '[[recipe.stages]]\nname = "prefer"\nmethod = { objective = "dpo" }\n'
    for name, more in (("b", pairs), ("c", staged)):
        found = compared(finished(tmp_path, f"a-{name}", 0.5), finished(tmp_path, name, 0.004, more=more))
        assert found.sentence == "" and not {"loss", "best_loss", "train_loss"} & set(found.best)
        assert "different objectives" in " ".join(found.warnings)


def test_scores_of_preferences_are_ranked_where_one_is_better(tmp_path: Path) -> None:
    """Rewards are beta times a difference, so margins by another beta are on another scale."""

    def scored(name: str, more: str, margin: float) -> Any:
        run = finished(tmp_path, name, 0.5, more=more)
        with EventWriter(run) as writer:
            writer.write("eval", step=2, metrics={"rewards_margin": margin, "logps_rejected": -margin, "kl": margin})
        return run

    best = compared(scored("a", "", 1.0), scored("b", "", 2.0)).best
    assert "rewards_margin" in best and not {"logps_rejected", "kl"} & set(best)
    other = compared(scored("c", "", 1.0), scored("d", "[recipe.preference]\nbeta = 0.5\n", 2.0))
    assert "rewards_margin" not in other.best
