"""Training on images of families whose own processor is asked: what learns, resume, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.checks.run import problems_of_run
from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.data.images import ImageFacts
from engine.errors import UsageError
from engine.extras.simulate.batch import images_of_rows
from engine.model.decoder import require_images
from tests.nested_models import write_nested
from tests.own_processors import FAMILIES, write_own
from tests.train.run_helpers import (
    Workshop,
    change_of_a_step,
    losses,
    make_spec,
    new_run,
    of_kind,
    train,
)
from tests.vision_models import detection_source, write_boxes

SIZES = ((112, 84), (56, 112))


def spec_of(
    folder: Path, family: str, *, steps: int = 2, sizes: tuple[tuple[int, int], ...] = SIZES, **tables: Any
) -> RunSpec:
    """A run on four drawn images of `sizes`; `folder` holds its model and data, made at the first call."""
    model = folder / family
    if not model.exists():
        write_own(model, family)
    data = folder / "data" / "data.jsonl"
    if not data.exists():
        write_boxes(folder / "data", count=4, sizes=sizes)
    named = {"id": str(model), "tokenizer": str(model), "init": "pretrained", **tables.pop("model", {})}
    read = {"sources": [detection_source(data)], "max_length": 512, **tables.pop("data", {})}
    rate = {"batch_size": 4, "micro_batch": 2, "max_steps": steps, "learning_rate": 1e-2, "warmup_steps": 0,
            "scheduler": "constant", **tables.pop("train", {})}  # fmt: skip
    return make_spec(data, model=named, data=read, train=rate, **{"method": {"kind": "lora", "rank": 4}, **tables})


SAMPLE = ("qwen3_vl", "mistral3", "llava_next", "gemma4", "idefics3")
"""Families of `make test`: one for each way in which a processor hands over images. `make torture` resumes all."""


@pytest.mark.parametrize(
    "family", [family if family in SAMPLE else pytest.param(family, marks=pytest.mark.torture) for family in FAMILIES]
)
def test_a_resumed_run_ends_with_the_adapter_of_one_without_interruption(family: str, tmp_path: Path) -> None:
    whole, legs = (
        new_run(tmp_path / name, spec_of(tmp_path, family, steps=steps)) for name, steps in (("a", 3), ("b", 2))
    )
    assert train(whole)[0] == 0
    assert train(legs)[0] == 0
    legs.run_toml.write_text(dump_run_spec(spec_of(tmp_path, family, steps=3)))
    code, events = train(legs, resume=True)
    assert code == 0 and of_kind(events, "resumed") and len(losses(events)) == 3
    assert losses(events)[3] < losses(events)[1]
    one, other = (load_file(place.adapter / "adapter_model.safetensors") for place in (whole, legs))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", ["mistral3", "llava_next"])
def test_any_split_into_micro_batches_gives_the_same_gradient(family: str, tmp_path: Path) -> None:
    """Also where a processor pads images to the largest of a micro-batch."""
    plain = {"optimizer": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "gradient_checkpointing": False}
    spec = spec_of(tmp_path, family, train=plain)
    (_, loss, gradient), (_, other_loss, other) = (
        change_of_a_step(spec, tmp_path / f"rows-{rows}", rows) for rows in (4, 1)
    )
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert float((other - gradient).norm() / gradient.norm()) < 1e-5


ANSWERS: dict[str, Any] = {
    "eval": {"metrics": ["loss", "exact_match"], "samples": 2}, "generate": {"max_new_tokens": 3},
    "data": {"valid_fraction": 0.5},
}  # fmt: skip


def test_a_trained_model_is_trained_on_from_its_run_and_answers(tmp_path: Path) -> None:
    place = new_run(tmp_path / "runs", spec_of(tmp_path, "mistral3", method={"kind": "full"}, **ANSWERS))
    code, events = train(place)
    assert code == 0 and of_kind(events, "eval")
    assert {"preprocessor_config.json", "processor_config.json"} <= {path.name for path in place.model.iterdir()}
    again = spec_of(tmp_path, "mistral3", model={"id": f"run:{place.path}", "tokenizer": None})
    assert train(new_run(tmp_path / "again", again))[0] == 0


def test_a_model_that_does_not_see_its_image_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with Workshop(spec_of(tmp_path, "llava"), tmp_path / "run") as setup:
        loaded = setup.context.loaded
        require_images(loaded)
        with torch.no_grad():
            loaded.base.model.multi_modal_projector.linear_2.weight.zero_()
            loaded.base.model.multi_modal_projector.linear_2.bias.fill_(0.1)
        with pytest.raises(UsageError, match="gives the same output for two different images"):
            require_images(loaded)


def test_a_processor_that_does_not_fit_its_model_is_refused_before_the_first_step(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "mistral3")
    (tmp_path / "mistral3" / "processor_config.json").write_text('{"patch_size": 14, "spatial_merge_size": 1}')
    code, events = train(new_run(tmp_path / "runs", spec))
    assert code != 0
    assert "fails on the output of its processor for an image" in str(of_kind(events, "run_finished")[0])


@pytest.mark.parametrize(
    ("family", "words"),
    [("llama4", "only be read with torchvision"), ("cohere2_vision", "only be read with torchvision")],
)
def test_images_without_a_processor_are_refused_before_a_run(family: str, words: str, tmp_path: Path) -> None:
    model = write_nested(tmp_path / family, family)
    assert any(words in problem for problem in problems_of_run(spec_of(tmp_path, family)))
    assert model.is_dir()


PLANNED: dict[str, dict[str, Any]] = {"qwen3_vl": {"method": {"kind": "lora", "rank": 4}, **ANSWERS}}


@pytest.mark.parametrize("family", PLANNED)
def test_a_run_on_images_is_planned_as_it_is_measured(family: str, tmp_path: Path) -> None:
    """Also of images smaller than that with which it was simulated, which every second row has."""
    spec = spec_of(tmp_path, family, **PLANNED[family])
    code, events = train(new_run(tmp_path / "runs", spec))
    measured = events[-1]["measured"]
    assert code == 0
    assert measured["predicted"]["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.02)
    images = images_of_rows(spec)
    assert images is not None
    sizes = [ImageFacts(height, width, 0) for width, height in SIZES]
    assert images.parts == max(images.processor.expansion(size).count(images.processor.token_id) for size in sizes)


def test_images_that_are_filled_up_with_empty_patches_have_no_plan(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pads images with empty patches"):
        images_of_rows(spec_of(tmp_path, "gemma4"))


def simulated_images(spec: RunSpec) -> int:
    """Tokens of images of a simulated row."""
    images = images_of_rows(spec)
    assert images is not None
    return images.parts


def test_a_plan_assumes_the_largest_image_that_a_row_holds_until_the_data_are_read(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "qwen3_vl", data={"max_length": 14})
    assert 9 <= simulated_images(spec) <= 14
    assert simulated_images(spec_of(tmp_path, "qwen3_vl")) == 16
    assert images_of_rows(spec_of(tmp_path, "qwen3_vl", data={"sources": [text_source(tmp_path)]})) is None
    with pytest.raises(UsageError, match="no image fits into 3 tokens"):
        images_of_rows(spec_of(tmp_path, "idefics3", data={"max_length": 3}))


def text_source(folder: Path) -> dict[str, Any]:
    (folder / "text.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return {"name": "text", "path": str(folder / "text.jsonl")}
