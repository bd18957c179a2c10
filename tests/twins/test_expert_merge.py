"""The twin of expert-merge: two experts and the base become a mixture; its router is trained, then everything."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.budget.advise.staged_plan import make_staged_plan
from engine.journal.directory import RunDirectory
from engine.journal.stages import stage_directories, stage_name
from engine.launch.other_processes import with_simulations
from engine.launch.process import start_engine
from engine.launch.resume_run import prepare_resume
from tests.events import read_events
from tests.stages.staged_runs import (
    assert_equal,
    ends_of,
    events_of,
    kill,
    kill_engine,
    new_staged_run,
    wait_for,
)
from tests.twins.twin import twin, write_model, write_pairs

RECIPE = "expert-merge"
STAGES = ["expert-truthfulqa", "expert-qmsum", "mixture", "router", "full"]
EXPERTS = {0: "expert-truthfulqa", 1: "expert-qmsum", 2: "model"}

GIVE_UP_SECONDS = 900.0
"""For five processes one after another, on a machine that does other things."""

Weights = dict[str, torch.Tensor]


class Chain(NamedTuple):
    folder: Path
    run: RunDirectory
    planned_bytes: list[int]
    capacity_bytes: int


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The whole chain, on a device just above the largest plan of a stage."""
    folder = tmp_path_factory.mktemp("experts")
    write_model(folder / "model", "qwen2", torch.bfloat16)
    write_pairs(folder / "truthfulqa.jsonl", count=24, seed=1, form="( w / {0} )")
    write_pairs(folder / "qmsum.jsonl", count=24, seed=2, form="[{0}]")
    plans = [stage.plan for stage in with_simulations(lambda: make_staged_plan(twin(RECIPE, folder))).stages]
    planned = [plan.prediction.device_bytes for plan in plans if plan is not None]
    spec = twin(RECIPE, folder, memory_gib=1.05 * max(planned) / 2**30)
    run = new_staged_run(folder, spec)
    assert start_engine(run).wait(GIVE_UP_SECONDS) == 0, run.log.read_text()
    return Chain(folder, run, planned, spec.profile.device.capacity_bytes)


def weights_of(folder: Path) -> Weights:
    """The weights in all safetensors files of a model folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def stage_of(run: RunDirectory, name: str) -> RunDirectory:
    return next(stage for stage in stage_directories(run) if stage_name(stage) == name)


def result_of(run: RunDirectory, name: str) -> Weights:
    return weights_of(stage_of(run, name).model)


def has_events(run: RunDirectory, count: int) -> bool:
    return len(list(read_events(run.events))) >= count


def changed(before: Weights, after: Weights) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_every_weight_of_the_mixture_is_a_copy(chain: Chain) -> None:
    base, mixture = weights_of(chain.folder / "model"), result_of(chain.run, "mixture")
    for number, name in EXPERTS.items():
        expert = base if name == "model" else result_of(chain.run, name)
        assert changed(base, expert) <= {key for key in base if ".mlp." in key}
        assert name == "model" or changed(base, expert)
        for key in expert:
            copied = key.replace(".mlp.", f".mlp.experts.{number}.") if ".mlp." in key else key
            assert torch.equal(mixture[copied], expert[key]), copied


def test_a_mixture_of_one_expert_s_copies_computes_what_the_dense_model_computes(chain: Chain) -> None:
    mixture: Any = AutoModelForCausalLM.from_pretrained(stage_of(chain.run, "mixture").model, dtype=torch.float32)
    dense: Any = AutoModelForCausalLM.from_pretrained(chain.folder / "model", dtype=torch.float32)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        for layer in mixture.model.layers:
            for fused in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                fused.copy_(fused[2].expand_as(fused))
        torch.testing.assert_close(mixture(tokens).logits, dense(tokens).logits, rtol=0, atol=1e-5)


def test_the_router_stage_changes_gates_and_the_last_stage_everything(chain: Chain) -> None:
    mixture, router, full = (result_of(chain.run, name) for name in ("mixture", "router", "full"))
    assert changed(mixture, router) == {name for name in mixture if name.endswith("mlp.gate.weight")}
    assert changed(router, full)
    # Beside a weight in bf16 the optimizer keeps what rounding dropped, at first nothing: it shows the smallest change.
    (newest,) = [path for path in stage_of(chain.run, "full").checkpoints.glob("step-*") if path.is_dir()]
    kept = load_file(newest / "optimizer.safetensors")
    dropped = {name: tensor for name, tensor in kept.items() if name.endswith("::remainder")}
    assert len(dropped) == len(list(kept)) // 4 and all(bool(tensor.any()) for tensor in dropped.values())


def test_a_device_just_above_the_largest_stage_runs_all_because_nothing_of_a_stage_outlives_it(chain: Chain) -> None:
    assert ends_of(chain.run) == [(name, "done", 0) for name in STAGES]
    assert not events_of(chain.run, "backoff")
    peaks = [event["peak_bytes"] for event in events_of(chain.run, "stage_finished") if event["peak_bytes"]]
    assert len(peaks) == 4 and max(peaks) <= chain.capacity_bytes
    assert sum(chain.planned_bytes) + peaks[-1] > 2 * chain.capacity_bytes


@pytest.mark.torture
def test_killed_at_random_moments_it_ends_with_the_same_weights_and_each_stage_once(
    chain: Chain, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "runs" / chain.run.name)
    shutil.copytree(chain.run.path, run.path)
    prepare_resume(run, [], {}, from_stage="router")
    told = len(list(read_events(run.events)))
    drawn = random.Random(1)
    for _ in range(2):
        moment = len(list(read_events(run.events))) + drawn.randint(3, 12)
        conductor = start_engine(run, resume=True)
        wait_for(partial(has_events, run, moment), conductor)
        kill(conductor)
        for stage in stage_directories(run):
            kill_engine(stage)
    assert start_engine(run, resume=True).wait(GIVE_UP_SECONDS) == 0, run.log.read_text()
    assert_equal(result_of(run, "full"), result_of(chain.run, "full"))
    again = [event for event in list(read_events(run.events))[told:] if event["kind"] == "stage_finished"]
    assert [(event["name"], event["status"]) for event in again] == [("router", "done"), ("full", "done")]
