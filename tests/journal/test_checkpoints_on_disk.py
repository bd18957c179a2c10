"""Checkpoints as `show` lists them: those that exist on disk, not those that the journal reports; and the budget and
remedies stored in the newest one."""

from __future__ import annotations

import json

from engine.journal.checkpoints_on_disk import LEARNED, best_step, find_checkpoints, learned_memory
from engine.journal.directory import RunDirectory
from engine.journal.summary import summarise

BUDGET = dict.fromkeys(LEARNED, 1000) | {"slope": 1.25, "clean_steps": 3}


def put(run: RunDirectory, step: int, budget: object = BUDGET) -> None:
    """Write a checkpoint folder with a state.json that contains the budget and the remedies."""
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"budget": budget, "remedies": {"checkpointing": True}}))


def test_the_checkpoints_of_a_run_are_those_on_disk(run: RunDirectory) -> None:
    for step in (3, 20, 100):
        put(run, step)
    (run.checkpoints / ".step-00000200.17").mkdir()
    (run.checkpoints / "best").write_text('{"step": 20}')
    assert [saved.step for saved in find_checkpoints(run.checkpoints)] == [100, 20, 3]
    assert summarise(run).checkpoints == [3, 20, 100]
    assert best_step(run.checkpoints) == 20


def test_what_was_learned_is_the_newest_checkpoints_that_can_be_read(run: RunDirectory) -> None:
    assert learned_memory(run) is None
    put(run, 10)
    put(run, 20, budget="torn")
    found = learned_memory(run)
    assert found is not None
    assert (found["step"], found["slope"], found["remedies"]) == (10, 1.25, {"checkpointing": True})
