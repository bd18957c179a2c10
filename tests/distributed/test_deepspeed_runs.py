"""Whole runs through DeepSpeed: evaluated, saved, gone on with by others, through killed ranks and memory that ran out.

Real where deepspeed is installed (its CPU accelerator, gloo), left out elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.distributed.ranks import ALONE, Ranks
from engine.journal.directory import RunDirectory
from engine.journal.events import read_events
from engine.spec.load import dump_run_spec
from engine.spec.schema.run import RunSpec
from engine.train.main import run_first, run_other
from tests.distributed.crew import run_crew
from tests.distributed.legs import leg_spec, run_leg
from tests.distributed.steps import FULL, LORA, SAMPLES, sharded, small_model, spec_of
from tests.distributed.supervised import engine_ends, rank_process, wait_for_step
from tests.distributed.zero_cases import WIDTH, deepspeed, needs_deepspeed
from tests.train.harness import losses, new_run, of_kind, train, write_samples

pytestmark = needs_deepspeed

ALIKE: dict[str, Any] = {"weight_decay": 0.1, "max_grad_norm": 0.5}
ZERO_2, ZERO_3 = deepspeed({}, "gradients"), deepspeed({}, "parameters")
SHARDS = sharded({}, "parameters", **ALIKE)
KINDS = {"full": FULL, "lora": LORA}
LEGS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (2, 2, ZERO_3), (1, 3, ZERO_3), (2, 4, ZERO_2), (2, 5, SHARDS), (2, 6, ZERO_3),
)  # fmt: skip
"""(ranks, the step they go to, how they share): each goes on where the one before stopped."""


def spec_for(folder: Path, kind: str, ranks: int, last_step: int, how: dict[str, Any]) -> RunSpec:
    """Of one kind of run on one of its legs."""
    tables = small_model(folder, {**how, **KINDS[kind]}, width=WIDTH)
    evaluation = {"every_steps": 1, "metrics": ["loss"], "samples": int(how is ZERO_2)}
    return leg_spec(folder, ranks, tables, last_step, evaluation)


def go_on(ranks: Ranks, folder: Path, leg: int) -> list[str]:
    """Every kind's run, on this leg of it; how each ended."""
    size, last_step, how = LEGS[leg]
    specs = {kind: spec_for(folder, kind, size, last_step, how) for kind in KINDS}
    return run_leg(ranks, folder, specs, resume=leg > 0)


def first_legs(ranks: Ranks, folder: Path) -> Any:
    return go_on(ranks, folder, 0)


def last_legs(ranks: Ranks, folder: Path) -> Any:
    return [go_on(ranks, folder, leg) for leg in (2, 3, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_samples(folder / SAMPLES)
    return folder


Runs = dict[str, tuple[RunDirectory, RunDirectory]]


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    """By kind: the run in legs, and the straight one of one process."""
    done, found = ["done"] * len(KINDS), {}
    for kind in KINDS:
        os.rename(new_run(folder, spec_for(folder, kind, 1, 1, ZERO_3)).path, folder / kind)
    assert run_crew([first_legs], folder)["first_legs"][0] == done
    assert go_on(ALONE, folder, 1) == done
    assert run_crew([last_legs], folder)["last_legs"][0] == [done] * 3
    for kind in KINDS:
        straight = new_run(folder / "straight", spec_for(folder, kind, 1, LEGS[-1][1], ZERO_3))
        assert run_first(spec_for(folder, kind, 1, LEGS[-1][1], ZERO_3), straight, ALONE, False, None)[0] == "done"
        found[kind] = RunDirectory(folder / kind), straight
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_between_stages_strategies_and_rank_counts_on_one_curve(kind: str, runs: Runs) -> None:
    legs, whole = (losses(list(read_events(place.events))) for place in runs[kind])
    assert len(whole) == LEGS[-1][1]
    assert legs == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_give_the_losses_of_one_process(kind: str, runs: Runs) -> None:
    legs, whole = (
        {event["step"]: event["metrics"]["loss"] for event in of_kind(list(read_events(place.events)), "eval")}
        for place in runs[kind]
    )
    assert len(whole) == LEGS[-1][1]
    assert legs == pytest.approx(whole, rel=1e-5)


def test_results_are_those_of_one_process_and_open_with_transformers(runs: Runs) -> None:
    (legs, whole) = (AutoModelForCausalLM.from_pretrained(place.model).state_dict() for place in runs["full"])
    pairs = {name: (legs[name], whole[name]) for name in legs.keys() | whole.keys()}
    adapters = [load_file(place.adapter / "adapter_model.safetensors") for place in runs["lora"]]
    pairs |= {name: (adapters[0][name], adapters[1][name]) for name in adapters[0].keys() | adapters[1].keys()}
    for here, there in pairs.values():
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


def test_the_journal_says_what_deepspeed_does_not_promise(runs: Runs) -> None:
    said = of_kind(list(read_events(runs["full"][0].events)), "warning")
    (promise,) = (each["text"] for each in said if each["code"] == "deepspeed")
    assert "ends the attempt on all" in promise


LAST_STEP = 8
LIMIT_SECONDS = 1200.0
"""For several starts of two processes that import deepspeed."""


def in_bfloat16(ranks: Ranks, folder: Path) -> Any:
    """Losses of a straight run and of one that stops half-way: weights narrower than the copies that learn."""
    found = []
    for name, stops in (("narrow", (2, 4)), ("narrow-straight", (4,))):
        place = RunDirectory(folder / name)
        for number, last_step in enumerate(stops):
            spec = spec_for(folder, "full", 2, last_step, ZERO_3)
            model = spec.recipe.model.model_copy(update={"dtype": "bfloat16"})
            spec = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"model": model})})
            if ranks.is_first:
                place.checkpoints.mkdir(parents=True, exist_ok=True)
                place.control.mkdir(exist_ok=True)
                place.run_toml.write_text(dump_run_spec(spec))
                assert run_first(spec, place, ranks, number > 0, None)[0] == "done"
            else:
                run_other(spec, place, ranks, number > 0, None)
        found.append(losses(list(read_events(place.events))) if ranks.is_first else {})
    return found


def test_fp32_copies_of_bfloat16_weights_are_saved_and_come_back(folder: Path) -> None:
    stopped, straight = run_crew([in_bfloat16], folder)["in_bfloat16"][0]
    assert list((folder / "narrow" / "checkpoints").glob("*/masters/*.safetensors"))
    assert len(straight) == 4
    assert stopped == straight


def uneven(path: Path) -> Path:
    """Samples of which the first three, which make the first step, are longest: one to rank 0, two to rank 1, together
    dearer than the one."""
    lengths = [40, 34, 33, *([12] * 21)]
    path.write_text("".join(
        json.dumps({"prompt": "a", "completion": "bcd "[number % 4] * (length - 3)}) + "\n"
        for number, length in enumerate(lengths)
    ))
    return path


def supervised(folder: Path, ranks: int, last_step: int, *, memory_bytes: int = 2**30) -> RunSpec:
    tables = small_model(folder, {**ZERO_2, **LORA}, width=WIDTH)
    tables["train"] = {
        **tables["train"], "batch_size": 3, "max_steps": last_step, "epochs": 10.0, "scheduler": "constant",
        "warmup_steps": 0,
    }  # fmt: skip
    samples = str(uneven(folder / "uneven.jsonl"))
    tables |= {
        "data": {"sources": [{"name": "main", "path": samples}], "shuffle": False},
        "checkpoint": {"every_steps": 2, "every_minutes": 0},
    }
    spec = spec_of(folder, ranks, tables)
    device = spec.profile.device.model_copy(update={"memory_gib": memory_bytes / 2**30})
    parallel = spec.profile.parallel.model_copy(update={"timeout_seconds": 120.0})
    profile = spec.profile.model_copy(update={"device": device, "parallel": parallel})
    return spec.model_copy(update={"profile": profile})


def told(place: RunDirectory) -> list[dict[str, Any]]:
    return list(read_events(place.events))


@pytest.fixture(scope="module")
def survivor(folder: Path) -> RunDirectory:
    """A run whose rank 1 is killed; which then goes on with so little memory that rank 1 runs out of it."""
    place = new_run(folder / "survivor", supervised(folder, 2, LAST_STEP // 2))

    def strike() -> None:
        wait_for_step(place, 3, LIMIT_SECONDS)
        rank_process(place, 1).send_signal(signal.SIGKILL)

    assert engine_ends(place, meanwhile=strike, limit_seconds=LIMIT_SECONDS) == 0
    first_step = next(event for event in of_kind(told(place), "step") if event["step"] == 1)
    peaks = [rank["peak_bytes"] for rank in first_step["ranks"]]
    assert peaks[0] < peaks[1]
    place.run_toml.write_text(dump_run_spec(supervised(folder, 2, LAST_STEP, memory_bytes=sum(peaks) // 2)))
    assert engine_ends(place, resume=True, limit_seconds=LIMIT_SECONDS) == 0
    return place


def test_a_killed_rank_and_memory_that_runs_out_on_one_rank_restart_the_run_on_its_curve(
    folder: Path, survivor: RunDirectory
) -> None:
    code, events = train(new_run(folder / "undisturbed", supervised(folder, 1, LAST_STEP)))
    assert code == 0
    assert len(losses(events)) == LAST_STEP
    assert losses(told(survivor)) == pytest.approx(losses(events), rel=1e-5)


def test_memory_that_runs_out_on_one_rank_is_told_once_and_leaves_smaller_micro_batches(
    survivor: RunDirectory,
) -> None:
    killed, ran_out = (each["text"] for each in of_kind(told(survivor), "warning") if each["code"] == "rank_lost")
    assert "rank 1 was killed" in killed
    assert "rank 1 ran out of memory, which under DeepSpeed takes a new attempt; restart 1 of 3" in ran_out
    (backoff,) = of_kind(told(survivor), "backoff")
    assert (backoff["failed_rank"], backoff["remedy"]) == (1, "cut")
    assert backoff["after"] < backoff["before"]
    assert of_kind(told(survivor), "resumed")[-1]["step"] == LAST_STEP // 2
