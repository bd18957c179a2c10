"""A run with trackers: killed and resumed, each event is forwarded once; a tracker that fails becomes a warning."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from engine.journal.directory import RunDirectory
from engine.launch.process import start_engine
from engine.launch.resume_run import prepare_resume
from tests.events import read_events
from tests.journal.waiting import until
from tests.stages.staged_runs import kill_engine, wait_for
from tests.trackers.look_alikes import install, points_of, records_of_tensorboard
from tests.train.run_helpers import make_spec, new_run, write_samples

GIVE_UP_SECONDS = 180.0

Points = list[tuple[int, str]]


def losses_in_journal(directory: RunDirectory) -> Points:
    """Step and name of each loss in the journal."""
    names = {"step": "train/loss", "eval": "eval/loss"}
    return [(event["step"], names[event["kind"]]) for event in read_events(directory.events) if event["kind"] in names]


def test_killed_and_resumed_every_event_is_forwarded_once_and_a_failing_tracker_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path)
    monkeypatch.setenv("WANDB_LOOK_ALIKE", "no key")
    spec = make_spec(
        write_samples(tmp_path / "samples.jsonl", count=24),
        train={"max_steps": 8},
        data={"valid_fraction": 0.2},
        eval={"every_steps": 4},
        checkpoint={"every_steps": 2, "every_minutes": 0},
        trackers={"use": ["tensorboard", "wandb"]},
    )
    run = new_run(tmp_path / "runs", spec)
    engine = start_engine(run)
    wait_for(lambda: (3, "train/loss") in losses_in_journal(run), engine)
    kill_engine(run)
    engine.wait()
    prepare_resume(run, ["train.max_steps=10"], {})  # longer, in case that all 8 steps were done before the kill
    assert start_engine(run, resume=True).wait(GIVE_UP_SECONDS) == 0, run.log.read_text()

    forwarded = Counter[tuple[int, str]]
    until(lambda: len(points_of(run, "tensorboard")) >= len(losses_in_journal(run)))
    assert forwarded(points_of(run, "tensorboard")) == forwarded(losses_in_journal(run))
    assert any("session_log" in record for record in records_of_tensorboard(run))
    warnings = [event for event in read_events(run.events) if event["kind"] == "warning" and event["code"] == "tracker"]
    assert warnings and all("No API key" in event["text"] for event in warnings)
    assert all(f"tunedeck sync {run.path}" in event["fix"] for event in warnings)
