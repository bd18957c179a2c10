"""Whole runs in shards are evaluated, saved, and resumed by other numbers of ranks, with the losses of one process."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.config.schema.run import RunSpec
from engine.distributed.ranks import SINGLE_PROCESS, Ranks
from engine.journal.directory import RunDirectory
from engine.train.run.main import run_rank0
from engine.train.run.run_context import RunStart
from engine.train.step.piecewise_update import join_
from engine.train.strategy.checkpoint_storage import read_parts
from tests.distributed.rank_processes import run_ranks
from tests.distributed.rank_workbench import FULL, LORA, NEEDS_SHARDS, SAMPLES, sharded, small_model, spec_of
from tests.distributed.resumed_runs import resumed_spec, run_on_ranks
from tests.events import read_events
from tests.model.samples import write_model as write_family
from tests.train.run_helpers import losses, new_run, of_kind, write_samples

pytestmark = NEEDS_SHARDS

CASES: dict[str, dict[str, Any]] = {
    "full": sharded(FULL, "parameters"),
    "lora": sharded(LORA, "gradients", tied=True),
    "full, bf16": {**sharded(FULL, "parameters"), "model": {"dtype": "bfloat16"}},
    "full, bf16 stochastic": {**sharded(FULL, "parameters"), "model": {"dtype": "bfloat16"}},
}
TOLERANCE = {"full": 1e-5, "lora": 1e-5, "full, bf16": 1e-2, "full, bf16 stochastic": 1e-2}
"""How far losses on another number of ranks may be apart."""
IN_BF16: dict[str, dict[str, Any]] = {
    "full, bf16": {"learning_rate": 1e-6},
    "full, bf16 stochastic": {"rounding": "stochastic"},
}
"""Case with weights in bf16 = its keys of [train]. At a rate of 1e-6 nearly every update of a bf16 weight lies in its
remainder."""
REPLICATED = {"parallel": {"strategy": "replicated"}}
OWN_PROMPTS = ["When was it?", "x", "The third, so that one of two ranks answers two"]
LEGS = ((2, 2, "sharded"), (1, 4, "alone"), (2, 6, "sharded"))
"""(ranks, the step they go to, how they share the weights): each goes on where the one before stopped."""


def spec_for(folder: Path, case: str, ranks: int, last_step: int, strategy: str) -> RunSpec:
    """The run spec of `case` for one leg of the run: on `ranks` ranks up to `last_step`."""
    tables: dict[str, Any] = {**small_model(folder, CASES[case]), **(REPLICATED if strategy == "replicated" else {})}
    if case in IN_BF16:
        tables["model"] = {**tables["model"], **CASES[case]["model"]}
        tables["train"] = {**tables["train"], **IN_BF16[case]}
    evaluation = {"every_steps": 2, "metrics": ["loss", "exact_match"], "samples": 1, "prompts": OWN_PROMPTS}
    return resumed_spec(folder, ranks, tables, last_step, evaluation)


def go_on(ranks: Ranks, folder: Path, leg: int) -> list[str]:
    """Run the given leg of every case's run on these ranks; returns how each ended."""
    size, last_step, strategy = LEGS[leg]
    specs = {case: spec_for(folder, case, size, last_step, strategy) for case in CASES}
    return run_on_ranks(ranks, folder, specs, resume=leg > 0)


def first_leg(ranks: Ranks, folder: Path) -> Any:
    return go_on(ranks, folder, 0)


def last_leg(ranks: Ranks, folder: Path) -> Any:
    return go_on(ranks, folder, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_samples(folder / SAMPLES)
    return folder


def straight(folder: Path, case: str) -> RunDirectory:
    """The run of `case` on one process, from beginning to end."""
    spec = spec_for(folder, case, 1, LEGS[-1][1], "alone")
    place = new_run(folder / "straight", spec.model_copy(update={"name": case}))
    assert run_rank0(RunStart(spec, place))[0] == "done"
    return place


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, tuple[RunDirectory, RunDirectory]]:
    """For each case: the run in three legs, and the same run on one process."""
    for case in CASES:
        os.rename(new_run(folder, spec_for(folder, case, 1, 1, "alone")).path, folder / case)
    assert run_ranks([first_leg], folder)["first_leg"][0] == ["done"] * len(CASES)
    assert go_on(SINGLE_PROCESS, folder, 1) == ["done"] * len(CASES)
    assert run_ranks([last_leg], folder)["last_leg"][0] == ["done"] * len(CASES)
    return {case: (RunDirectory(folder / case), straight(folder, case)) for case in CASES}


def own_answers(place: RunDirectory) -> list[list[str]]:
    """The prompts of each evaluation that were answered besides the validation set."""
    return [[sample["prompt"] for sample in event["samples"] if "reference" not in sample and sample["answer"]]
            for event in of_kind(list(read_events(place.events)), "eval")]  # fmt: skip


def metrics(place: RunDirectory) -> dict[int, Any]:
    return {event["step"]: event["metrics"] for event in of_kind(list(read_events(place.events)), "eval")}


Runs = dict[str, tuple[RunDirectory, RunDirectory]]


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_between_ranks_in_shards_and_one_process_on_one_curve(case: str, runs: Runs) -> None:
    legs, whole = (losses(list(read_events(place.events))) for place in runs[case])
    assert len(whole) == LEGS[-1][1]
    assert legs == pytest.approx(whole, rel=TOLERANCE[case])


@pytest.mark.parametrize("case", CASES)
def test_evaluation_over_shards_gives_the_scores_of_one_process(case: str, runs: Runs) -> None:
    legs, whole = (metrics(place) for place in runs[case])
    assert legs.keys() == whole.keys()
    for step, scores in whole.items():
        assert legs[step] == pytest.approx(scores, rel=TOLERANCE[case])


@pytest.mark.parametrize("case", CASES)
def test_own_prompts_are_answered_at_every_evaluation_over_shards(case: str, runs: Runs) -> None:
    legs, whole = (own_answers(place) for place in runs[case])
    assert legs == whole == [OWN_PROMPTS] * len(whole) and whole


@pytest.mark.parametrize("case", CASES)
def test_optimizer_state_is_written_by_every_rank_for_itself(case: str, runs: Runs) -> None:
    last = runs[case][0].checkpoint(LEGS[-1][1])
    assert len(list((last / "optimizer").glob("shard-*.safetensors"))) == LEGS[-1][0]
    assert not list(last.rglob("*.metadata"))


def joined(checkpoint: Path) -> dict[str, Tensor]:
    """The fp32 weights of a checkpoint, by name: bf16 weights and remainders of any number of ranks joined."""
    weights = {name: tensor for file in (checkpoint / "weights").glob("*.safetensors")
               for name, tensor in load_file(file).items()}  # fmt: skip
    files = [*checkpoint.glob("optimizer.safetensors"), *checkpoint.glob("optimizer/*.safetensors")]
    dtypes = {"remainder": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32, "step": torch.float32}
    names = {name for file in files for name in load_file(file)}
    state = {
        name: torch.empty(() if key == "step" else weights[whole].shape, dtype=dtypes[key])
        for name in names
        for whole, _, key in [name.partition("::")]
    }
    read_parts(checkpoint, state)
    found = {}
    for name, weight in weights.items():
        bits = torch.empty(weight.numel(), dtype=torch.int32)
        join_(weight.view(-1), state[f"{name}::remainder"].view(-1), bits)
        found[name] = bits.view(torch.float32)
    return found


def test_remainders_go_from_ranks_to_one_process_and_back(runs: Runs) -> None:
    """The remainders of weights survive the change from several ranks to one process and back: three legs give nearly
    the weights of a run without interruption, although most of each change is in the remainders."""
    legs, whole = (joined(place.checkpoint(LEGS[-1][1])) for place in runs["full, bf16"])
    before = joined(runs["full, bf16"][0].checkpoint(LEGS[1][1]))
    for name in whole:
        assert legs[name].shape == whole[name].shape
    moved_in_last_leg = torch.cat([legs[name] - before[name] for name in whole]).norm()
    apart = torch.cat([legs[name] - whole[name] for name in whole]).norm()
    assert float(moved_in_last_leg) > 0
    assert float(apart / moved_in_last_leg) < 0.1


def test_a_full_model_out_of_shards_opens_with_transformers(runs: Runs) -> None:
    (legs, whole) = (AutoModelForCausalLM.from_pretrained(place.model).state_dict() for place in runs["full"])
    assert legs.keys() == whole.keys()
    for name in whole:
        torch.testing.assert_close(legs[name], whole[name], rtol=1e-4, atol=1e-6)


def test_an_adapter_out_of_shards_opens_with_peft_on_the_base_beside_it(runs: Runs) -> None:
    legs, whole = (load_file(place.adapter / "adapter_model.safetensors") for place in runs["lora"])
    assert legs.keys() == whole.keys()
    for name in whole:
        torch.testing.assert_close(legs[name], whole[name], rtol=1e-4, atol=1e-6)
    folder = runs["lora"][0].adapter
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder)


OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32,
       "max_position_embeddings": 128, "vocab_size": 264, "pad_token_id": 258}  # fmt: skip
PACKED: dict[str, dict[str, Any]] = {
    "refused": {},
    "not packed": {"data": {"packing": False}},
    "replicated": {"parallel": {"strategy": "replicated"}},
}
"""What the fix says to change."""


def packed_spec(folder: Path, name: str) -> RunSpec:
    """A run of OPT, which the budget has no model of, in shards and packed, changed as the fix says."""
    tables: dict[str, Any] = small_model(folder, CASES["full"])
    own: dict[str, Any] = {"model": {"id": str(folder / "opt")}, "data": {"packing": True}, "train": {"max_steps": 1}}
    return spec_of(folder, 2, {**tables, **own, **PACKED[name]})


def packed_leg(ranks: Ranks, folder: Path) -> Any:
    return run_on_ranks(ranks, folder, {name: packed_spec(folder, name) for name in PACKED}, resume=False)


def test_shards_of_a_family_that_is_not_known_train_as_the_fix_says(tmp_path: Path) -> None:
    write_samples(tmp_path / SAMPLES)
    write_family(tmp_path / "opt", "opt", **OPT)
    for name in PACKED:
        os.rename(new_run(tmp_path, packed_spec(tmp_path, name)).path, tmp_path / name)
    assert run_ranks([packed_leg], tmp_path)["packed_leg"][0] == ["failed", "done", "done"]
    error = of_kind(list(read_events(tmp_path / "refused" / "events.jsonl")), "run_finished")[-1]["error"]
    assert 'fix: set data.packing = false, or parallel.strategy = "replicated"' in error
