"""The twin of qwen2-vl-detect: language, vision, one after the other, and both at once, on images of one size."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from engine.config.stages import enabled_stages, stage_specs
from engine.evaluate.run import score_run
from engine.extras.stages.create_stage import create_or_update_stage
from engine.journal.directory import RunDirectory
from engine.journal.stages import stage_directories, stage_directory, stage_name
from engine.model.reference import base_of_adapter
from tests.stages.staged_runs import new_staged_run, weights_of
from tests.train.run_helpers import change_of_a_step, make_spec, new_run, train
from tests.twins.twin import twin
from tests.vision_models import detection_source, write_qwen2_vl

RECIPE = "qwen2-vl-detect"
STAGES = ["language", "vision", "two-stage", "joint"]
SIDE = 56
"""Pixels along a side of every image. All have one size, so that pixels of another row would fit as well."""
CORNERS = [(0.2, 0.2), (0.4, 0.2), (0.2, 0.4), (0.4, 0.4)]
"""Left and top of the boxes, whose sides are BOX long."""
BOX = 0.4
COLOURS = [(230, 60, 60), (60, 230, 60), (60, 60, 230), (230, 230, 60)]
"""The background of an image tells which of CORNERS its box has."""


class Chain(NamedTuple):
    folder: Path
    run: RunDirectory


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The four stages as a run has them, but all trained by this process: starting each takes longer than its steps."""
    folder = tmp_path_factory.mktemp("detect")
    write_images(folder / "train.jsonl", count=32, seed=1)
    write_images(folder / "val.jsonl", count=4, seed=2)
    write_detector(folder)
    spec = twin(RECIPE, folder)
    run = new_staged_run(folder, spec)
    for number, stage in enabled_stages(spec.recipe):
        directory = stage_directory(run, number, stage.name)
        create_or_update_stage(spec, run, stage, directory)
        assert train(directory)[0] == 0
    return Chain(folder, run)


def write_images(path: Path, *, count: int, seed: int, shift: int = 0) -> None:
    """Write `count` images with one box each. Each row has the image of the row `shift` places after it, and its own
    box."""
    drawn, images = random.Random(seed), path.parent / "images"
    images.mkdir(exist_ok=True)
    rows = []
    for number in range(count):
        (left, top), colour = CORNERS[number % len(CORNERS)], COLOURS[number % len(COLOURS)]
        image = Image.new("RGB", (SIDE, SIDE), tuple(level + drawn.randint(-20, 20) for level in colour))
        corners = tuple(SIDE * share for share in (left, top, left + BOX, top + BOX))
        ImageDraw.Draw(image).rectangle(corners, fill=(drawn.randint(0, 70),) * 3)
        image.save(images / f"{path.stem}-{number}.png")
        shown = f"images/{path.stem}-{(number + shift) % count}.png"
        boxes = {"bbox": [[top, left, top + BOX, left + BOX]], "category_name": ["table"]}
        rows.append({"image": shown, "objects": boxes})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_detector(folder: Path) -> None:
    """Write folder/model: a tiny Qwen2-VL that has learned to read boxes off the images, as the model of the recipe
    has before it is trained."""
    drawn = write_qwen2_vl(folder / "untrained", largest=SIDE**2)
    spec = make_spec(
        folder / "train.jsonl", device="cpu",
        model={"id": str(drawn), "tokenizer": str(drawn), "init": "pretrained"},
        data={"sources": [detection_source(folder / "train.jsonl", prompt="Detect the nutrition table.")],
              "max_length": 256},
        train={"max_steps": 100, "batch_size": 8, "micro_batch": 8, "learning_rate": 6e-3, "warmup_steps": 5,
               "gradient_checkpointing": False},
    )  # fmt: skip
    run = new_run(folder / "made", spec)
    assert train(run)[0] == 0
    run.model.rename(folder / "model")


def stage_of(chain: Chain, name: str) -> RunDirectory:
    return next(stage for stage in stage_directories(chain.run) if stage_name(stage) == name)


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Intersection over union of two boxes with sides of BOX, by their left and top."""
    wide, high = (max(0.0, BOX - abs(here - there)) for here, there in zip(one, other, strict=True))
    return wide * high / (2 * BOX**2 - wide * high)


def test_vision_changes_every_tensor_of_the_encoder_and_no_other(chain: Chain) -> None:
    stage = stage_of(chain, "vision")
    after = weights_of(stage)
    before = {name: tensor.bfloat16() for name, tensor in load_file(chain.folder / "model/model.safetensors").items()}
    encoder = {name for name in before if name.startswith("visual.")}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed and changed <= encoder
    # Beside a weight in bf16 the optimizer keeps what rounding dropped, at first nothing: it shows the smallest change.
    (newest,) = [path for path in stage.checkpoints.glob("step-*") if path.is_dir()]
    dropped = {name: t for name, t in load_file(newest / "optimizer.safetensors").items() if name.endswith("remainder")}
    assert len(dropped) == len(encoder) and all(bool(tensor.any()) for tensor in dropped.values())


def test_language_and_joint_have_adapters_where_the_recipe_puts_them_and_all_learn(chain: Chain) -> None:
    roots = {"language": {"language_model"}, "two-stage": {"language_model"}, "joint": {"language_model", "visual"}}
    for name, expected in roots.items():
        adapters = weights_of(stage_of(chain, name))
        assert {key.removeprefix("base_model.model.model.").split(".")[0] for key in adapters} == expected
        assert all(bool(tensor.any()) for key, tensor in adapters.items() if "lora_B" in key)  # they begin as zeros


def test_two_stage_goes_on_from_the_result_of_vision(chain: Chain) -> None:
    base, _ = base_of_adapter(stage_of(chain, "two-stage").adapter)
    assert Path(base) == stage_of(chain, "vision").model


def test_with_the_images_of_other_rows_it_is_no_better_than_the_mean_box(chain: Chain, tmp_path: Path) -> None:
    run = stage_of(chain, "joint")
    scores = []
    for shift in (0, 1):
        write_images(chain.folder / "val.jsonl", count=4, seed=2, shift=shift)
        ((_, found),) = score_run(run, None, lambda text: None)
        scores.append(found.metrics)
    own, swapped = scores
    middle = tuple(sum(corner[axis] for corner in CORNERS) / len(CORNERS) for axis in (0, 1))
    guess = sum(overlap(corner, (middle[0], middle[1])) for corner in CORNERS) / len(CORNERS)
    assert own["detection_rate"] == swapped["detection_rate"] == 1.0
    assert own["mean_iou"] > guess + 0.4
    assert swapped["mean_iou"] <= guess < 0.4


@pytest.mark.parametrize("stage", ["vision", "joint"])
def test_micro_batches_of_one_two_and_four_have_one_gradient(chain: Chain, tmp_path: Path, stage: str) -> None:
    """The model has not learned: gradients of rows cancel where a loss is small, and rounding counts more."""
    plain = [
        f"model.id={chain.folder / 'untrained'}", "model.dtype=float32", "train.optimizer=sgd",
        "train.max_grad_norm=0", "train.batch_size=4",
        "train.learning_rate=100.0", "stages.vision.train.learning_rate=100.0",
    ]  # fmt: skip
    spec = stage_specs(twin(RECIPE, chain.folder, *plain))[STAGES.index(stage)]
    found = [change_of_a_step(spec, tmp_path / f"rows-{rows}", rows) for rows in (1, 2, 4)]
    assert [count for count, _, _ in found] == [4, 2, 1]
    *others, (_, loss, gradient) = found
    for _, other_loss, other in others:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert float((other - gradient).norm() / gradient.norm()) < 1e-6
