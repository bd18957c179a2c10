"""How long the shortest forward and backward pass takes, and what one more micro-batch costs, is measured once in a
run, stored in its checkpoints, and used to plan later micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.batching.micro_batches import plan_micro_batches
from engine.journal.control import RunRequests
from engine.journal.events import Journal
from engine.train.run.checkpoints import EmergencyHostMemory
from engine.train.run.loop import Training
from engine.train.run.run_context import RunContext, Watchdog
from engine.train.step.ladder import adopt_memory, memory_as_json
from engine.train.step.transaction import StepTransaction, TimedPass
from tests.train.run_helpers import Workshop, make_spec, write_samples


def test_the_floor_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"))
    probe, sizes = StepTransaction.probe, []

    def timed(transaction: StepTransaction, *arguments: Any) -> TimedPass:
        """Run the probe, and replace its time by that of a card on which a pass takes 20 ms and 1 ms for each token, at
        least 50 ms."""
        found = probe(transaction, *arguments)
        sizes.append(found.tokens)
        return found._replace(seconds=max(0.05, 0.02 + found.tokens / 1000))

    monkeypatch.setattr(StepTransaction, "probe", timed)
    bench = Workshop(spec, tmp_path / "run")
    with bench as setup:
        journal = Journal(None)
        run = RunContext(bench.place, journal, RunRequests(None, None, None), Watchdog(journal, 60.0))
        training = Training(setup, run, EmergencyHostMemory())
        budget, lengths = setup.context.budget, setup.context.data.lengths
        training.probe()
        assert len(sizes) == 1 and budget.floor_tokens == 0  # in host memory nothing is timed
        training.measure_floor(lengths.argsort()[::-1][:8].copy())
        assert sizes[1] == sizes[2] > sizes[5] == sizes[6] > sizes[3] == sizes[4] == lengths.min()
        assert sizes[5] == sizes[1] // 2
        assert budget.floor_tokens == 45  # 50 ms at nearly a thousand tokens a second, rounded
        assert budget.launch_tokens == 19  # 20 ms at a thousand tokens a second, rounded
        saved = memory_as_json(setup.context)
        budget.floor_tokens, budget.launch_tokens = 0, 256
        adopt_memory(setup.context, saved)
        training.measure_floor(np.arange(1))
        assert len(sizes) == 7  # a run that goes on keeps its splits
        plan = training.transaction._plan(setup.order.step(1))
        fresh = plan_micro_batches(
            lengths[setup.order.step(1)], setup.context.cost, budget.budget_bytes, budget.floor_tokens, None, 19
        )
        assert plan == fresh
