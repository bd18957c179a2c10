"""Models with tensors whose size depends on values: what a simulation assumes of them is the most that they take, and a
plan says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from benchmarks.family_cell import finished, planned
from benchmarks.type_cell import spec_of, write_tiny
from benchmarks.type_configs import tiny_config
from engine.budget.predict.simulated import ASSUMED
from engine.commands.plan_text import summary_lines
from engine.extras.simulate.device import SimulatedDevice
from engine.extras.simulate.fake_tensors import assuming, everywhere, experts_of, settled
from tests.train.run_helpers import write_samples


@pytest.mark.parametrize("model_type", ["dbrx", "jetmoe"])
def test_what_depends_on_a_router_is_planned_at_its_most(tmp_path: Path, model_type: str) -> None:
    model = write_tiny(tiny_config(model_type), tmp_path / "model")
    spec = spec_of(model, "full", write_samples(tmp_path / "samples.jsonl", count=8, longest=44))
    plan = planned(spec)
    assert plan.assumed == ASSUMED["routing"] and ASSUMED["routing"] in summary_lines(plan, spec)
    measured = finished(spec, tmp_path / "run")[1][-1]["measured"]
    assert measured["predicted"]["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.02)


def test_all_tokens_go_to_the_same_experts_and_one_to_each_of_the_others() -> None:
    device = SimulatedDevice(like_a_card=False)
    device.settle("routing", 4)
    with device.simulating(packed=False):
        _, chosen = torch.topk(torch.empty(10, 5), 2, dim=-1)  # the fifth computes nothing
        other = torch.topk(torch.empty(3, 10, 5), 2, dim=-1).indices
    assert torch.bincount(chosen.flatten()).tolist() == [1, 1, 7, 10, 1]
    assert type(chosen) is torch.Tensor and type(other) is not torch.Tensor


def test_a_mask_without_values_selects_all() -> None:
    device = SimulatedDevice(like_a_card=False)
    device.settle("masks", 0)
    with device.simulating(packed=False):
        assert torch.empty(2, 6)[:, torch.empty(6) > 0].shape == (2, 6)
    assert [each.tolist() for each in everywhere(torch.zeros(2, 2, dtype=torch.bool))] == [[0, 0, 1, 1], [0, 1, 0, 1]]
    assert settled(torch.ops.aten.add.Tensor, (torch.ones(1), torch.ones(1)), {}, 4) is None


def test_as_little_is_assumed_as_a_model_needs() -> None:
    tried = []

    def simulate(assumed: str | None) -> str:
        tried.append(assumed)
        if assumed is None:
            raise DynamicOutputShapeException(torch.ops.aten.nonzero.default)
        return "found"

    assert assuming(simulate) == ("found", "masks") and tried == [None, "masks"]
    with pytest.raises(RuntimeError, match="something else"):
        assuming(_strange)


def _strange(assumed: str | None) -> str:
    raise RuntimeError("something else")


def test_the_number_of_experts_is_that_of_the_text_model() -> None:
    assert experts_of({"text_config": {"num_local_experts": 8}}) == 8 and experts_of({"hidden_size": 8}) == 0
    assert experts_of({"ffn_config": {"moe_num_experts": 16}}) == 16
