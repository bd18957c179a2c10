"""Which weights are scored of a stage whose checkpoints were removed when its run was done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.evaluate.run import weights_to_score
from engine.journal.checkpoints_on_disk import remove_checkpoints
from engine.journal.directory import RunDirectory
from tests.train.run_helpers import make_spec, new_run, write_samples


def stage(folder: Path, result: str) -> RunDirectory:
    """A stage with a result, and the record of checkpoints of steps 2, 4 (the best) and 6."""
    samples = write_samples(folder / "samples.jsonl", count=2)
    data = {"sources": [{"name": "main", "path": str(samples)}], "valid_fraction": 0.5}
    spec = make_spec(samples, data=data, checkpoint={"result": result})
    place = new_run(folder / "runs", spec)
    place.model.mkdir()
    for step in (2, 4, 6):
        place.checkpoint(step).mkdir(parents=True)
    (place.checkpoints / "best").write_text(json.dumps({"step": 4}))
    remove_checkpoints(place.checkpoints)
    return place


@pytest.mark.parametrize(
    ("result", "wanted", "step"),
    [
        ("last", None, 6), ("last", "all", 6), ("last", "6", 6),
        ("best", None, 4), ("best", "all", 4), ("best", "4", 4), ("best", "best", 4),
    ],
)  # fmt: skip
def test_its_result_is_scored_as_the_step_that_it_is_of(
    result: str, wanted: str | None, step: int, tmp_path: Path
) -> None:
    place = stage(tmp_path, result)
    assert weights_to_score(place, wanted) == [(step, place.model)]


@pytest.mark.parametrize(
    ("result", "wanted", "reason"),
    [
        ("last", "4", r"were removed"), ("last", "best", r"were removed"), ("best", "6", r"were removed"),
        ("last", "5", "has no checkpoint 5"), ("best", "5", "has no checkpoint 5"),
    ],
)  # fmt: skip
def test_another_step_is_refused_with_the_reason(result: str, wanted: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        weights_to_score(stage(tmp_path, result), wanted)
