"""In forward and backward of a micro-batch the host never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batching.budget import MicroBatchBudget
from engine.batching.micro_batches import MicroBatch, plan_micro_batches
from engine.device.host_syncs import host_syncs
from engine.train.step.computation import StepComputation
from engine.train.step.objective import StepTokens
from tests.train.run_helpers import Workshop, make_spec, write_samples


def syncs_of_a_step(tmp_path: Path, rows: int, **tables: Any) -> tuple[list[str], list[MicroBatch]]:
    """The places where the host waits for the device, over all micro-batches of one step; and the micro-batches. `rows`
    is the largest number of the step's longest sequences in one micro-batch."""
    spec = make_spec(write_samples(tmp_path / "samples.jsonl"), **tables)
    with Workshop(spec, tmp_path / "run") as setup:
        context, samples = setup.context, setup.order.step(1)
        lengths = context.data.lengths[samples]
        context.budget = MicroBatchBudget(context.cost(rows, int(lengths.max())), 1 << 40)
        work = StepComputation(context)
        plan = plan_micro_batches(lengths, context.cost, context.budget.budget_bytes)
        found = [sync for group in plan for sync in work.host_syncs(1, samples, group, StepTokens(100, 100))]
        return found, plan


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_no_micro_batch_makes_the_host_wait(tmp_path: Path, attention: str, packing: bool, rows: int) -> None:
    tables = {"model": {"attention": attention}, "data": {"packing": packing}}
    found, plan = syncs_of_a_step(tmp_path, rows, method={"kind": "lora", "dropout": 0.1}, **tables)
    assert max(group.rows for group in plan) >= rows
    assert found == []


def test_activation_offload_and_full_fine_tuning_add_none(tmp_path: Path) -> None:
    found, _ = syncs_of_a_step(tmp_path, 4, train={"activation_offload": True})
    assert found == []


@pytest.mark.parametrize(
    "read",
    [
        lambda x: bool((x > 1).all()),
        lambda x: x.max().item(),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 1),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 1, 0])),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
    ],
)
def test_what_reads_values_back_is_found(read: Callable[[torch.Tensor], object]) -> None:
    x = torch.arange(4.0)
    (found,) = set(host_syncs(lambda: read(x)))
    assert "test_host_syncs.py" in found


def test_what_depends_on_shapes_alone_is_not_taken_for_a_wait() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert host_syncs(lambda: torch.nonzero_static(x > 1, size=2)) == []
    assert host_syncs(lambda: x[torch.tensor([0, 2])].sum().mul(2).cumsum(-1)) == []
    assert host_syncs(lambda: x.to(torch.bfloat16).copy_(x)) == []
