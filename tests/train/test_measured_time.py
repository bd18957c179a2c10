"""A run keeps how long its steps took beside the model of time; the next plan on this machine is corrected by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.budget.advise.plan import make_plan
from engine.budget.predict.pace import pace_of
from tests.present import present
from tests.train.run_helpers import make_spec, new_run, of_kind, train, write_samples


def test_a_run_keeps_its_pace_and_the_next_one_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "state"))
    samples = write_samples(tmp_path / "samples.jsonl")
    spec = make_spec(samples, train={"max_steps": 8, "batch_size": 4})
    assert make_plan(spec).time is None
    for name, predicted in (("first", False), ("second", True)):
        code, events = train(new_run(tmp_path / name, spec))
        (finished,) = of_kind(events, "run_finished")
        assert code == 0
        assert finished["measured"]["step_seconds"] > 0
        assert ("predicted_step_seconds" in finished["measured"]) is predicted
    pace = present(pace_of(spec))
    assert pace.runs == 2 and pace.same_model
    time = present(make_plan(spec).time)
    assert (time.basis, time.factor) == ("same_model", pace.factor)
    monkeypatch.setenv("TUNEDECK_STATE", str(tmp_path / "short"))
    train(new_run(tmp_path / "short run", make_spec(samples, train={"max_steps": 3, "batch_size": 4})))
    assert pace_of(spec) is None, "three steps tell nothing"
