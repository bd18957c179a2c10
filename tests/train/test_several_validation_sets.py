"""Several validation sets: each has its loss by name, and one of them may decide which checkpoint is the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.check.rules import problems_of_recipe
from engine.config.schema.run import RunSpec
from engine.journal.checkpoints_on_disk import best_step
from tests.train.run_helpers import make_spec, new_run, of_kind, train, write_samples


def several(folder: Path, best_metric: str) -> RunSpec:
    main = write_samples(folder / "main.jsonl")
    source = {"name": "main", "path": str(main), "template": "none"}
    files = {name: write_samples(folder / f"{name}.jsonl", count=6, seed=seed) for name, seed in (("a", 1), ("b", 2))}
    held = [{"name": name, "path": str(file), "template": "none"} for name, file in files.items()]
    return make_spec(
        main,
        data={"sources": [source], "validation": held, "max_length": 64},
        eval={"per_epoch": 2, "metrics": ["loss", "exact_match"]},
        generate={"max_new_tokens": 4},
        checkpoint={"every_minutes": 0, "best_metric": best_metric},
    )


def test_each_set_is_scored_by_name(tmp_path: Path) -> None:
    place = new_run(tmp_path, several(tmp_path, "b/loss"))
    code, events = train(place)
    evaluations = of_kind(events, "eval")
    assert code == 0 and [event["step"] for event in evaluations] == [3, 6]
    for event in evaluations:
        metrics = event["metrics"]
        assert min(metrics["a/loss"], metrics["b/loss"]) < metrics["loss"] < max(metrics["a/loss"], metrics["b/loss"])
        assert {"a/exact_match", "b/exact_match"} <= metrics.keys()
    losses = {event["step"]: event["metrics"]["b/loss"] for event in evaluations}
    assert best_step(place.checkpoints) == min(losses, key=lambda step: losses[step])


@pytest.mark.parametrize(("metric", "accepted"), [("a/loss", True), ("c/loss", False), ("a/perplexity", False)])
def test_the_best_metric_names_a_set_that_there_is(metric: str, accepted: bool, tmp_path: Path) -> None:
    assert (not problems_of_recipe(several(tmp_path, metric).recipe)) == accepted
