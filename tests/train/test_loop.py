"""What happens between steps: evaluation, early stopping, the best checkpoint, time, hooks, and ways to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.batching.budget import MicroBatchBudget
from engine.evaluate.context import EvaluationContext
from engine.evaluate.scores import evaluate
from engine.journal.checkpoints_on_disk import best_step, find_checkpoints
from engine.journal.directory import RunDirectory
from tests.present import metered, present
from tests.train.run_helpers import Event, Workshop, losses, make_spec, new_run, of_kind, train, write_samples


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "samples.jsonl")


def run(
    tmp_path: Path, samples: Path, *, limits: dict[str, Any] | None = None, **tables: Any
) -> tuple[RunDirectory, int, list[Event]]:
    spec = make_spec(samples, **tables)
    if limits:
        spec = spec.model_copy(update={"limits": spec.limits.model_copy(update=limits)})
    place = new_run(tmp_path / "runs", spec)
    code, events = train(place)
    return place, code, events


def test_it_stops_early_when_nothing_improves_and_keeps_the_best(tmp_path: Path, samples: Path) -> None:
    place, code, events = run(
        tmp_path,
        samples,
        data={"valid_fraction": 0.2},
        train={"max_steps": 60, "learning_rate": 3e-2, "warmup_steps": 0},
        eval={"every_steps": 2, "early_stopping_patience": 2},
        checkpoint={"result": "best", "keep": 1},
    )
    assert code == 0
    scores = {event["step"]: event["metrics"]["loss"] for event in of_kind(events, "eval")}
    best = min(scores, key=lambda step: scores[step])
    assert max(scores) == best + 4 < 60
    assert best_step(place.checkpoints) == best
    assert of_kind(events, "run_finished")[0]["reason"] == "early stopping"
    result = load_file(place.model / "model.safetensors")
    kept = load_file(place.checkpoint(best) / "weights" / "model.safetensors")
    assert all(torch.equal(result[name], kept[name]) for name in kept)


def test_keep_bounds_the_checkpoints(tmp_path: Path, samples: Path) -> None:
    place, _, events = run(tmp_path, samples, checkpoint={"every_steps": 1, "keep": 2})
    assert len(of_kind(events, "checkpoint_saved")) == 6
    assert [checkpoint.step for checkpoint in find_checkpoints(place.checkpoints)] == [6, 5]


def test_checkpoints_come_by_time_too(tmp_path: Path, samples: Path) -> None:
    _, _, events = run(tmp_path, samples, checkpoint={"every_minutes": 1e-9})
    assert [event["reason"] for event in of_kind(events, "checkpoint_saved")] == ["every_minutes"] * 6


def test_max_hours_ends_with_a_checkpoint_and_130(tmp_path: Path, samples: Path) -> None:
    place, code, events = run(tmp_path, samples, limits={"max_hours": 1e-9})
    assert code == 130
    assert of_kind(events, "run_finished")[0]["reason"] == "max_hours reached"
    assert find_checkpoints(place.checkpoints)


def test_on_finish_runs_the_users_command_with_run_and_status(tmp_path: Path, samples: Path) -> None:
    told = tmp_path / "told"
    place, code, _ = run(
        tmp_path, samples, limits={"on_finish": f'printf "%s %s" "$TUNEDECK_STATUS" "$TUNEDECK_RUN" > {told}'}
    )
    assert code == 0
    assert told.read_text() == f"done {place.path}"


def test_a_loss_that_is_not_finite_ends_with_7_and_is_never_applied(tmp_path: Path, samples: Path) -> None:
    place, code, events = run(
        tmp_path, samples, train={"optimizer": "sgd", "learning_rate": 1e30, "max_grad_norm": 0.0, "warmup_steps": 0}
    )
    assert code == 7
    finished = of_kind(events, "run_finished")[0]
    assert (finished["status"], finished["result"]) == ("failed", None)
    assert "not applied" in finished["error"]
    assert not place.model.exists()
    assert find_checkpoints(place.checkpoints)[0].step == max(losses(events))


def test_one_sequence_that_never_fits_ends_with_4_and_names_what_would_help(tmp_path: Path, samples: Path) -> None:
    place, code, events = run(tmp_path, samples, memory_gib=0.0105)
    assert code == 4
    finished = of_kind(events, "run_finished")[0]
    assert finished["status"] == "oom"
    assert 'method.kind = "lora"' in finished["error"]
    assert of_kind(events, "backoff")[-1]["remedy"] == "give_up"
    assert not place.model.exists()


@pytest.mark.parametrize("allocation", [1, 40, 400, 800])
def test_evaluation_survives_and_counts_every_sample_once(tmp_path: Path, samples: Path, allocation: int) -> None:
    spec = make_spec(samples, data={"valid_fraction": 0.5}, generate={"max_new_tokens": 4})
    with Workshop(spec, tmp_path / "place") as setup:
        step, failures = setup.context, []
        held_out = present(setup.prepared.validation)
        budget = MicroBatchBudget(step.cost(4, 64), step.cost(4, 64))
        context = EvaluationContext(
            step.device,
            step.loaded,
            step.loss,
            step.cost,
            budget,
            spec.recipe.generate,
            lambda failed, *_: failures.append(failed.failure.phase),
        )
        undisturbed = evaluate(context, held_out, ["loss", "exact_match"], limit=None, samples=3)
        metered(step.device).fail_at(allocation)
        disturbed = evaluate(context, held_out, ["loss", "exact_match"], limit=None, samples=3)
        metered(step.device).fail_at(None)
    assert len(failures) == 1
    assert disturbed.count == undisturbed.count
    assert disturbed.samples == undisturbed.samples
    assert disturbed.metrics == pytest.approx(undisturbed.metrics, rel=1e-6)


def test_a_run_goes_on_from_an_earlier_adapter(tmp_path: Path, samples: Path) -> None:
    lora: dict[str, Any] = {"method": {"kind": "lora", "rank": 4}, "train": {"max_steps": 3}}
    first, code, _ = run(tmp_path, samples, **lora)
    assert code == 0
    again = {**lora, "model": {"id": f"run:{first.path}", "init": "pretrained"}}
    second, code, events = run(tmp_path, samples, **again)
    assert code == 0, of_kind(events, "run_finished")
    before, after = (load_file(place.adapter / "adapter_model.safetensors") for place in (first, second))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_adapter_opens_with_peft_and_the_run_directory_tells_all(tmp_path: Path, samples: Path) -> None:
    place, _, events = run(tmp_path, samples, method={"kind": "lora", "rank": 4})
    base = AutoModelForCausalLM.from_pretrained(place.adapter / "base")
    model = PeftModel.from_pretrained(base, place.adapter)
    assert any("lora_" in name for name, _ in model.named_parameters())
    finished = of_kind(events, "run_finished")[0]
    assert finished["result"] == "adapter"
    components = finished["measured"]["components"]
    assert components["adapters"] > 0
    assert components["optimizer"] >= 2 * components["adapters"]
    assert sum(components.values()) == finished["measured"]["peak_bytes"]
    numbers = [json.loads(line)["seq"] for line in place.events.read_text().splitlines()]
    assert numbers == list(range(1, len(events) + 1))
