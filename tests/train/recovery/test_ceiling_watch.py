"""When a step counts as far from running out of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import MicroBatch
from engine.train.step.budget_growth import CLEAN_STEPS, CeilingWatch, is_far
from engine.train.step.context import StepContext

PLAN = [MicroBatch((0,), 64, 80)]
ROOM_BYTES = 100


@pytest.mark.parametrize(
    ("learned", "expected"),
    [
        ({"slope": 1.0}, True),
        ({"slope": 1.2}, False),  # fills 96 of 100 bytes
        ({"slope": 0.0}, False),  # nothing was measured
        ({"slope": 1.0, "ceiling_bytes": 85}, False),
        ({"slope": 1.0, "ceiling_bytes": 100}, True),
        ({"slope": 1.0, "passing_bytes": 85}, False),
    ],
)
def test_a_micro_batch_is_far_if_it_leaves_room_and_costs_less_than_what_failed(
    learned: dict[str, Any], expected: bool
) -> None:
    assert is_far(MicroBatchBudget(200, 200, **learned), 80, ROOM_BYTES) is expected


def test_a_step_is_far_after_clean_steps_with_the_same_remedies() -> None:
    device = SimpleNamespace(available_bytes=ROOM_BYTES + 50)
    budget, remedies = MicroBatchBudget(200, 200, slope=1.0), list[str]()
    context = SimpleNamespace(device=device, static_bytes=50, budget=budget, active_remedies=remedies)
    watch = CeilingWatch(cast(StepContext, context))
    on = partial(remedies.append, "checkpointing")
    changes: list[Callable[[], None]] = [watch.record_failure, on, remedies.clear]
    for change in changes:
        change()
        for _ in range(CLEAN_STEPS):
            assert not watch.is_far(PLAN)
            watch.record_step()
        assert watch.is_far(PLAN) and watch.is_far([])
