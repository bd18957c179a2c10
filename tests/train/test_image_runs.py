"""Training on images: micro-batches, out-of-memory errors, the memory prediction, and what learns."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.architecture.lookup import find_architecture
from engine.batching.budget import MicroBatchBudget
from engine.budget.predict.prediction import Predictor
from engine.config.load import dump_run_spec
from engine.config.schema.recipe import Generate
from engine.evaluate.generation import generate
from engine.train.step.transaction import StepTransaction
from tests.train.fault_rig import STEP, UNITS, rigged
from tests.train.image_cases import IMAGE_CASES, LANGUAGE, TOWER, WRITERS, image_spec
from tests.train.run_helpers import Workshop, change_of_a_step, make_spec, new_run, of_kind, train
from tests.train.torture import sweep
from tests.vision_models import detection_source, write_boxes, write_qwen2_vl


def text_beside_images(folder: Path, images: int) -> dict[str, Any]:
    """The [data] of eight conversations, of which the first `images` have an image that `image_spec` draws."""
    path = folder / "data" / "mixed.jsonl"
    path.parent.mkdir()
    named = [f"images/{number}.png" if number < images else None for number in range(8)]
    rows = [{"prompt": "What?", "completion": f"x{number}", "image": image} for number, image in enumerate(named)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"sources": [{"name": "mixed", "path": str(path), "format": "image-chat"}]}


@pytest.mark.parametrize("family", WRITERS)
def test_any_split_into_micro_batches_gives_the_same_gradient(tmp_path: Path, family: str) -> None:
    plain = {"optimizer": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "batch_size": 8}
    spec = image_spec(tmp_path, family, train={**plain, "gradient_checkpointing": False})
    found = [change_of_a_step(spec, tmp_path / f"rows-{rows}", rows) for rows in (8, 3, 1)]
    (one, loss, gradient), *others = found
    assert one == 1 and [count for count, _, _ in others] == [3, 8]
    for _, other_loss, other in others:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert float((other - gradient).norm() / gradient.norm()) < 1e-6


def test_an_allocation_that_fails_anywhere_changes_nothing(tmp_path: Path) -> None:
    evaluation = next(unit for unit in UNITS if unit.name == "evaluation")
    with rigged(IMAGE_CASES[0], tmp_path) as rig:
        drawn = random.Random(5)
        tallies = [sweep(rig, unit, "images", faults, drawn) for unit, faults in ((STEP, 12), (evaluation, 4))]
    assert sum(tally.faults for tally in tallies) >= 16
    assert [text for tally in tallies for text in tally.wrong] == []


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_is_the_predicted_one(tmp_path: Path, family: str, checkpointing: bool) -> None:
    settings = {"max_steps": 2, "batch_size": 4, "micro_batch": 4, "gradient_checkpointing": checkpointing}
    code, events = train(new_run(tmp_path / "runs", image_spec(tmp_path, family, train=settings)))
    assert code == 0
    measured = of_kind(events, "run_finished")[0]["measured"]
    assert measured["predicted"]["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.02)


@pytest.mark.parametrize(
    "method", [{"kind": "lora", "rank": 4, "targets": [LANGUAGE, *TOWER]}, {"kind": "full"}], ids=["lora", "full"]
)
def test_the_plan_of_twenty_shapes_of_images_is_the_peak_and_their_cost_a_bound(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    drawn = random.Random(7)
    data = write_boxes(tmp_path / "data", count=40, sizes=tuple(
        (drawn.randint(56, 300), drawn.randint(56, 300)) for _ in range(40)
    ))  # fmt: skip
    model = str(write_qwen2_vl(tmp_path / "model", largest=260**2))
    spec = make_spec(
        data, model={"id": model, "tokenizer": model, "init": "pretrained"}, train={"batch_size": 8},
        method=method, data={"sources": [detection_source(data)], "max_length": 512},
    )  # fmt: skip
    with Workshop(spec, tmp_path / "run") as setup:
        context, predictor = setup.context, Predictor(find_architecture(setup.spec), setup.spec)
        context.budget = MicroBatchBudget(1 << 40, top_bytes=1 << 40, floor_tokens=1 << 20)
        transaction, static = StepTransaction(context), context.static_bytes
        for step in range(1, 21):
            samples = np.array(drawn.sample(range(len(context.data)), drawn.randint(1, 6)))
            outcome = transaction.run(step, samples)
            (shape,) = outcome.ran
            measured, planned = transaction.work.peak_bytes, predictor.predict_shape(shape)
            assert planned.peak_bytes == pytest.approx(measured, rel=0.02)
            cost = context.cost(shape.rows, shape.length, shape.patches)
            assert measured <= 1.02 * (static + cost)
            assert cost <= context.cost(shape.rows, shape.length)


def test_validation_images_larger_than_those_of_training_are_no_surprise(tmp_path: Path) -> None:
    """Rows of validation as large as a step's would take more memory than there is."""
    model = str(write_qwen2_vl(tmp_path / "model", largest=260**2))
    small, large = (write_boxes(tmp_path / name, count=8, sizes=(size,)) for name, size in
                    (("small", (56, 56)), ("large", (260, 260))))  # fmt: skip
    spec = make_spec(
        small, memory_gib=0.0042, model={"id": model, "tokenizer": model, "init": "pretrained"},
        method={"kind": "lora", "rank": 4}, train={"max_steps": 1, "gradient_checkpointing": True},
        data={"sources": [detection_source(small)], "validation": [detection_source(large)], "max_length": 512},
    )  # fmt: skip
    code, events = train(new_run(tmp_path / "runs", spec))
    assert code == 0 and of_kind(events, "eval")
    assert not of_kind(events, "backoff")


@pytest.mark.parametrize(
    ("part", "learns"),
    [
        ("model.visual", lambda name: name.startswith("visual.")),
        ("model.language_model", lambda name: name.startswith("model.")),
    ],
    ids=["encoder", "language"],
)
def test_only_the_chosen_part_learns_and_the_result_opens_again(
    tmp_path: Path, part: str, learns: Callable[[str], bool]
) -> None:
    method = {"kind": "full", "train_only": [part]}
    spec = image_spec(tmp_path, method=method, train={"max_steps": 2, "batch_size": 4, "learning_rate": 1e-2})
    place = new_run(tmp_path / "runs", spec)
    assert train(place)[0] == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "qwen2_vl", place.model))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if learns(name)}
    assert (place.model / "preprocessor_config.json").is_file()
    again = image_spec(tmp_path, model={"id": f"run:{place.path}"}, train={"max_steps": 1, "batch_size": 4})
    assert train(new_run(tmp_path / "again", again))[0] == 0


@pytest.mark.parametrize(
    ("targets", "roots"),
    [(TOWER, {"visual"}), ("all-linear", {"language_model"}), ([LANGUAGE, *TOWER], {"visual", "language_model"})],
    ids=["tower", "language", "both"],
)
def test_adapters_are_where_the_recipe_puts_them_and_all_of_them_learn(
    tmp_path: Path, targets: str | list[str], roots: set[str]
) -> None:
    rate = {"max_steps": 2, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 0}
    place = new_run(tmp_path / "runs", image_spec(tmp_path, method={"kind": "lora", "targets": targets}, train=rate))
    assert train(place)[0] == 0
    assert (place.adapter / "preprocessor_config.json").is_file()
    adapters = load_file(place.adapter / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.model.").split(".")[0] for name in adapters} == roots
    assert all(bool(tensor.any()) for name, tensor in adapters.items() if "lora_B" in name)  # they begin as zeros


def test_a_tower_whose_samples_have_no_images_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    """The source has a format with images, but no row that is trained on has one."""
    part = {"kind": "full", "train_only": ["model.visual"]}
    spec = image_spec(tmp_path, method=part, data=text_beside_images(tmp_path, 0))
    code, events = train(new_run(tmp_path / "runs", spec))
    assert code == 5
    assert "no trainable parameter receives a gradient" in str(of_kind(events, "run_finished")[0])
    assert not [event for event in events if event.get("name") == "loading model"]


def test_a_tower_learns_where_some_samples_have_no_images(tmp_path: Path) -> None:
    settings = {"max_steps": 3, "batch_size": 4, "micro_batch": 1, "learning_rate": 1e-2}
    part = {"kind": "full", "train_only": ["model.visual"]}
    spec = image_spec(tmp_path, method=part, data=text_beside_images(tmp_path, 2), train=settings)
    code, events = train(new_run(tmp_path / "runs", spec))
    assert code == 0
    assert not of_kind(events, "backoff")


def test_a_run_goes_on_with_its_images_and_not_with_others(tmp_path: Path) -> None:
    steady = {"batch_size": 4, "learning_rate": 1e-2, "scheduler": "constant", "warmup_steps": 0}
    spec, first = (image_spec(tmp_path, train={**steady, "max_steps": steps}) for steps in (4, 2))
    whole, place = new_run(tmp_path / "whole", spec), new_run(tmp_path / "in two", first)
    assert train(whole)[0] == train(place)[0] == 0
    place.run_toml.write_text(dump_run_spec(spec))
    image = tmp_path / "data" / "images" / "0.png"
    own = image.read_bytes()
    image.write_bytes((image.parent / "4.png").read_bytes())  # of the same size, so that its tokens are the same
    code, events = train(place, resume=True)
    assert code == 2 and "different data" in str(of_kind(events, "run_finished")[-1])
    image.write_bytes(own)
    code, events = train(place, resume=True)
    assert code == 0 and of_kind(events, "resumed")[0]["step"] == 2
    expected, found = (load_file(each.model / "model.safetensors") for each in (whole, place))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_answers_about_images_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    with Workshop(image_spec(tmp_path), tmp_path / "run") as setup:
        data, loaded = setup.context.data, setup.context.loaded

        def answers(rows: list[int]) -> list[list[int]]:
            prompts = [data.split_question(row)[0] for row in rows]
            settings, images = Generate(max_new_tokens=6), partial(data.images_of, rows)
            return generate(loaded, prompts, rows, settings, images)

        loaded.model.eval()
        rows = [0, 1, 2]  # of three sizes
        assert len({len(data.split_question(row)[0]) for row in rows}) == 3
        together = answers(rows)
        assert together == [answers([row])[0] for row in rows]
