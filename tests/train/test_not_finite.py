"""Numbers that are not finite: an overflow in fp16 skips the step and lowers the loss scale; a loss that is not finite
ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.schema.run import RunSpec
from engine.journal.directory import RunDirectory
from tests.train.run_helpers import losses, make_spec, new_run, of_kind, train, write_samples


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a model that a short run has trained."""
    samples = write_samples(tmp_path / "first.jsonl")
    place = new_run(tmp_path / "first", make_spec(samples, train={"max_steps": 1}))
    assert train(place)[0] == 0
    return place.model


def change(model: Path, name: str, factor: float) -> None:
    """Multiply the tensor `name` of the folder's weights by `factor`."""
    path = model / "model.safetensors"
    weights = load_file(path)
    weights[name] = weights[name] * factor
    save_file(weights, path, {"format": "pt"})


def spec_of(tmp_path: Path, model: Path, dtype: str, **tables: Any) -> RunSpec:
    samples = write_samples(tmp_path / "samples.jsonl")
    asked = {"id": str(model), "tokenizer": str(model), "init": "pretrained", "dtype": dtype}
    return make_spec(samples, model=asked, **tables)


def steep(tmp_path: Path, model: Path, **tables: Any) -> RunSpec:
    """An fp16 run whose gradients overflow at the initial loss scale."""
    change(model, "model.norm.weight", 60.0)
    return spec_of(tmp_path, model, "float16", checkpoint={"every_steps": 1, "keep": 99}, **tables)


def optimizer_state(place: RunDirectory, step: int) -> dict[str, torch.Tensor]:
    return load_file(place.checkpoint(step) / "optimizer.safetensors")


def test_an_overflow_skips_its_step_and_halves_the_scale_until_gradients_fit(tmp_path: Path, model: Path) -> None:
    place = new_run(tmp_path / "runs", steep(tmp_path, model))
    code, events = train(place)
    assert code == 0
    steps = of_kind(events, "step")
    skipped = [event for event in steps if event["skipped"]]
    assert skipped
    assert steps[: len(skipped)] == skipped
    assert [event["loss_scale"] for event in skipped] == [2.0 ** (15 - number) for number in range(len(skipped))]
    assert all(event["samples"] == 0 for event in skipped)
    finished = of_kind(events, "run_finished")[0]
    assert finished["samples_lost"] == sum(8 for _ in skipped)
    untouched = optimizer_state(place, len(skipped))
    assert all(not tensor.any() for tensor in untouched.values())
    assert any(tensor.any() for tensor in optimizer_state(place, len(skipped) + 1).values())


def test_a_resumed_run_goes_on_with_the_scale_it_had(tmp_path: Path, model: Path) -> None:
    spec = steep(tmp_path, model)
    _, whole = train(new_run(tmp_path / "whole", spec))
    place = new_run(tmp_path / "broken", spec)
    train(place)
    for step in (4, 5, 6):
        (place.checkpoint(step) / "manifest.json").unlink()
    _, events = train(place, resume=True)
    assert losses(events) == losses(whole)
    again, expected = of_kind(events, "step")[6:], of_kind(whole, "step")[3:]
    assert [event["loss_scale"] for event in again] == [event["loss_scale"] for event in expected]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_loss_that_is_not_a_number_is_never_applied_and_never_taken_for_an_overflow(
    tmp_path: Path, model: Path, dtype: str
) -> None:
    absurd = {"learning_rate": 1e30, "warmup_steps": 0}
    place = new_run(tmp_path / "runs", spec_of(tmp_path, model, dtype, train=absurd, checkpoint={"every_steps": 1}))
    code, events = train(place)
    assert code == 7
    assert [event["step"] for event in of_kind(events, "step")] == [1]
    assert "the loss of step 2 is nan; the step was not applied" in of_kind(events, "run_finished")[0]["error"]
    assert not place.model.exists()
    assert [path.name for path in place.checkpoints.glob("step-*")] == ["step-00000001"]


def test_a_model_whose_own_logits_are_not_finite_is_refused_before_the_first_step(tmp_path: Path, model: Path) -> None:
    change(model, "model.norm.weight", float("nan"))
    place = new_run(tmp_path / "runs", spec_of(tmp_path, model, "float16"))
    code, events = train(place)
    assert code == 2
    assert "logits are not finite in torch.float16" in of_kind(events, "run_finished")[0]["error"]
