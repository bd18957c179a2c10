"""A chain with every kind of stage (expert, assembly, mixture): stopped, paused, killed anywhere, and under a cap."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.budget.advise.staged_plan import make_staged_plan
from engine.config.schema.run import RunSpec
from engine.journal.control import send_request
from engine.journal.directory import RunDirectory
from engine.journal.summary import summarise
from engine.launch.process import start_engine
from engine.launch.resume_run import prepare_resume
from tests.stages.kill_anywhere import MIXTURE, Killer, assert_story_told_once, check, mixture_spec
from tests.stages.staged_runs import conduct, ends_of, events_of, new_staged_run, staged_spec, wait_for


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The chain without any disturbance."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = new_staged_run(folder, mixture_spec(folder, MIXTURE))
    assert conduct(run) == 0, run.log.read_text()
    return run


def same_spec(undisturbed: RunDirectory, folder: Path) -> RunSpec:
    """The spec of the undisturbed run, in another folder."""
    folder.mkdir(exist_ok=True)
    return mixture_spec(undisturbed.path.parent.parent, MIXTURE)


def has_started(run: RunDirectory, stage: str) -> bool:
    """Whether the conductor has started this stage."""
    return stage in [event.get("name") for event in events_of(run, "stage_started")]


def test_a_stop_or_pause_ends_every_kind_of_stage_and_resume_goes_on_there(
    undisturbed: RunDirectory, tmp_path: Path
) -> None:
    run = new_staged_run(tmp_path, same_spec(undisturbed, tmp_path))
    asked = (("one", "stop", "stopped"), ("mixture", "pause", "paused"), ("full", "pause", "paused"))
    for stage, request, status in asked:
        process = start_engine(run, resume=stage != "one")
        wait_for(partial(has_started, run, stage), process)
        send_request(run, request)
        assert process.wait(180) == 130, run.log.read_text()
        assert ends_of(run)[-1][:2] == (stage, status)
        assert summarise(run).status == status
        prepare_resume(run, [], {})
    assert conduct(run, resume=True) == 0, run.log.read_text()
    check(run, undisturbed)


def test_killed_at_any_moment_the_chain_ends_with_the_same_weights(undisturbed: RunDirectory, tmp_path: Path) -> None:
    """A sample; `make torture` runs thirty moments over the longer chain of the recipe expert-merge."""
    said: list[str] = []
    killer = Killer(same_spec(undisturbed, tmp_path), tmp_path, 20261122, said.append)
    check(killer.run_once(2, 8.0), undisturbed)


def test_a_cap_just_above_the_largest_stage_suffices_for_all(tmp_path: Path) -> None:
    """Nothing of a stage is left when the next one starts: three stages run under a cap for little more than one."""
    stages: list[dict[str, Any]] = [
        {"name": "small", "train": {"batch_size": 1, "micro_batch": 1}},
        {"name": "large"},
        {"name": "after", "from": "large"},
    ]
    table = {"max_steps": 1, "micro_batch": 4}
    roomy = staged_spec(tmp_path, stages, train=table, device="metered")
    peaks = [stage.peak_bytes or 0 for stage in make_staged_plan(roomy).stages]
    gib = 1.02 * max(peaks) / 2**30
    spec = staged_spec(tmp_path, stages, train=table, device="metered", memory_gib=gib)
    assert spec.profile.device.capacity_bytes < 0.5 * sum(peaks)
    run = new_staged_run(tmp_path, spec)
    assert conduct(run) == 0, run.log.read_text()
    assert [end[1] for end in ends_of(run)] == ["done"] * 3
    assert events_of(run, "backoff") == []
    assert [event["device_used_bytes"] for event in events_of(run, "stage_started") if "number" in event] == [0] * 3
    assert_story_told_once(run)
