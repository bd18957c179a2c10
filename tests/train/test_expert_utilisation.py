"""Runs of mixtures: the use of experts is counted exactly once, summarised, warned of, and survives a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batching.budget import MicroBatchBudget
from engine.config.schema.run import RunSpec
from engine.device.metered import MeteredDevice
from engine.train.run import expert_utilisation, main
from engine.train.run.expert_utilisation import LOGGED_STEPS, ExpertCounters, ExpertUtilisation, entropies
from engine.train.step.transaction import StepTransaction
from tests.model.samples import MIXTURES, write_model
from tests.train.run_helpers import Workshop, losses, make_spec, new_run, of_kind, train, write_samples

FEW = {"max_steps": 6, "batch_size": 8, "micro_batch": 4, "learning_rate": 1e-3, "seed": 3}


def mixture_spec(folder: Path, family: str = "mixtral", **tables: Any) -> RunSpec:
    """A small run of a tiny mixture whose routers learn, with a weight that matters."""
    model = {"id": str(write_model(folder / family, family, **MIXTURES[family])), "init": "pretrained"}
    moe = {"aux_loss_weight": 0.1, **tables.pop("moe", {})}
    return make_spec(write_samples(folder / "samples.jsonl"), **{"model": model, "train": FEW, "moe": moe, **tables})


def test_entropy_is_0_at_k_experts_and_1_at_even_shares() -> None:
    choices_LE = np.array([[50, 50, 0, 0], [25, 25, 25, 25], [50, 25, 25, 0], [0, 0, 0, 0]])
    found = entropies(choices_LE, 2)
    assert found[[0, 1, 3]].tolist() == pytest.approx([0.0, 1.0, 1.0]) and 0.4 < found[2] < 0.6
    assert entropies(choices_LE, 4).tolist() == [1.0] * 4


def test_summary_names_the_least_even_layer() -> None:
    found = ExpertUtilisation((3, 7), 2).summary(np.array([[25, 25, 25, 25], [50, 50, 0, 0]]))
    assert found == {"mean": [0.375, 0.375, 0.125, 0.125], "least": 0.0, "most": 0.5, "entropy": 0.0, "layer": 7}


def test_a_layer_is_warned_of_once_after_enough_logged_steps_in_a_row() -> None:
    judge, counters = ExpertUtilisation((3, 7), 2), ExpertCounters()
    even, collapsed = np.full((2, 4), 25), np.array([[25, 25, 25, 25], [50, 49, 1, 0]])
    steps = [*[collapsed] * (LOGGED_STEPS - 1), even, *[collapsed] * (2 * LOGGED_STEPS)]
    due = [[warning.code for warning in judge.warnings(counters, step)] for step in steps]
    first = 2 * LOGGED_STEPS - 1
    assert due[first] == ["expert_collapse", "expert_dead"] and sum(map(len, due)) == 2
    (again,) = [list(judge.warnings(ExpertCounters(**vars(counters)), collapsed))]
    assert again == []


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_capped_run_learns_what_a_roomy_one_learns(tmp_path: Path, family: str) -> None:
    found: list[list[dict[str, Any]]] = []
    for name in ("roomy", "capped"):
        gib = 0.8 * found[0][-1]["measured"]["peak_bytes"] / 2**30 if found else 8.0
        tables = {"train": {**FEW, "max_steps": 4, "micro_batch": 8, "gradient_checkpointing": False}}
        code, events = train(new_run(tmp_path / name, mixture_spec(tmp_path, family, memory_gib=gib, **tables)))
        assert code == 0, events[-1]
        found.append(events)
    roomy, capped = found
    assert of_kind(capped, "backoff") and not of_kind(roomy, "backoff")
    assert list(losses(capped).values()) == pytest.approx(list(losses(roomy).values()), rel=1e-5)
    pairs = zip(of_kind(roomy, "step"), of_kind(capped, "step"), strict=True)
    assert all(one["aux_loss"] == pytest.approx(other["aux_loss"], rel=1e-4) for one, other in pairs)
    use = of_kind(roomy, "step")[-1]["expert_utilisation"]
    assert sum(use["mean"]) == pytest.approx(1.0, abs=1e-4) and use["least"] <= min(use["mean"])
    assert of_kind(roomy, "step")[-1]["loss"] < of_kind(roomy, "step")[0]["loss"]


def test_a_retried_micro_batch_is_counted_once(tmp_path: Path) -> None:
    found = []
    for faults in ((), (40, 220)):
        with Workshop(mixture_spec(tmp_path), tmp_path / f"faults-{len(faults)}") as setup:
            context, samples = setup.context, setup.order.step(1)
            budget = context.cost(4, int(context.data.lengths.max()))
            context.budget = MicroBatchBudget(budget, top_bytes=budget)
            transaction = StepTransaction(context)
            device = cast(MeteredDevice, context.device)
            for fault in faults:
                device.fail_at(fault)
                transaction.probe(1, samples)
            device.fail_at(300)
            outcome = transaction.run(1, samples)
            assert outcome.choices_LE is not None
            assert (outcome.choices_LE.sum(1) == 2 * int(context.data.lengths[samples].sum())).all()
            found.append((outcome.loss, outcome.auxiliary_loss))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_matrices_after_a_resume_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "data": {"valid_fraction": 0.1},
        "eval": {"every_steps": 3},
        "checkpoint": {"every_steps": 2, "every_minutes": 0, "keep": 5},
    }
    place = new_run(tmp_path / "runs", mixture_spec(tmp_path, **tables))
    assert train(place)[0] == 0
    before = {path.name: path.read_text() for path in place.experts.iterdir()}
    assert sorted(before) == ["step-00000003.json", "step-00000006.json"]
    matrix = json.loads(before["step-00000006.json"])
    assert (matrix["step"], matrix["steps"], matrix["layers"]) == (6, 3, [0, 1])
    assert np.array(matrix["shares"]).shape == (2, 4)
    place.expert_matrix(6).unlink()
    assert main.run(place.path, from_step=4) == 0
    assert place.expert_matrix(6).read_text() == before["step-00000006.json"]


def test_collapsed_gates_are_warned_of_and_an_unwatched_run_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_utilisation, "LOGGED_STEPS", 2)
    told = []
    for watched in (True, False):
        spec = mixture_spec(tmp_path, moe={"freeze_router": True, "aux_loss_weight": 0.0, "watch_experts": watched})
        _collapse(tmp_path / "mixtral")
        _, events = train(new_run(tmp_path / f"runs-{watched}", spec))
        told.append([event for event in of_kind(events, "warning") if event["code"].startswith("expert_")])
        assert all(("expert_utilisation" in event) == watched for event in of_kind(events, "step"))
        assert not any("aux_loss" in event for event in of_kind(events, "step"))
    assert [event["code"] for event in told[0]] == ["expert_collapse", "expert_dead"] * 2 and told[1] == []
    assert all("aux_loss_weight" in event["fix"] and "freeze_router" in event["fix"] for event in told[0])


def _collapse(folder: Path) -> None:
    """Make every router choose the first two experts."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if name.endswith("gate.weight")]:
        weights[name] = torch.zeros_like(weights[name])
    save_file(weights, path, {"format": "pt"})
