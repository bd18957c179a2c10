"""The step's gradient does not depend on how the step is cut into micro-batches, nor on how often memory ran out.

With SGD at rate 1 and no clipping, the change of the weights is the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batching.budget import MicroBatchBudget
from engine.train.step.transaction import StepOutcome, StepTransaction
from tests.present import metered
from tests.train.run_helpers import Event, Workshop, make_spec, write_samples

SGD = {"optimizer": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "batch_size": 12} | {
    "gradient_checkpointing": False
}


def weights_after_one_step(
    tmp_path: Path,
    name: str,
    *,
    rows: int = 12,
    faults: Sequence[int] = (),
    gib: float = 8.0,
    dropout: float = 0.0,
    method: str = "full",
    **train: Any,
) -> tuple[torch.Tensor, StepOutcome, list[Event]]:
    """Take one step, with at most `rows` of the longest sequences in a micro-batch; allocations fail in probes before
    the step, as `faults` says. Returns all trainable parameters as one vector, the step's outcome, and the events."""
    data = write_samples(tmp_path / "samples.jsonl", count=36)
    how = {"kind": method, "dropout": dropout} if method == "lora" else {"kind": method}
    workshop = Workshop(make_spec(data, memory_gib=gib, method=how, train={**SGD, **train}), tmp_path / name)
    with workshop as setup:
        context = setup.context
        longest = int(context.data.lengths.max())
        budget = context.cost(rows, longest)
        context.budget = MicroBatchBudget(budget, top_bytes=budget)
        transaction = StepTransaction(context)
        for fault in faults:
            metered(context.device).fail_at(fault)
            transaction.probe(1, setup.order.step(1))
        outcome = transaction.run(1, setup.order.step(1))
        vector = torch.cat([parameter.detach().flatten() for _, parameter in context.loaded.trainable()]).clone()
        return vector, outcome, [event for event in workshop.events() if event["kind"] == "backoff"]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_any_split_gives_the_unsplit_gradient(tmp_path: Path, rows: int, method: str) -> None:
    whole, one, _ = weights_after_one_step(tmp_path, "whole", method=method)
    split, many, _ = weights_after_one_step(tmp_path, "split", rows=rows, method=method)
    assert many.micro_batches > one.micro_batches
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_keyed_dropout_draws_the_same_masks_in_any_split(tmp_path: Path, rows: int) -> None:
    whole, _, _ = weights_after_one_step(tmp_path, "whole", method="lora", dropout=0.3)
    split, _, _ = weights_after_one_step(tmp_path, "split", rows=rows, method="lora", dropout=0.3)
    without, _, _ = weights_after_one_step(tmp_path, "without", method="lora")
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(whole, without, rtol=1e-3, atol=1e-3)


def test_running_out_of_memory_changes_nothing_but_the_split(tmp_path: Path) -> None:
    roomy, one, _ = weights_after_one_step(tmp_path, "roomy")
    tight, many, backoffs = weights_after_one_step(tmp_path, "tight", gib=0.025)
    assert len(backoffs) >= 1
    assert many.micro_batches > one.micro_batches
    torch.testing.assert_close(tight, roomy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"method": "lora", "dropout": 0.3}], ids=["full", "lora, dropout"])
def test_checkpointing_of_any_number_of_layers_is_bit_equal(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, one, _ = weights_after_one_step(tmp_path, "plain", **options)
    for layers in (1, 2, True, "auto"):
        name = f"recomputed {layers}"
        recomputed, other, _ = weights_after_one_step(tmp_path, name, gradient_checkpointing=layers, **options)
        assert torch.equal(plain, recomputed) and one.loss == other.loss, layers
