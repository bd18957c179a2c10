"""Comparing runs: only differing settings are shown, the best run by each score is marked, and a warning is given if
scores cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.journal.compare import Comparison, compare, flatten_settings
from engine.journal.directory import RunDirectory, create_run_directory
from engine.journal.events import EventWriter
from tests.journal.event_fields import step_fields


def finished(folder: Path, name: str, loss: float, speed: float = 10.0, *, rate: float = 1e-3, more: str = "") -> Any:
    text = (
        f'name = "{name}"\n[profile]\nname = "p"\n[profile.device]\nkind = "cpu"\n[recipe]\nname = "{name}"\n'
        f"[recipe.train]\nlearning_rate = {rate}\nseed = 1\n{more}"
    )
    run = create_run_directory(folder, name, text, {})
    with EventWriter(run) as writer:
        writer.write("run_started", run=run.name, pid=1, world_size=1, versions={})
        writer.write("step", **{**step_fields(1), "tokens_per_second": speed})
        writer.write("eval", step=1, metrics={"loss": loss, "exact_match": 1 - loss})
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


def test_nobody_is_best_on_a_draw_or_alone(tmp_path: Path) -> None:
    a, b = finished(tmp_path, "a", 0.5), finished(tmp_path, "b", 0.5)
    assert "loss" not in compared(a, b).best
    never_started = create_run_directory(tmp_path, "c", 'name = "c"\n', {})
    assert compared(a, never_started).best == {}


def test_other_validation_samples_are_warned_of(tmp_path: Path) -> None:
    other = '[[recipe.data.validation]]\nname = "held"\npath = "x.jsonl"\n'
    (warning,) = compared(finished(tmp_path, "a", 0.5), finished(tmp_path, "b", 0.4, more=other)).warnings
    assert "not evaluated on the same samples" in warning


def test_entries_of_lists_are_addressed_by_name() -> None:
    spec = {"recipe": {"data": {"sources": [{"name": "x", "limit": 5}]}, "name": "r"}}
    assert dict(flatten_settings(spec)) == {"data.sources.x.name": "x", "data.sources.x.limit": 5}
